"""Tokenizer metadata for tests: small vocabularies made here, and the shared real ones."""

from pathlib import Path
from typing import Any

import numpy as np

from kvtrio.model.bpe import BYTE_ALPHABET

SEPARATOR = "\n__ggml_vocab_test__\n"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def tokenizer_keys(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def numbers(values: list[float], kind: type = np.int32) -> np.ndarray:
    return np.array(values, dtype=kind)


def byte_level(
    words: dict[str, int] | None = None, merges: list[str] | None = None, **more: Any
) -> dict[str, Any]:
    """All bytes, the results of ``merges``, then ``words`` (text to type) in order."""
    merges = merges or ["h e", "l l", "he ll", "hell o", "Ġ hello"]
    joined = [merge.replace(" ", "") for merge in merges]
    words = words or {"<s>": CONTROL, "</s>": CONTROL}
    tokens = [*BYTE_ALPHABET, *joined, *words]
    types = [NORMAL] * (len(tokens) - len(words)) + list(words.values())
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": numbers(types),
        "merges": merges,
    }
    return tokenizer_keys(**(keys | more))


def sentence_piece(pieces: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    """<unk>, <s>, </s>, the byte tokens, then ``pieces`` (text to score)."""
    pieces = pieces or {"▁": -9.0, "a": -8.0, "b": -8.0, "ab": -1.0, "▁a": -2.0, "▁ab": -3.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    keys: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "token_type": numbers(types),
        "scores": numbers([0.0] * 259 + list(pieces.values()), np.float32),
    }
    return tokenizer_keys(**(keys | more))


def vector_cases(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    """The texts of NAME.inp with the token ids of NAME.out."""
    with (folder / f"{name}.inp").open(encoding="utf-8", newline="") as file:
        texts = file.read().split(SEPARATOR)
    lines = (folder / f"{name}.out").read_text(encoding="utf-8").split("\n")
    if texts[-1] == "":  # most files end with a separator
        texts.pop()
    assert lines.pop() == ""
    return [
        (text, [int(token) for token in line.split()])
        for text, line in zip(texts, lines, strict=True)
    ]
