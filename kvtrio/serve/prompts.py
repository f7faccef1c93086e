"""llama-server's many shapes of ``prompt``, as token ids."""

from collections.abc import Callable
from typing import Any

from attrs import frozen

from kvtrio.model.recall import Encoded, Recall, Spans
from kvtrio.model.tokenizer import MAX_TEXT_CHARS, TextTooLong
from kvtrio.serve.bounds import Bounds
from kvtrio.serve.errors import (
    EMPTY_PROMPT,
    MISSING,
    NOT_SUPPORTED,
    TEXT_TOO_LONG,
    TOO_MANY,
    UNKNOWN_TOKEN,
    WRONG_VALUE,
    ApiError,
)
from kvtrio.serve.schema import MAX_PROMPTS
from kvtrio.serve.served import TextTokenizer

TokenIds = tuple[int, ...]
SHAPES = "expected text, token ids, or a list of prompts"


@frozen(eq=False)
class Prompt:
    """A prompt's ids; ``encoded`` if it was one text whose answers are to be remembered."""

    ids: TokenIds
    encoded: Encoded | None = None


@frozen
class Reader:
    """Reads the texts of one request. Without ``recall`` every text is encoded as it comes."""

    tokenizer: TextTokenizer
    recall: Recall | None
    namespace: bytes
    """Of what is recalled."""
    bounds: Bounds

    def whole(self, text: str, field: str, answers: Callable[[], Spans] | None = None) -> Prompt:
        """Read a whole prompt: with the start token the model wants, special tokens parsed.

        ``answers``: as in ``Recall.encode``.
        """
        self.bounds.check_prompt([text], field)
        if self.recall is None:
            special = {"add_special": True, "parse_special": True}
            return Prompt(tuple(encode(text, self.tokenizer, field, **special)))
        try:
            encoded = self.recall.encode(self.namespace, text, answers)
        except TextTooLong:
            raise ApiError(TEXT_TOO_LONG, field, limit=MAX_TEXT_CHARS) from None
        return Prompt(encoded.ids, encoded)


def read_prompts(prompt: Any, reader: Reader) -> tuple[Prompt, ...]:
    """Return one or more prompts; raises ``ApiError``.

    A string, a list of ids, a list of ids and strings mixed, or ``{"prompt_string": ...}`` is one
    prompt; a list of these is a batch. A list with an integer in it is always one prompt.
    """
    if prompt is None:
        raise ApiError(MISSING, "prompt")
    if not isinstance(prompt, list) or any(type(part) is int for part in prompt):
        return (_one(prompt, reader),)
    if not prompt:
        raise ApiError(EMPTY_PROMPT)
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(TOO_MANY, "prompt", limit=MAX_PROMPTS)
    return tuple(_one(each, reader) for each in prompt)


def _one(prompt: Any, reader: Reader) -> Prompt:
    match prompt:
        case {"prompt_string": str(text)}:
            if prompt.get("multimodal_data"):
                raise ApiError(NOT_SUPPORTED, "prompt.multimodal_data")
            parts: list[Any] = [text]
        case str():
            parts = [prompt]
        case list():
            parts = prompt
        case _:
            raise ApiError(WRONG_VALUE, "prompt", expected=SHAPES)
    if not any(parts) and not any(type(part) is int for part in parts):
        raise ApiError(EMPTY_PROMPT)
    if len(parts) == 1 and isinstance(parts[0], str):
        return reader.whole(parts[0], "prompt")
    reader.bounds.check_prompt(parts, "prompt")
    return Prompt(tuple(mixed_token_ids(parts, reader.tokenizer, "prompt", add_special=True)))


def mixed_token_ids(
    parts: list[Any],
    tokenizer: TextTokenizer,
    field: str,
    *,
    add_special: bool,
    parse_special: bool = True,
) -> list[int]:
    """Return the ids of text and ids in a row; only text at the very start gets a start token."""
    ids: list[int] = []
    for place, part in enumerate(parts):
        if isinstance(part, str):
            special = add_special and place == 0
            ids += encode(part, tokenizer, field, add_special=special, parse_special=parse_special)
        elif type(part) is int:
            check_token_id(part, tokenizer, field)
            ids.append(part)
        else:
            raise ApiError(WRONG_VALUE, field, expected=SHAPES)
    return ids


def encode(
    text: str, tokenizer: TextTokenizer, field: str, *, add_special: bool, parse_special: bool
) -> list[int]:
    """Return the text's ids; raises ``ApiError`` for one that is too long for any model."""
    try:
        return tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
    except TextTooLong:
        raise ApiError(TEXT_TOO_LONG, field, limit=MAX_TEXT_CHARS) from None


def check_token_id(token_id: int, tokenizer: TextTokenizer, field: str) -> None:
    if not 0 <= token_id < tokenizer.vocab_size:
        raise ApiError(UNKNOWN_TOKEN, field, high=tokenizer.vocab_size - 1)
