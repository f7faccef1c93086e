"""Which tokens are special, which of them end a generation, and how text is split at them.

llama.cpp decides this by the token's text as well as by its type, and converted files rely on it;
the lists are facts from ``src/llama-vocab.cpp`` (MIT), as is what it does for Phi 3 by name.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from kvtrio.model.vocabulary import TokenType, Vocabulary, read_id, read_numbers

END_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>"
    " <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>"
    " <eos> <turn|> <|tool_response> <\uff5cend▁of▁sentence\uff5c> [e~["
)
FILL_TEXTS = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim▁begin\uff5c> <PRE> ▁<PRE>"
    " <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim▁hole\uff5c> <SUF> ▁<SUF>"
    " <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim▁end\uff5c> <MID> ▁<MID>"
    " <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
_OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_ENDING_FILLS = ("fim_pad", "fim_rep", "fim_sep")
_ALWAYS_VISIBLE = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""gpt-oss writes its answers' structure with these."""
SPACES = " \t\n\v\f\r"
SPACES_BEFORE, SPACES_BEHIND = 1, 2
"""Bits of ``tokenizer.ggml.token_spaces``: what a special token swallows around it. Ours: only
tokenizer.json says it (lstrip, rstrip)."""
_HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)
_SPECIAL = (*_HIDDEN, TokenType.USER_DEFINED)
Around = tuple[int, int]
"""How many spaces a special token swallows before and behind it."""
_Found = tuple[int, int, int, Around]
"""Start and end, spaces included, the token, and the spaces."""
_PHI3_KEEPS = ("<unk>", "<s>", "<|endoftext|>")


@frozen
class Roles:
    """What the tokens are after the rules by text were applied."""

    types: tuple[TokenType, ...]
    """CONTROL also where the text says so; index = token id."""
    eog_ids: frozenset[int]
    """Tokens that end a generation."""
    spaces: Mapping[int, int]
    """SPACES_BEFORE and SPACES_BEHIND of the tokens that swallow any."""


