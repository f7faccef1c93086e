"""POST /tokenize, /detokenize, /apply-template: pure functions from body to answer."""

from typing import Any

from attrs import frozen

from kvtrio.serve.chat import chat_prompt
from kvtrio.serve.errors import WRONG_VALUE, ApiError
from kvtrio.serve.prompts import SHAPES, check_token_id, mixed_token_ids
from kvtrio.serve.schema import ChatBody, DetokenizeBody, TokenizeBody, parse
from kvtrio.serve.served import ServedModel, TextTokenizer
from kvtrio.serve.services import ServeSettings


@frozen
class Texts:
    """Every method takes the raw body and raises ``ApiError``."""

    model: ServedModel
    settings: ServeSettings

    def tokenize(self, raw: bytes) -> dict[str, Any]:
        body, tokenizer = parse(raw, TokenizeBody), self.model.tokenizer
        content = [] if body.content is None else body.content
        if not isinstance(content, str | list):
            raise ApiError(WRONG_VALUE, "content", expected=SHAPES)
        ids = mixed_token_ids(
            [content] if isinstance(content, str) else content,
            tokenizer,
            "content",
            add_special=bool(body.add_special),
            parse_special=body.parse_special is not False,
        )
        if not body.with_pieces:
            return {"tokens": ids}
        return {"tokens": [{"id": each, "piece": _piece(each, tokenizer)} for each in ids]}

    def detokenize(self, raw: bytes) -> dict[str, Any]:
        ids = parse(raw, DetokenizeBody).tokens or []
        for token_id in ids:
            check_token_id(token_id, self.model.tokenizer, "tokens")
        return {"content": self.model.tokenizer.decode(ids)}

    def apply_template(self, raw: bytes) -> dict[str, Any]:
        body = parse(raw, ChatBody)
        return {"prompt": chat_prompt(body, self.model, self.settings.clock())}


def _piece(token_id: int, tokenizer: TextTokenizer) -> str | list[int]:
    """Return the token's text, or its bytes where they are no text on their own."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
