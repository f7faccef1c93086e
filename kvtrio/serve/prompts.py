"""llama-server's many shapes of ``prompt``, as token ids."""

from typing import Any

from kvtrio.model.tokenizer import MAX_TEXT_CHARS, TextTooLong
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


def prompt_token_ids(prompt: Any, tokenizer: TextTokenizer) -> tuple[TokenIds, ...]:
    """Return one or more prompts; raises ``ApiError``.

    A string, a list of ids, a list of ids and strings mixed, or ``{"prompt_string": ...}`` is one
    prompt; a list of these is a batch. A list with an integer in it is always one prompt.
    """
    if prompt is None:
        raise ApiError(MISSING, "prompt")
    if not isinstance(prompt, list) or any(type(part) is int for part in prompt):
        return (_one(prompt, tokenizer),)
    if not prompt:
        raise ApiError(EMPTY_PROMPT)
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(TOO_MANY, "prompt", limit=MAX_PROMPTS)
    return tuple(_one(each, tokenizer) for each in prompt)


def _one(prompt: Any, tokenizer: TextTokenizer) -> TokenIds:
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
    ids = mixed_token_ids(parts, tokenizer, "prompt", add_special=True)
    if not any(parts) and not any(type(part) is int for part in parts):
        raise ApiError(EMPTY_PROMPT)
    return tuple(ids)


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
