"""Which answers to one prompt began alike; in bounded memory."""

from collections.abc import Sequence

from attrs import define, field

from kvtrio.replay.likeness import WIDTH, common, packed
from kvtrio.replay.scenario import Beginning

MAX_PROMPTS = 4096
MAX_ANSWERS = 8
"""To one prompt, that are compared."""
Kept = list[tuple[int, bytes]]


@define(eq=False)
class Answers:
    """The last answers, by prompt."""

    _kept: dict[int, Kept] = field(init=False, factory=dict)
    """By the hash of the prompt, in the order of last use."""

    def alike(
        self, number: int, prompt: Sequence[int], output: Sequence[int]
    ) -> tuple[int | None, Beginning | None]:
        """Of earlier requests with this prompt: one whose answer begins with ``output`` or the
        other way round; and the one that has most in common with it, if that is more.
        ``number``'s answer is known from now on."""
        if not output:
            return None, None
        data, key = packed(output), hash(packed(prompt))
        kept = self._kept.pop(key, [])
        self._kept[key] = [*kept, (number, data)][-MAX_ANSWERS:]
        if len(self._kept) > MAX_PROMPTS:
            del self._kept[next(iter(self._kept))]
        shared = [(other, common(data, text), len(text) // WIDTH) for other, text in kept]
        whole = [each for each in shared if each[1] == min(each[2], len(output))]
        same_as, same = whole[0][:2] if whole else (None, 0)
        other, most, _ = max(shared, key=lambda each: each[1], default=(0, 0, 0))
        return same_as, Beginning(other, most) if most > same else None
