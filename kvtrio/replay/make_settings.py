"""What traffic is to be made up; the flags of ``kvtrio scenario make`` are made from this class."""

from attrs import asdict, frozen

AT_LEAST_ONE = (
    "num_turns",
    "num_systems",
    "system_tokens",
    "user_tokens",
    "output_tokens",
    "max_context",
    "probe_tokens",
    "burst_tokens",
    "num_tenants",
)
MAX_MADE = 1_000_000
"""Requests; they are all in memory before the first is written."""
MOST_S = 10_000_000


@frozen(kw_only=True)
class MakeSettings:
    """Lengths are medians, in tokens; times in seconds; shares from 0 to 1."""

    seed: int = 0
    """Another one, another scenario."""
    num_sessions: int = 20
    """Conversations."""
    num_turns: int = 6
    """Of a conversation, on average."""
    span_s: float = 600.0
    """Seconds within which conversations begin."""
    num_systems: int = 2
    """System prompts; each conversation begins with one of them."""
    system_tokens: int = 300
    """Length of a system prompt."""
    user_tokens: int = 40
    """Median length of what a turn adds."""
    output_tokens: int = 100
    """Median length of an answer."""
    think_s: float = 20.0
    """Mean time between an answer and the next turn, in seconds."""
    max_context: int = 8192
    """Conversations end before they are longer, in tokens."""
    num_adapters: int = 0
    """Adapters; a conversation has one of them, or none."""
    switch_share: float = 0.0
    """Share of turns that are asked under another adapter."""
    again_share: float = 0.0
    """Share of turns that are asked once more."""
    back_share: float = 0.0
    """Share of turns that take the one before back."""
    summary_share: float = 0.0
    """Share of turns after which the history is summed up and replaced."""
    leave_share: float = 0.0
    """Share of turns whose client leaves when it has the answer's tokens."""
    probe_every_s: float = 0.0
    """Seconds between health probes; 0: none."""
    probe_tokens: int = 21
    """Length of a probe."""
    num_burst: int = 0
    """Requests of one tenant at once, in the middle."""
    burst_tokens: int = 500
    """Median length of their prompts."""
    num_tenants: int = 1
    """Tenants that have the conversations."""
    named: bool = True
    """Callers name their conversations."""

    def fault(self) -> str | None:
        """The first thing that cannot be; None: all can."""
        for name, value in asdict(self).items():
            low, high = 1 if name in AT_LEAST_ONE else 0, _most(name)
            if not low <= value <= high:
                return f"--{name.replace('_', '-')}: at least {low}, at most {high:,}"
        probes = self.span_s / self.probe_every_s if self.probe_every_s else 0
        if self.num_sessions * self.num_turns + self.num_burst + probes > MAX_MADE:
            return f"that is more than {MAX_MADE:,} requests"
        return None


def _most(name: str) -> int:
    """What a scenario can have. Imported here: the command line's help needs none of it."""
    from kvtrio.replay.scenario import MAX_ADAPTERS, MAX_REQUESTS, MAX_TOKENS

    of_name = {"num_adapters": MAX_ADAPTERS, "seed": 2**53 - 1}
    by_word = {"tokens": MAX_TOKENS, "context": MAX_TOKENS, "s": MOST_S, "share": 1}
    return of_name.get(name) or by_word.get(name.rpartition("_")[2], MAX_REQUESTS)
