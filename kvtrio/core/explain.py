"""Why a request reused what it reused, and no more: positions, sizes and enums."""

from enum import Enum

from attrs import evolve, frozen

from kvtrio.core.identity import TokenTrail
from kvtrio.core.index import Match
from kvtrio.core.tiers import TieredCache
from kvtrio.core.types import Tier

GAP_S = 300.0
"""A conversation that rested longer is said to return after a gap."""
MAX_OTHERS = 4
"""Other adapter sets that are tried to explain a miss."""
MINIMUM = 16
"""Tokens in common that are not worth a word: a start token, a template's first header."""


NEAR = 64
"""Tokens behind a checkpoint that are computed again without a word."""


class CachePath(Enum):
    """Where the reused state lay."""

    NONE = "none"
    RESIDENT = "resident"
    RAM = "ram"
    DISK = "disk"


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
    NO_CHECKPOINT = "no_checkpoint"
    """More tokens were known, but not the state of the model's recurrent layers there, or what its
    windows see."""
    EVICTED = "evicted"
    BELOW_MINIMUM = "below_minimum"
    """A few tokens were the same, as they are in all prompts of a template."""
    CACHING_OFF = "caching_off"
    NOT_STARTED = "not_started"
    """It ended before it got a place."""


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
    num_disk_tokens: int = 0
    """Of blocks that came from disk, for this request or not, and were not used before."""
    num_matched_tokens: int = 0
    """The longest match of tokens when the request started; later chunks may have added to it, and
    recurrent layers may not be able to resume there."""
    is_divergence: bool = False
    """Something known went on differently behind the match, or is gone from there."""
    num_other_tokens: int = 0
    """The longest match under another adapter set of the same namespace."""
    evicted_age_s: float | None = None
    """For ``EVICTED``: how long before this request the missing block was last used."""

    @property
    def num_reused_tokens(self) -> int:
        return self.num_device_tokens + self.num_host_tokens + self.num_disk_tokens

    def plus(self, found: "Found") -> "CacheReport":
        """More tokens were found."""
        device = self.num_device_tokens + found.num_device
        host = self.num_host_tokens + found.num_host
        disk = self.num_disk_tokens + found.num_disk
        path = CachePath.RAM if host else CachePath.RESIDENT if device else CachePath.NONE
        return evolve(
            self,
            num_device_tokens=device,
            num_host_tokens=host,
            num_disk_tokens=disk,
            path=CachePath.DISK if disk else path,
        )


@frozen
class Found:
    """Tokens by where they lie."""

    num_device: int
    num_host: int
    num_disk: int

    @property
    def num_tokens(self) -> int:
        return self.num_device + self.num_host + self.num_disk


def found_in(match: Match, num_more: int) -> Found:
    """Where the tokens of a match lie, of which ``num_more`` count."""
    blocks = [(block, len(block.tags)) for block in match.blocks]
    if match.partial is not None:
        blocks.append((match.partial, match.num_partial))
    disk = sum(num for block, num in blocks if block.is_from_disk)
    host = sum(num for block, num in blocks if block.tier is Tier.HOST and not block.is_from_disk)
    disk = min(disk, num_more)
    host = min(host, num_more - disk)
    return Found(num_more - disk - host, host, disk)


@frozen
class Prompt:
    """What is to be explained: a prompt, and whether its conversation was here before (None: the
    caller did not name one)."""

    trail: TokenTrail
    is_known: bool | None


def explain(cache: TieredCache, prompt: Prompt, match: Match, now: float) -> CacheReport:
    """The report of a request that starts with ``match``. Call before the match is acquired."""
    report = _explain(cache, prompt, match.whole or match, now)
    if match.num_same - match.num_tokens > NEAR:
        return evolve(report, reason=MissReason.NO_CHECKPOINT)
    return report


def _explain(cache: TieredCache, prompt: Prompt, match: Match, now: float) -> CacheReport:
    trail = prompt.trail
    limit = len(trail.tags) - 1
    report = CacheReport(num_matched_tokens=match.num_tokens)
    if match.num_tokens >= limit:
        turn = TurnClass.REGENERATE if match.num_tokens else TurnClass.FIRST
        return evolve(report, reason=MissReason.NOTHING_MISSED, turn=turn)
    other = _longest_other(cache, trail, limit)
    report = evolve(report, num_other_tokens=other)
    if age := _lost_age(cache, trail, match, now):
        turn = TurnClass.AFTER_GAP if age > GAP_S else TurnClass.CONTINUATION
        return evolve(
            report, reason=MissReason.EVICTED, turn=turn, evicted_age_s=age, is_divergence=True
        )
    turn = _turn(prompt, match, other, now)
    if other > match.num_tokens:
        return evolve(report, reason=MissReason.ADAPTER_MISMATCH, turn=turn, is_divergence=True)
    is_divergence = match.num_tokens > 0 and not _ends_sequence(match)
    return evolve(report, reason=_reason(match, turn), turn=turn, is_divergence=is_divergence)


def _ends_sequence(match: Match) -> bool:
    """Whether the match ends where a known sequence ends."""
    if match.partial is not None:
        return match.num_partial == len(match.partial.tags) and not match.partial.children
    return not match.blocks[-1].children


def _reason(match: Match, turn: TurnClass) -> MissReason:
    if match.num_tokens == 0:
        return MissReason.FIRST_TURN
    if turn is TurnClass.FIRST:
        is_little = match.num_tokens < MINIMUM
        return MissReason.BELOW_MINIMUM if is_little else MissReason.FIRST_TURN
    return MissReason.NEW_TOKENS if _ends_sequence(match) else MissReason.DIVERGED


def _turn(prompt: Prompt, match: Match, other: int, now: float) -> TurnClass:
    """Without the conversation's name a prompt counts as a new one if less than half of it was
    seen before: it shares a system prompt, say."""
    seen, total = max(match.num_tokens, other), len(prompt.trail.tags)
    is_new = not prompt.is_known if prompt.is_known is not None else 2 * seen < total
    if seen == 0 or (is_new and not (match.num_tokens and _ends_sequence(match))):
        return TurnClass.FIRST
    if match.num_tokens == 0:
        return TurnClass.CONTINUATION
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


def _longest_other(cache: TieredCache, trail: TokenTrail, limit: int) -> int:
    numbers = cache.index.others(trail)[-MAX_OTHERS:]
    return max((cache.index.follow(trail.tags, number, limit) for number in numbers), default=0)
