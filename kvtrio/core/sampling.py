"""How a token is chosen from logits: parameters, and the draws that make a request repeatable."""

from functools import cached_property

from attrs import frozen

MASK = (1 << 64) - 1
UNIT = 2.0**-53


@frozen(kw_only=True, cache_hash=True)
class SamplingParams:
    """One request's sampling settings; ranges are checked at the HTTP edge.

    Order of application (llama-server's): bias, penalties, top-n-sigma, top-k, typical-p, top-p,
    min-p, temperature, draw. ``temperature`` 0 takes the largest logit after bias and penalties.
    """

    temperature: float = 0.8
    top_k: int = 40
    """0 keeps every token."""
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    """Keep tokens within this many standard deviations of the best logit; negative: off."""
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    """How many of the last tokens (prompt included) the three penalties look at; 0: none."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit); ``-inf`` bans."""
    num_logprobs: int | None = None
    """None: report none. Otherwise the chosen token's log-probability and the best n, from the
    softmax of the raw logits (no bias, penalty or temperature)."""
    seed: int = 0

    @cached_property
    def has_penalties(self) -> bool:
        repeats = self.repeat_penalty != 1.0
        counts = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return self.repeat_last_n != 0 and (repeats or counts)


def draw(seed: int, index: int) -> float:
    """Uniform number in [0, 1) for token ``index`` of a request with ``seed``.

    A counter-based generator (SplitMix64: Steele, Lea, Flood, OOPSLA 2014): the n-th token's draw
    depends on seed and n alone, so neither the batch nor a preemption changes it.
    """
    return unit(mixed(mixed(seed) + index))


def mixed(z: int) -> int:
    """A scrambled number of 64 bits."""
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def unit(z: int) -> float:
    """The upper 53 of 64 bits as a number in [0, 1)."""
    return (z >> 11) * UNIT
