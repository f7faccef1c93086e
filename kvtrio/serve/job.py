"""A request after all checks: what to compute and what to tell. Nothing here can fail any more."""

from attrs import evolve, frozen

from kvtrio.core.sampling import SamplingParams
from kvtrio.model.matcher import TextMatcher


@frozen(kw_only=True)
class Wants:
    """How the caller would like to be told."""

    stream: bool = False
    include_usage: bool = False
    tokens: bool = False
    progress: bool = False
    timings_per_token: bool = False
    heartbeat_s: float | None = None
    """None: the server's own."""
    response_fields: tuple[str, ...] = ()


@frozen(kw_only=True)
class Job:
    """One HTTP request for text: ``n`` answers for each of its prompts."""

    prompts: tuple[tuple[int, ...], ...]
    prompt_field: str
    """Where the prompt came from, for error texts."""
    n: int
    max_new_tokens: int | None
    """As asked for; None: until the context is full."""
    sampling: SamplingParams
    is_seeded: bool
    """The caller chose the seed."""
    ignore_eos: bool
    eos_ids: frozenset[int]
    stops: tuple[str, ...]
    matchers: tuple[TextMatcher, ...]
    """One for each answer; made here because large stop sets take a while."""
    place: int | None
    wants: Wants
    prompt_texts: tuple[str, ...] = ()
    """The prompts as text, special tokens visible, for answers that repeat them."""

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.n

    def sampling_of(self, index: int) -> SamplingParams:
        """Answer ``index``'s settings: the answers to one prompt have seeds one apart, and a chosen
        seed gives each prompt of a batch what it would give the prompt alone."""
        offset = index % self.n if self.is_seeded else index
        return evolve(self.sampling, seed=self.sampling.seed + offset)
