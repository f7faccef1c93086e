"""Answers that come back: keep the token ids that were generated, encode only the rest.

1. A model may write a text with other tokens than the tokenizer would take for it. State is found
   by token ids, so such an answer, sent back as text, keeps the ids that it was generated with.
2. Only what was generated here, in the same namespace, at the same place behind the same text, is
   recalled, and only where an answer stands. Text that was only ever prompt is encoded as it comes.
3. The rest is the ordinary encoding of the whole new text, from a border that both have: the end of
   a generated token where the ordinary encoding has a border too. So no word, character or special
   token is cut where an ordinary encoding would not cut it.
4. Places are counted in bytes, and every recalled token was compared with the bytes it stands for:
   the ids spell the new text, whatever the vocabulary.
5. A token without text (control, unused, end of generation) and all behind it is not recalled, nor
   is a token that a stop string cut or whose character was never finished.
6. An entry is a whole conversation: what its prompt recalled counts as generated. A turn takes the
   place of the turn that it continues.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Protocol

from attrs import field, frozen

from kvtrio.model.answers import AnswerStore, Borders, Entry
from kvtrio.model.tokenizer import Fragment, clean_text

Spans = Sequence[tuple[int, int]]
"""Parts of a text, ascending, each from its first to behind its last character or byte."""


class SplittingTokenizer(Protocol):
    """What is needed of a tokenizer here."""

    @property
    def add_eos(self) -> bool: ...

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def fragments(self, text: str, *, parse_special: bool) -> list[Fragment]: ...

    def encode_fragment(self, fragment: Fragment) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_control(self, token_id: int) -> bool: ...


@frozen(eq=False)
class Encoded:
    """A prompt's ids, and what ``Recall.note`` has to know of it."""

    namespace: bytes
    text: bytes = field(repr=False)
    ids: tuple[int, ...] = field(repr=False)
    borders: Borders = field(factory=Borders)
    source: Entry | None = None
    """Where the recalled ids come from."""

    @property
    def num_recalled_tokens(self) -> int:
        """Tokens that kept the ids with which they were generated."""
        return len(self.borders)


