"""Text to token ids and back, exactly as llama.cpp does it for the same GGUF metadata."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from kvtrio.model.bpe import SPACE_MARK, alphabet_bytes, make_byte_level, make_character_level
from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from kvtrio.model.special_tokens import Around, Splitter, assign_roles, make_splitter
from kvtrio.model.spm import go_on, make_sentence_piece
from kvtrio.model.vocabulary import (
    PREFIX,
    TokenType,
    Vocabulary,
    read_flag,
    read_id,
    read_text,
    read_vocabulary,
)

_BYTE_TEXT = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


MAX_TEXT_CHARS = 4_194_304
"""Longest text to encode. The regular expressions give up on a run of some ten million spaces."""


class TextTooLong(ValueError):
    """A text longer than MAX_TEXT_CHARS, which no model's context could hold."""


class FragmentEncoder(Protocol):
    """Encodes text that holds no special token. ``after_special``: at the start or behind one."""

    def encode(self, text: str, after_special: bool) -> list[int]: ...


@frozen
class Fragment:
    """A part of a text whose encoding does not depend on the other parts."""

    content: str | int
    """Text without special tokens, or one special token's id."""
    after_special: bool
    """At the start of the text or behind a special token, where a space may be put before it."""
    spaces: Around = (0, 0)
    """Characters of the text, of one byte each, that a special token swallows before and behind."""


@frozen(eq=False, kw_only=True)
class Tokenizer:
    """A model's tokenizer; safe to use from several threads at once."""

    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    eog_ids: frozenset[int]
    """Tokens that end a generation."""
    _vocabulary: Vocabulary = field(repr=False)
    _types: Sequence[TokenType] = field(repr=False)
    _splitter: Splitter = field(repr=False)
    _encoder: FragmentEncoder = field(repr=False)
    _is_byte_level: bool
    _space_prefix: str
    """See ``folder_words``; only tokenizer.json says it."""

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    @property
    def bos_text(self) -> str:
        return "" if self.bos_id is None else self._vocabulary.texts[self.bos_id]

    @property
    def eos_text(self) -> str:
        return "" if self.eos_id is None else self._vocabulary.texts[self.eos_id]

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``; a lone surrogate counts as U+FFFD.

        ``add_special`` adds the start and end tokens that the model wants, unless the text has them
        already. ``parse_special`` turns the texts of control tokens into those tokens; without it
        they are plain text. Raises TextTooLong.
        """
        if len(text) > MAX_TEXT_CHARS:
            raise TextTooLong(f"the text has more than {MAX_TEXT_CHARS} characters")
        ids: list[int] = []
        for fragment in self.fragments(text, parse_special=parse_special):
            ids.extend(self.encode_fragment(fragment))
        return self._with_ends(ids) if add_special else ids

    def fragments(self, text: str, *, parse_special: bool) -> list[Fragment]:
        """``text`` cut at its special tokens. Encoding the fragments one by one gives what
        ``encode`` gives without ``add_special``."""
        pieces = self._splitter.split(clean_text(text), parse_special)
        before: list[str | int] = [0, *(piece for piece, _ in pieces)]
        return [
            Fragment(piece, isinstance(before[i], int) and self._may_lead(i, piece), spaces)
            for i, (piece, spaces) in enumerate(pieces)
        ]

    def _may_lead(self, index: int, piece: str | int) -> bool:
        """Whether a space may go before it; ``index``: of the piece in its text."""
        if self._space_prefix not in ("first", "once"):
            return True
        has_space = isinstance(piece, str) and piece.startswith((" ", SPACE_MARK))
        return not has_space and (index == 0 or self._space_prefix == "once")

    def encode_fragment(self, fragment: Fragment) -> list[int]:
        if isinstance(fragment.content, int):
            return [fragment.content]
        return self._encoder.encode(fragment.content, fragment.after_special)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the tokens, special ones included; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token stands for, possibly a part of a character; special tokens give
        their text. Raises ValueError for an id outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError("token id outside the vocabulary")
        text, kind = self._vocabulary.texts[token_id], self._types[token_id]
        if kind is TokenType.NORMAL:
            if self._is_byte_level:
                return alphabet_bytes(text)
            return text.replace(SPACE_MARK, " ").encode("utf-8", "surrogateescape")
        if kind is TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind in (TokenType.UNUSED, TokenType.UNDEFINED):
            return b""
        return text.encode("utf-8", "surrogateescape")

    def is_control(self, token_id: int) -> bool:
        """Whether the token is left out of generated text (types CONTROL and UNKNOWN)."""
        return self._types[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def _with_ends(self, ids: list[int]) -> list[int]:
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids


def clean_text(text: str) -> str:
    """``text`` with U+FFFD for each lone surrogate, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # In pieces, since a call of the regular expression keeps every other thread waiting.
        pieces = (text[at : at + 65_536] for at in range(0, len(text), 65_536))
        return "".join(_LONE_SURROGATE.sub("\ufffd", piece) for piece in pieces)
    return text


