"""Which answers to one prompt began alike; in bounded memory."""

from collections.abc import Sequence

from attrs import define, field

from kvtrio.replay.likeness import common, packed

MAX_PROMPTS = 4096
MAX_ANSWERS = 8
"""To one prompt, that are compared."""
Kept = list[tuple[int, bytes]]


@define(eq=False)
class Answers:
    """The last answers, by prompt."""

    _kept: dict[int, Kept] = field(init=False, factory=dict)
    """By the hash of the prompt, in the order of last use."""

    def same_as(self, number: int, prompt: Sequence[int], output: Sequence[int]) -> int | None:
        """An earlier request with this prompt, one of whose answer and ``output`` begins with the
        other; ``number``'s answer is known from now on."""
        if not output:
            return None
        data, key = packed(output), hash(packed(prompt))
        kept = self._kept.pop(key, [])
        self._kept[key] = [*kept, (number, data)][-MAX_ANSWERS:]
        if len(self._kept) > MAX_PROMPTS:
            del self._kept[next(iter(self._kept))]
        alike = (other for other, text in kept if _is_beginning(data, text))
        return next(alike, None)


def _is_beginning(a: bytes, b: bytes) -> bool:
    return common(a, b) == min(len(a), len(b)) // 4
