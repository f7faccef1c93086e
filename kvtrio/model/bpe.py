"""Encoding with merge lists: GPT-2's byte alphabet, and Gemma 4's variant over characters."""

import re
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from kvtrio.model.errors import ModelFileError
from kvtrio.model.pretokenizers import PreTokenizer
from kvtrio.model.vocabulary import PREFIX, Vocabulary, read_strings

SPACE_MARK = "\u2581"
_LINES = re.compile(r"[^\n]+|\n+")


def _byte_alphabet() -> tuple[str, ...]:
    """The character that stands for each byte (GPT-2's ``bytes_to_unicode``): printable Latin-1
    for itself, the other 68 as U+0100 and up."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_ALPHABET = _byte_alphabet()
_TO_LATIN = {ord(char): byte for byte, char in enumerate(BYTE_ALPHABET)}
_OUTSIDE = re.compile(f"[^{re.escape(''.join(BYTE_ALPHABET))}]")


def alphabet_bytes(text: str) -> bytes:
    """Bytes of a token written in the byte alphabet; text with other characters is as it stands."""
    if _OUTSIDE.search(text):
        return text.encode("utf-8", "surrogateescape")
    return text.translate(_TO_LATIN).encode("latin-1")


def read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs in order of rank; the first of equal pairs counts."""
    pairs: dict[tuple[str, str], None] = {}
    for rank, merge in enumerate(read_strings(metadata, "merges")):
        left, _, right = merge[1:].partition(" ")
        if not merge or not right:
            raise ModelFileError(f"{PREFIX}merges: entry {rank} is not two parts with a space")
        pairs[merge[0] + left, right] = None
    if not pairs:
        raise ModelFileError(f"{PREFIX}merges is missing or empty")
    return list(pairs)


@frozen(eq=False)
class ByteLevelEncoder:
    """Words by regular expression, then merges over the byte alphabet."""

    _tokenizer: Any = field(repr=False)
    _vocab_size: int

    def encode(self, text: str, after_special: bool) -> list[int]:
        # The batch call lets go of the interpreter lock; the plain one holds it throughout.
        (result,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = result.ids
        return [i for i in ids if i < self._vocab_size]


@frozen(eq=False)
class CharacterEncoder:
    """Merges over characters, line by line; what is unknown falls back to byte tokens."""

    _tokenizer: Any = field(repr=False)
    _ids: Mapping[str, int] = field(repr=False)

    def encode(self, text: str, after_special: bool) -> list[int]:
        lines = _LINES.findall(text.replace(" ", SPACE_MARK))
        batch = self._tokenizer.encode_batch_fast(lines, add_special_tokens=False)
        ids: list[int] = []
        for line, result in zip(lines, batch, strict=True):
            # A run of newlines that is a token is taken whole, whatever its merges say.
            whole = self._ids.get(line) if line[0] == "\n" else None
            ids.extend(result.ids if whole is None else [whole])
        return ids


def make_byte_level(
    vocabulary: Vocabulary, metadata: Mapping[str, Any], rules: PreTokenizer
) -> ByteLevelEncoder:
    """Raises ModelFileError when a merge names a token that does not exist."""
    vocab = _encodable(vocabulary)
    # A byte without a token is dropped from the text, but must not let its neighbours merge: it
    # gets an id beyond the vocabulary, which ``encode`` filters out.
    for char in BYTE_ALPHABET:
        vocab.setdefault(char, len(vocab))
    tokenizer = _build(vocab, metadata, ignore_merges=rules.ignore_merges)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return ByteLevelEncoder(tokenizer, vocabulary.size)


def make_character_level(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> CharacterEncoder:
    """Raises ModelFileError when a merge names a token that does not exist."""
    tokenizer = _build(_encodable(vocabulary), metadata, byte_fallback=True)
    return CharacterEncoder(tokenizer, vocabulary.ids)


def _encodable(vocabulary: Vocabulary) -> dict[str, int]:
    """Text to id, with a stand-in for broken UTF-8, which no input text can ever match."""
    return {
        text if _is_unicode(text) else f"\0broken {i}": i for i, text in enumerate(vocabulary.texts)
    }


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _build(vocab: dict[str, int], metadata: Mapping[str, Any], **options: bool) -> Any:
    merges = read_merges(metadata)
    for rank, (left, right) in enumerate(merges):
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelFileError(f"{PREFIX}merges: entry {rank} makes no known token")
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