@frozen(eq=False)
class Recall:
    """The memory of one model's answers; may be used from several threads at once."""

    tokenizer: SplittingTokenizer = field(repr=False)
    store: AnswerStore

    def encode(
        self, namespace: bytes, text: str, answers: Callable[[], Spans] | None = None
    ) -> Encoded:
        """Ids of a prompt, with the start token that the model wants and special tokens parsed.

        ``answers``: in which parts of ``text``, in characters, answers stand; asked only if
        something is known. None: they may stand anywhere.
        """
        text = clean_text(text)
        raw = text.encode()
        found = self.store.find(namespace, raw)
        joined = self._join_inside(*found, text, raw, answers) if found else None
        if joined is not None:
            return joined
        ids = self.tokenizer.encode(text, add_special=True, parse_special=True)
        return Encoded(namespace, raw, tuple(ids))

    def note(self, prompt: Encoded, generated_ids: Iterable[int], generated_text: str) -> None:
        """Remember an answer to ``prompt``, whole or as far as it got.

        ``generated_text`` is what the caller was given, without the prompt.
        """
        entry = self._extended(prompt, generated_ids, generated_text.encode("utf-8", "replace"))
        if entry is not None:
            source = prompt.source
            is_whole = source is not None and len(source.borders) == len(prompt.borders)
            self.store.put(entry, in_place_of=source if is_whole else None)

    def _extended(
        self, prompt: Encoded, generated_ids: Iterable[int], generated: bytes
    ) -> Entry | None:
        """The prompt and as many tokens as spell the beginning of ``generated``; None if none do.

        Also None where an end token stands between prompt and answer: the text does not show it.
        """
        at, ends, ids = 0, array("I"), array("I", prompt.ids)
        for token_id in generated_ids if not self.tokenizer.add_eos else ():
            piece = self.tokenizer.token_bytes(token_id)
            is_silent = not piece or self.tokenizer.is_control(token_id)
            if is_silent or not generated.startswith(piece, at):
                break
            at += len(piece)
            ends.append(len(prompt.text) + at)
            ids.append(token_id)
        if not ends:
            return None
        counts = array("I", range(len(prompt.ids) + 1, len(ids) + 1))
        old = prompt.borders
        borders = Borders(old.ends + ends, old.counts + counts)
        return Entry(prompt.namespace, prompt.text + generated[:at], ids, borders)

    def _join_inside(
        self,
        entry: Entry,
        known: Borders,
        text: str,
        raw: bytes,
        answers: Callable[[], Spans] | None,
    ) -> Encoded | None:
        if answers is not None:
            known = self._inside(entry, known, _in_bytes(text, answers()))
        return self._join(entry, known, text, raw) if known else None

    def _inside(self, entry: Entry, known: Borders, spans: Spans) -> Borders:
        """Up to the first generated token that lies in no span, or not wholly."""
        at = 0
        for index, (end, count) in enumerate(zip(known.ends, known.counts, strict=True)):
            while at < len(spans) and spans[at][1] < end:
                at += 1
            start = end - len(self.tokenizer.token_bytes(entry.ids[count - 1]))
            if at == len(spans) or start < spans[at][0]:
                return known.first(index)
        return known

    def _join(self, entry: Entry, known: Borders, text: str, raw: bytes) -> Encoded | None:
        """Go back through the ordinary encoding of ``text`` to the last border that it shares."""
        at, behind = len(raw), Fragment("", after_special=True)
        rest: list[list[int]] = []
        for fragment in reversed(self.tokenizer.fragments(text, parse_special=True)):
            if known.ends[0] > at:
                break
            index = known.index(at)
            if index is None and (num := fragment.spaces[1]):
                index = known.index(at - num)
                if index is not None:
                    rest[-1:] = self._freed(raw[at - num : at].decode(), behind)
            if index is None:
                start = at - self._num_bytes(fragment)
                ids, cut = self.tokenizer.encode_fragment(fragment), 0
                if known.ends[-1] > start:
                    index, cut = self._shared_border(ids, known, raw[start:at], start)
                rest.append(ids[cut:])
                at, behind = start, fragment
            if index is not None:
                kept = known.first(index + 1)
                all_ids = chain(entry.ids[: kept.counts[-1]], *reversed(rest))
                return Encoded(entry.namespace, raw, tuple(all_ids), kept, entry)
        return None

    def _freed(self, spaces: str, behind: Fragment) -> list[list[int]]:
        """``behind`` and the spaces before it, which nobody swallows where an answer spelled the
        special token with ordinary ones."""
        content = behind.content
        if isinstance(content, int):
            return [[content], self.tokenizer.encode_fragment(Fragment(spaces, True))]
        return [self.tokenizer.encode_fragment(Fragment(spaces + content, True))]

    def _shared_border(
        self, ids: Sequence[int], known: Borders, spelled: bytes, start: int
    ) -> tuple[int | None, int]:
        """Index of the last known border inside a fragment, and how many of the fragment's ``ids``
        lie before it; (None, 0) if there is none. ``spelled``: its bytes, at ``start``."""
        at = len(spelled)
        for cut in range(len(ids) - 1, 0, -1):
            piece = self.tokenizer.token_bytes(ids[cut])
            # From the end, because some vocabularies begin a fragment with a space of their own.
            if not spelled.endswith(piece, 0, at):
                break
            at -= len(piece)
            index = known.index(start + at) if at else None
            if index is not None:
                return index, cut
        return None, 0

    def _num_bytes(self, fragment: Fragment) -> int:
        content = fragment.content
        if isinstance(content, str):
            return len(content.encode())
        return len(self.tokenizer.token_bytes(content)) + sum(fragment.spaces)


def _in_bytes(text: str, spans: Spans) -> Spans:
    """``spans`` of ``text``'s characters as spans of its bytes."""
    done, num_bytes, result = 0, 0, []
    for start, end in spans:
        before = num_bytes + len(text[done:start].encode())
        num_bytes = before + len(text[start:end].encode())
        result.append((before, num_bytes))
        done = end
    return result
