"""Log-probabilities of tokens, in the shapes of both dialects.

The end-of-generation token has no entry: it is not part of the text, which so equals its tokens
joined.
"""

from collections.abc import Iterable
from typing import Any

from kvtrio.core.batch import Sampled
from kvtrio.serve.choice import Choice
from kvtrio.serve.served import TextTokenizer

LOWEST = -3.4028234663852886e38
"""What llama-server writes for log 0: the lowest float32."""


def entries(
    choice: Choice, sampled: Iterable[Sampled], tokenizer: TextTokenizer
) -> list[dict[str, Any]]:
    """Return one entry per token: llama-server's, which is OpenAI's chat shape and an ``id``."""
    return [
        {
            **_entry(token.token_id, token.logprob, tokenizer),
            "top_logprobs": [_entry(each, logprob, tokenizer) for each, logprob in token.top],
        }
        for token in sampled
        if token.token_id not in choice.job.eos_ids
    ]


def _entry(token_id: int, logprob: float | None, tokenizer: TextTokenizer) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token_id)
    return {
        "id": token_id,
        "token": piece.decode("utf-8", "replace"),
        "bytes": list(piece),
        "logprob": LOWEST if logprob is None else max(logprob, LOWEST),
    }


def text_shape(found: list[dict[str, Any]], offset: int) -> dict[str, Any]:
    """Return OpenAI's shape for text completions, beside llama-server's (``content``).

    ``offset``: where in the choice's text the first token stands, in characters.
    """
    offsets = [offset]
    for entry in found:
        offsets.append(offsets[-1] + len(entry["token"]))
    return {
        "tokens": [entry["token"] for entry in found],
        "token_logprobs": [entry["logprob"] for entry in found],
        "top_logprobs": [_by_token(entry["top_logprobs"]) for entry in found],
        "text_offset": offsets[:-1],
        "content": found,
    }


def _by_token(top: list[dict[str, Any]]) -> dict[str, float]:
    best: dict[str, float] = {}
    for entry in top:  # best first: of two tokens with one text, the better stands
        best.setdefault(entry["token"], entry["logprob"])
    return best
