"""One answer's account, and the deltas in which it is told."""

from collections.abc import Sequence

from attrs import define, field, frozen

from kvtrio.core.batch import Sampled
from kvtrio.core.events import Finished
from kvtrio.model.matcher import TextMatcher
from kvtrio.model.recall import Encoded
from kvtrio.serve.job import Job
from kvtrio.serve.outline import Place
from kvtrio.serve.session_note import SessionNote


@define(eq=False, kw_only=True)
class Choice:
    """One of a job's answers and its account so far. Times in seconds of trio's clock."""

    index: int
    job: Job
    matcher: TextMatcher
    num_prompt_tokens: int
    place: int | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    now_s: float = 0.0
    """When it was last heard of."""
    num_cached_tokens: int = 0
    num_processed_tokens: int = 0
    """Of the prompt: cached and computed."""
    num_generated_tokens: int = 0
    has_new_line: bool = False
    sampled: list[Sampled] = field(factory=list)
    """All tokens, for a plain answer; a stream has sent them on."""
    explained: list[Sampled] = field(factory=list)
    """Those whose log-probabilities are told, likewise."""
    texts: list[str] = field(factory=list)
    """All text, for a plain answer or to be remembered."""
    token_ids: list[int] = field(factory=list)
    """All ids, to be remembered or saved."""
    encoded: Encoded | None = None
    """The prompt, if the answer is to be remembered."""
    finished: Finished | None = None
    predicted_s: float | None = None
    """From arrival to the job's first token, as expected then; None: nobody asked."""
    session: SessionNote | None = None
    divergence: Place | None = None
    """Where in the conversation the reuse ended, once it is known."""

    @property
    def prompt_index(self) -> int:
        return self.index // self.job.n

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, sampled: Sequence[Sampled], text: str) -> tuple[Sampled, ...]:
        """Count what became ready, and keep it if it is not sent on at once.

        Returns the tokens whose log-probabilities can be told now; none if nobody asked for them.
        """
        explained = self._align(sampled, text)
        self.num_generated_tokens += len(sampled)
        self.has_new_line = self.has_new_line or "\n" in text
        if not self.job.wants.stream:
            self.sampled += sampled
            self.explained += explained
        if not self.job.wants.stream or self.encoded is not None:
            self.texts.append(text)
        if self.encoded is not None or self.job.is_to_be_saved:
            self.token_ids += [each.token_id for each in sampled]
        return explained

    def _align(self, sampled: Sequence[Sampled], text: str) -> tuple[Sampled, ...]:
        alignments = self.job.alignments
        return alignments[self.index].advance(sampled, text) if alignments else ()

    @property
    def is_silent(self) -> bool:
        return self.job.is_silent


@frozen
class Prefill:
    """So much of the prompt is done, ``time_s`` seconds after the request left the queue."""

    choice: Choice
    num_processed_tokens: int
    time_s: float
    num_generated_tokens: int = field(init=False)
    """At that time: tokens may be ready together with this, and count from then on."""

    @num_generated_tokens.default
    def _so_far(self) -> int:
        return self.choice.num_generated_tokens


@frozen
class Tokens:
    """Tokens that were ready together, and the text that they made ready."""

    choice: Choice
    sampled: tuple[Sampled, ...]
    text: str
    explained: tuple[Sampled, ...]
    """Tokens whose text is given by now, for their log-probabilities."""


@frozen
class End:
    """The choice is complete; what is here was held back until now."""

    choice: Choice
    text: str
    explained: tuple[Sampled, ...]


Delta = Prefill | Tokens | End
