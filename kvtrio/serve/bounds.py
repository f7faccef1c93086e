"""How much a request may bring. Checked before anything is made of it that takes time or memory.

1. No token stands for more bytes than the vocabulary's longest. A prompt's text is refused when
   even with that token alone it would not fit the context; its tokens are not counted for it.
2. A body of two megabytes can hold two million JSON values, at a hundred times its size. Their
   number is bounded while they are still bytes.
"""

import re
from collections.abc import Iterable
from typing import Any

from attrs import frozen

from kvtrio.serve.errors import (
    CONTEXT_SIZE,
    TOO_MANY,
    TOO_MANY_VALUES,
    TOO_MUCH_TEXT,
    ApiError,
)
from kvtrio.serve.served import TextTokenizer

BASE_VALUES = 2**16
VALUES_PER_TOKEN = 4
BASE_TEXT_BYTES = 2**20
TEXT_BYTES_PER_TOKEN = 16


@frozen(kw_only=True)
class Bounds:
    """Of one model and context."""

    n_ctx: int
    longest_token: int
    """Bytes."""

    @classmethod
    def of(cls, tokenizer: TextTokenizer, n_ctx: int) -> "Bounds":
        """Looks at every token: for the start of a server."""
        longest = max(len(tokenizer.token_bytes(each)) for each in range(tokenizer.vocab_size))
        return cls(n_ctx=n_ctx, longest_token=max(longest, 1))

    @property
    def max_values(self) -> int:
        """In one body, and in one answer that lists tokens: room for a few prompts made of ids."""
        return BASE_VALUES + VALUES_PER_TOKEN * self.n_ctx

    @property
    def max_text_bytes(self) -> int:
        """To tokenise for its own sake, where it does not have to fit the context."""
        return BASE_TEXT_BYTES + TEXT_BYTES_PER_TOKEN * self.n_ctx

    def check_prompt(self, parts: Iterable[Any], field: str) -> None:
        """Raise ``ApiError`` if text and ids in a row cannot but be too long."""
        least = sum(map(self._least_tokens, parts))
        if least >= self.n_ctx:
            raise ApiError(
                CONTEXT_SIZE, field, about="at least ", n_prompt_tokens=least, n_ctx=self.n_ctx
            )

    def _least_tokens(self, part: Any) -> int:
        if not isinstance(part, str):
            return 1
        return -(-_num_bytes(part) // self.longest_token)

    def check_texts(self, parts: Iterable[Any], field: str) -> None:
        """Raise ``ApiError`` for more text than is tokenised in one request."""
        num_bytes = sum(_num_bytes(part) for part in parts if isinstance(part, str))
        if num_bytes > self.max_text_bytes:
            raise ApiError(TOO_MUCH_TEXT, field, limit=self.max_text_bytes)

    def check_number(self, number: int, field: str) -> None:
        """Raise ``ApiError`` for more tokens than are told one by one."""
        if number > self.max_values:
            raise ApiError(TOO_MANY, field, limit=self.max_values)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


_MARKS = re.compile(rb'[,\[{]|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""What separates values, and strings, in which it does not. An unfinished string goes to the end:
so nothing is looked at twice."""


def check_values(body: bytes, limit: int) -> None:
    """Raise ``ApiError`` if JSON has more values than that; says nothing of what is not JSON."""
    # Every value but the first stands behind one of these. Mostly counting bytes is enough.
    if sum(map(body.count, (b",", b"[", b"{"))) < limit:
        return
    number = 0
    for mark in _MARKS.finditer(body):
        number += mark[0][:1] != b'"'
        if number >= limit:
            raise ApiError(TOO_MANY_VALUES, limit=limit)