def load_tokenizer(
    metadata: Mapping[str, Any],
    *,
    cutting: PreTokenizer | None = None,
    pause: Callable[[], None] = go_on,
) -> Tokenizer:
    """Build the tokenizer that GGUF ``metadata`` describes.

    ``pause`` is called every few milliseconds by an encoder that is written in Python. ``cutting``
    are rules to use whatever ``tokenizer.ggml.pre`` says. Raises ModelFileError when the vocabulary
    is damaged, hostile or of an unsupported kind.
    """
    model = read_text(metadata, "model")
    if model not in ("gpt2", "llama", "gemma4"):
        raise ModelFileError(f'tokenizer model "{safe_name(model)}" is not supported')
    vocabulary = read_vocabulary(metadata)
    _check_byte_texts(vocabulary)
    roles = assign_roles(vocabulary, metadata)
    rules = None if model == "llama" else cutting or _rules(metadata, model)
    bos_id, eos_id = _ends(metadata, vocabulary, is_llama=rules is None)
    is_gemma4 = rules is not None and rules.is_raw
    add_bos = is_gemma4 or read_flag(metadata, "add_bos_token", rules is None or rules.add_bos)
    add_eos = read_flag(metadata, "add_eos_token", False)
    for role, wanted, token in (("bos", add_bos, bos_id), ("eos", add_eos, eos_id)):
        if wanted and token is None:
            raise ModelFileError(
                f"the tokenizer adds a {role} token, but {PREFIX}{role}_token_id is missing"
            )
    return Tokenizer(
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=add_bos,
        add_eos=add_eos,
        eog_ids=roles.eog_ids | ({eos_id} if eos_id is not None else set()),
        vocabulary=vocabulary,
        types=roles.types,
        splitter=make_splitter(vocabulary, roles),
        encoder=_make_encoder(vocabulary, metadata, rules, pause),
        space_prefix=read_text(metadata, "space_prefix"),
        is_byte_level=rules is not None and not rules.is_raw,
    )


def _make_encoder(
    vocabulary: Vocabulary,
    metadata: Mapping[str, Any],
    rules: PreTokenizer | None,
    pause: Callable[[], None],
) -> FragmentEncoder:
    if rules is None:
        add_space_prefix = read_flag(metadata, "add_space_prefix", True)
        return make_sentence_piece(vocabulary, add_space_prefix, pause)
    if rules.is_raw:
        return make_character_level(vocabulary, metadata)
    return make_byte_level(vocabulary, metadata, rules)


def _rules(metadata: Mapping[str, Any], model: str) -> PreTokenizer:
    name = "gemma4" if model == "gemma4" else read_text(metadata, "pre") or "default"
    rules = PRE_TOKENIZERS.get(name)
    if rules is None:
        raise ModelFileError(f'pre-tokenizer "{safe_name(name)}" is not known')
    return rules


def _ends(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, is_llama: bool
) -> tuple[int | None, int | None]:
    bos_id = read_id(metadata, "bos_token_id", vocabulary.size)
    eos_id = read_id(metadata, "eos_token_id", vocabulary.size)
    if is_llama and vocabulary.size > 2:  # SentencePiece's defaults
        bos_id = 1 if bos_id is None else bos_id
        eos_id = 2 if eos_id is None else eos_id
    return bos_id, eos_id


def _check_byte_texts(vocabulary: Vocabulary) -> None:
    for token, kind in enumerate(vocabulary.types):
        if kind is TokenType.BYTE and not _BYTE_TEXT.fullmatch(vocabulary.texts[token]):
            raise ModelFileError(f"token {token} has the type of a byte but not the form <0xNN>")
