"""How long requests keep their places, as far as that is known."""

from collections.abc import Sequence

from attrs import define, field

FADE = 0.9
"""Weight of the last stay against this one."""


@define(eq=False)
class Stays:
    """``end`` those that ended of themselves; a stay that was cut short tells little."""

    _sum_s: float = field(init=False, default=0.0)
    _weight: float = field(init=False, default=0.0)
    """Of what is in the sum: without it, the first stays would count as if many short ones had
    gone before."""

    def end(self, seconds: float) -> None:
        assert seconds >= 0.0, "time goes on"
        self._sum_s = FADE * self._sum_s + seconds
        self._weight = FADE * self._weight + 1.0

    def mean_s(self, ages_s: Sequence[float]) -> float:
        """Mean stay, at least the mean age of the present ones: in the long run that is how long
        they still stay, and before any has ended it is all that is known."""
        ended = self._sum_s / self._weight if self._weight else 0.0
        return max(ended, sum(ages_s) / len(ages_s) if ages_s else 0.0)