def assign_roles(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Roles:
    """Apply the rules by text. Raises ModelFileError when a named id is out of range."""
    ids, size = vocabulary.ids, vocabulary.size
    types = list(vocabulary.types)
    ends = {ids[text] for text in END_TEXTS.split() if text in ids}
    forced = set(ends)
    for role, texts in FILL_TEXTS.items():
        named = read_id(metadata, f"{role}_token_id", size)
        if named is None and role in _OLD_KEYS:
            named = read_id(metadata, f"{_OLD_KEYS[role]}_token_id", size)
        found = [named] if named is not None else [ids[t] for t in texts.split() if t in ids][:1]
        forced.update(found if named is None else [])
        ends.update(found if role in _ENDING_FILLS else [])
    for token in forced:
        types[token] = TokenType.CONTROL
    for role in ("eos", "eot", "eom"):
        named = read_id(metadata, f"{role}_token_id", size)
        ends.update([] if named is None else [named])
    _apply_exceptions(ids, types, ends)
    return Roles(tuple(types), frozenset(ends), _spaces(vocabulary, types, metadata))


def _spaces(
    vocabulary: Vocabulary, types: Sequence[TokenType], metadata: Mapping[str, Any]
) -> dict[int, int]:
    """As the file says, else by the model's name: converted files of Phi 3 do not say it."""
    listed = read_numbers(metadata, "token_spaces", vocabulary.size)
    if listed is not None and listed.dtype.kind in "iu":
        return {token: int(listed[token]) for token in np.flatnonzero(listed).tolist()}
    name = metadata.get("general.name")
    if not isinstance(name, str) or not any(each in name.lower() for each in ("phi-3", "phi3")):
        return {}
    found = [i for i, kind in enumerate(types) if kind in _SPECIAL]
    found += [vocabulary.ids["</s>"]] if "</s>" in vocabulary.ids else []
    keeps = {vocabulary.ids.get(text) for text in _PHI3_KEEPS}
    return dict.fromkeys(set(found) - keeps, SPACES_BEHIND)


def _apply_exceptions(ids: Mapping[str, int], types: list[TokenType], ends: set[int]) -> None:
    def ends_with(text: str) -> bool:
        return ids.get(text) in ends

    for text in _ALWAYS_VISIBLE:
        if text in ids:
            types[ids[text]] = TokenType.USER_DEFINED
    calls = ends_with("<|call|>") or ends_with("<|calls|>")
    if ends_with("<|end|>") and calls and (ends_with("<|return|>") or ends_with("<|flush|>")):
        ends.discard(ids["<|end|>"])
        types[ids["<|end|>"]] = TokenType.USER_DEFINED
    if ends_with("</s>") and ends_with("<|tool_response>"):
        ends.discard(ids["</s>"])
        types[ids["</s>"]] = TokenType.NORMAL


@frozen(eq=False)
class Splitter:
    """Cuts text at the special tokens in it.

    Longer texts (in bytes) are cut out first, over the whole input, before shorter ones are looked
    for in what remains. CONTROL and UNKNOWN tokens count only if asked for.
    """

    _by_first: Mapping[str, Sequence[tuple[int, str, int, bool]]] = field(repr=False)
    """First character to (rank, text, token id, whether it must be asked for)."""
    _spaces: Mapping[int, int] = field(repr=False)

    def split(self, text: str, parse_special: bool) -> list[tuple[str | int, Around]]:
        """Pieces of text and token ids, in order; no empty text. With each the spaces that it
        swallows."""
        present = [
            entry
            for first in set(text) & self._by_first.keys()
            for entry in self._by_first[first]
            if (parse_special or not entry[3]) and entry[1] in text
        ]
        if not present:
            return [(text, (0, 0))] if text else []
        return _cut(text, _find_all(text, sorted(present), self._spaces))


def make_splitter(vocabulary: Vocabulary, roles: Roles) -> Splitter:
    special = [i for i, kind in enumerate(roles.types) if kind in _SPECIAL]
    special.sort(key=lambda i: -len(vocabulary.texts[i].encode("utf-8", "surrogateescape")))
    by_first: dict[str, list[tuple[int, str, int, bool]]] = defaultdict(list)
    for rank, token in enumerate(special):
        text = vocabulary.texts[token]
        by_first[text[0]].append((rank, text, token, roles.types[token] in _HIDDEN))
    return Splitter(by_first, roles.spaces)


def _find_all(
    text: str, present: list[tuple[int, str, int, bool]], spaces: Mapping[int, int]
) -> list[_Found]:
    """Every special token with the spaces that it swallows, in order of place."""
    taken = bytearray(len(text))
    found = []
    for _, special, token, _ in present:
        start = text.find(special)
        while start >= 0:
            end = start + len(special)
            clash = taken.rfind(1, start, end)
            if clash < 0:
                before, behind = _around(text, taken, (start, end), spaces.get(token, 0))
                first, end = start - before, end + behind
                taken[first:end] = b"\1" * (end - first)
                found.append((first, end, token, (before, behind)))
            else:  # go on at the first free place: no match can start before it
                end = taken.find(0, clash)
                if end < 0:
                    break
            start = text.find(special, end)
    return sorted(found)


def _around(text: str, taken: bytearray, place: tuple[int, int], spaces: int) -> Around:
    """The spaces around ``place`` that no other token has, as far as ``spaces`` asks for them."""
    start, end = first, last = place
    while spaces & SPACES_BEFORE and start and text[start - 1] in SPACES and not taken[start - 1]:
        start -= 1
    while spaces & SPACES_BEHIND and end < len(text) and text[end] in SPACES and not taken[end]:
        end += 1
    return first - start, end - last


def _cut(text: str, found: list[_Found]) -> list[tuple[str | int, Around]]:
    pieces: list[tuple[str | int, Around]] = []
    at = 0
    for start, end, token, around in found:
        if start > at:
            pieces.append((text[at:start], (0, 0)))
        pieces.append((token, around))
        at = end
    if at < len(text):
        pieces.append((text[at:], (0, 0)))
    return pieces
