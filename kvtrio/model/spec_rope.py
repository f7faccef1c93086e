"""Rotary position embedding as data; part of ``spec``."""

from enum import Enum

from attrs import evolve, frozen


class RopeStyle(Enum):
    """Which values of a head are rotated together."""

    NONE = "none"
    NORM = "norm"
    """Adjacent pairs (2i, 2i + 1)."""
    NEOX = "neox"
    """Pairs (i, i + num_rotated / 2)."""


@frozen(kw_only=True)
class LongFactors:
    """Other divisors, for a server whose context is longer than the original one (longrope)."""

    tensor: str
    original_context: int


@frozen(kw_only=True)
class RopeSpec:
    """Rotary position embedding: angle of pair i at position p is
    p * scale * base^(-2i / num_rotated) / factors[i]."""

    style: RopeStyle
    num_rotated: int
    base: float
    scale: float = 1.0
    """1 / factor of linear scaling."""
    factors: str | None = None
    """Tensor with one divisor per pair (llama 3's ``rope_freqs.weight``)."""
    divisors: tuple[float, ...] = ()
    """The same as numbers, where they follow from the metadata (yarn)."""
    long: LongFactors | None = None
    """Not decided yet: ``ModelSpec.for_context`` does."""
    magnitude: float = 1.0
    """Multiplies cos and sin (yarn, longrope)."""

    def for_context(self, context: int) -> "RopeSpec":
        """With the divisors that belong to a context of so many tokens."""
        if self.long is None:
            return self
        is_long = context > self.long.original_context
        return evolve(self, long=None, factors=self.long.tensor if is_long else self.factors)
