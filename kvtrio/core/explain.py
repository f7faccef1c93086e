"""Why a request reused what it reused, and no more: positions, sizes and enums."""

from enum import Enum

from attrs import evolve, frozen

from kvtrio.core.identity import TOKEN_MASK, Context, TokenTrail
from kvtrio.core.index import Match
from kvtrio.core.tiers import TieredCache
from kvtrio.core.types import Tier

GAP_S = 300.0
"""A conversation that rested longer is said to return after a gap."""
MAX_OTHERS = 16
"""Other adapter sets that are tried to explain a miss."""


class CachePath(Enum):
    """Where the reused state lay."""

    NONE = "none"
    RESIDENT = "resident"
    RAM = "ram"


class MissReason(Enum):
    """Why not more was reused."""

    NOTHING_MISSED = "nothing_missed"
    """All but the last token."""
    FIRST_TURN = "first_turn"
    """Nothing like it was known."""
    NEW_TOKENS = "new_tokens"
    """All that was known of the sequence was reused, and the prompt goes on."""
    DIVERGED = "diverged"
    ADAPTER_MISMATCH = "adapter_mismatch"
    """More of it is cached under another adapter set."""
    EVICTED = "evicted"
    CACHING_OFF = "caching_off"


class TurnClass(Enum):
    """What kind of turn a prompt looks like."""

    FIRST = "first"
    CONTINUATION = "continuation"
    REGENERATE = "regenerate"
    REWRITE = "rewrite"
    AFTER_GAP = "after_gap"


@frozen(kw_only=True)
class CacheReport:
    """One request's reuse, as its answer and its log line tell it."""

    path: CachePath = CachePath.NONE
    reason: MissReason = MissReason.CACHING_OFF
    turn: TurnClass = TurnClass.FIRST
    num_device_tokens: int = 0
    num_host_tokens: int = 0
    num_matched_tokens: int = 0
    """The match when the request started; later chunks may have added to it."""
    num_other_tokens: int = 0
    """The longest match under another adapter set of the same namespace."""
    evicted_age_s: float | None = None
    """For ``EVICTED``: how long before this request the missing block was last used."""

    def plus(self, num_device: int, num_host: int) -> "CacheReport":
        """More tokens were found."""
        host = self.num_host_tokens + num_host
        device = self.num_device_tokens + num_device
        path = CachePath.RAM if host else CachePath.RESIDENT if device else CachePath.NONE
        return evolve(self, num_device_tokens=device, num_host_tokens=host, path=path)


def count_host_tokens(match: Match) -> int:
    """Tokens of the match that lie in RAM now."""
    total = sum(len(block.tags) for block in match.blocks if block.tier is Tier.HOST)
    if match.partial is not None and match.partial.tier is Tier.HOST:
        total += match.num_partial
    return total


def explain(
    cache: TieredCache, trail: TokenTrail, match: Match, others: list[Context], now: float
) -> CacheReport:
    """The report of a request that starts with ``match``. Call before the match is acquired."""
    limit = len(trail.tags) - 1
    report = CacheReport(num_matched_tokens=match.num_tokens, turn=_turn(match, limit, now))
    reason = _reason(match, limit)
    if match.num_tokens >= limit:
        return evolve(report, reason=reason)
    if age := _lost_age(cache, trail, match, now):
        return evolve(report, reason=MissReason.EVICTED, evicted_age_s=age)
    other = _longest_other(cache, trail, others, limit)
    if other > match.num_tokens:
        return evolve(report, reason=MissReason.ADAPTER_MISMATCH, num_other_tokens=other)
    return evolve(report, reason=reason, num_other_tokens=other)


def _ends_sequence(match: Match) -> bool:
    """Whether the match ends where a known sequence ends."""
    if match.partial is not None:
        return match.num_partial == len(match.partial.tags) and not match.partial.children
    return not match.blocks[-1].children


def _reason(match: Match, limit: int) -> MissReason:
    if match.num_tokens >= limit:
        return MissReason.NOTHING_MISSED
    if match.num_tokens == 0:
        return MissReason.FIRST_TURN
    return MissReason.NEW_TOKENS if _ends_sequence(match) else MissReason.DIVERGED


def _turn(match: Match, limit: int, now: float) -> TurnClass:
    if match.num_tokens == 0:
        return TurnClass.FIRST
    if match.num_tokens >= limit:
        return TurnClass.REGENERATE
    if not _ends_sequence(match):
        return TurnClass.REWRITE
    last = match.partial or match.blocks[-1]
    is_late = not last.num_refs and now - last.last_used_s > GAP_S
    return TurnClass.AFTER_GAP if is_late else TurnClass.CONTINUATION


def _lost_age(cache: TieredCache, trail: TokenTrail, match: Match, now: float) -> float | None:
    """Seconds since the last use of the block that would have come next, if it was lost."""
    index = len(match.blocks)
    if (index + 1) * trail.block_size > len(trail.tags):
        return None
    last_used_s = cache.ghosts.get(trail.key(index))
    return None if last_used_s is None else max(now - last_used_s, 1e-9)


def _longest_other(cache: TieredCache, trail: TokenTrail, others: list[Context], limit: int) -> int:
    tokens = [tag & TOKEN_MASK for tag in trail.tags]
    longest = 0
    for context in others[-MAX_OTHERS:]:
        longest = max(longest, _matched(cache, trail, tokens, limit, context))
    return longest


def _matched(
    cache: TieredCache, trail: TokenTrail, tokens: list[int], limit: int, context: Context
) -> int:
    """What would match under ``context``; cheap when not even the first block does."""
    num = 0
    for end in (min(trail.block_size, limit), limit):
        other = TokenTrail(trail.keys, trail.block_size, ((0, context),))
        other.extend_prompt(tokens[:end])
        num = cache.match(other, end).num_tokens
        if num < end:
            break
    return num
