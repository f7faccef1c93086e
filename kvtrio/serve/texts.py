"""POST /tokenize, /detokenize, /apply-template: pure functions from body to body."""

from typing import TypeVar

from attrs import frozen

from kvtrio.serve.bounds import Bounds
from kvtrio.serve.chat import chat_outline
from kvtrio.serve.errors import WRONG_VALUE, ApiError
from kvtrio.serve.prompts import SHAPES, check_token_id, mixed_token_ids
from kvtrio.serve.replies import encode_json
from kvtrio.serve.schema import ChatBody, DetokenizeBody, TokenizeBody, parse
from kvtrio.serve.served import ServedModel, TextTokenizer
from kvtrio.serve.services import ServeSettings

T = TypeVar("T")


@frozen
class Texts:
    """Every method takes the raw body, returns the answer's and raises ``ApiError``."""

    model: ServedModel
    settings: ServeSettings
    bounds: Bounds

    def tokenize(self, raw: bytes) -> bytes:
        body, tokenizer = self._parsed(raw, TokenizeBody), self.model.tokenizer
        content = [] if body.content is None else body.content
        if not isinstance(content, str | list):
            raise ApiError(WRONG_VALUE, "content", expected=SHAPES)
        parts = [content] if isinstance(content, str) else content
        self.bounds.check_texts(parts, "content")
        ids = mixed_token_ids(
            parts,
            tokenizer,
            "content",
            add_special=bool(body.add_special),
            parse_special=body.parse_special is not False,
        )
        if not body.with_pieces:
            return encode_json({"tokens": ids})
        self.bounds.check_number(len(ids), "with_pieces")
        pieces = [{"id": each, "piece": _piece(each, tokenizer)} for each in ids]
        return encode_json({"tokens": pieces})

    def detokenize(self, raw: bytes) -> bytes:
        ids = self._parsed(raw, DetokenizeBody).tokens or []
        self.bounds.check_number(len(ids), "tokens")
        for token_id in ids:
            check_token_id(token_id, self.model.tokenizer, "tokens")
        return encode_json({"content": self.model.tokenizer.decode(ids)})

    def apply_template(self, raw: bytes) -> bytes:
        body = self._parsed(raw, ChatBody)
        outline = chat_outline(body, self.model, self.settings.clock())
        return encode_json({"prompt": outline.text})

    def _parsed(self, raw: bytes, kind: type[T]) -> T:
        return parse(raw, kind, self.bounds.max_values)


def _piece(token_id: int, tokenizer: TextTokenizer) -> str | list[int]:
    """Return the token's text, or its bytes where they are no text on their own."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
