"""From requests to a scenario's lines. No clock, no file, no thread.

1. Lines come out in the order of admission; a request's line waits for its end, and for the lines
   before it.
2. Token ids are compared here and go nowhere: a line is made of lengths and numbers.
3. Callers' names, which come as digests, become numbers in the order of their appearance.
"""

from collections import deque
from collections.abc import Callable, Iterator

from attrs import define, field
from msgspec.structs import replace

from kvtrio.core.events import Finished, Submit, TokenOut
from kvtrio.core.identity import AdapterUse
from kvtrio.core.types import FinishReason, RequestId
from kvtrio.obs.identity import adapter_set
from kvtrio.replay.answers import Answers
from kvtrio.replay.conversations import Conversations, Turn
from kvtrio.replay.likeness import Likeness, Span
from kvtrio.replay.scenario import MAX_PIECES, Adapter, Fresh, Line, Part, Piece, Ref, Request, Use

MAX_KNOWN_TOKENS = 8_000_000
"""That new prompts are compared with; 17 bytes each, measured, so 140 MB at most."""
GONE = frozenset(FinishReason) - {FinishReason.STOP, FinishReason.LENGTH}


@define(eq=False)
class _Draft:
    """A request that has no line yet."""

    id: int
    at_s: float
    submit: Submit
    turn: Turn
    pieces: tuple[Piece, ...]
    output: list[int] = field(factory=list)
    line: Request | None = None


@define(eq=False)
class Numbers:
    """Digests as numbers from 1 on; the empty one is 0."""

    _known: dict[bytes, int] = field(init=False, factory=dict)

    def of(self, digest: bytes) -> int:
        return self._known.setdefault(digest, len(self._known) + 1) if digest else 0


@define(eq=False)
class Recorder:
    """An engine's ``Tap``. ``emit`` gets all lines but the header."""

    emit: Callable[[Line], None]
    started_s: float
    """On the engine's clock."""
    log_key: bytes = field(repr=False)
    likeness: Likeness = field(factory=lambda: Likeness(MAX_KNOWN_TOKENS, MAX_PIECES // 2))
    num_requests: int = field(init=False, default=0)
    _conversations: Conversations = field(init=False, factory=Conversations)
    _answers: Answers = field(init=False, factory=Answers)
    _drafts: "deque[_Draft]" = field(init=False, factory=deque)
    """In the order of admission."""
    _running: dict[RequestId, _Draft] = field(init=False, factory=dict)
    _tenants: Numbers = field(init=False, factory=Numbers)
    _namespaces: Numbers = field(init=False, factory=Numbers)
    _aliases: dict[bytes, str] = field(init=False, factory=dict)
    """By content."""

    @property
    def num_open(self) -> int:
        """Requests that have no line yet."""
        return len(self._drafts)

    def admitted(self, submit: Submit, now: float) -> None:
        at_s = max(now - self.started_s, 0.0)
        spans = self.likeness.spans(submit.token_ids)
        turn = self._conversations.begin(submit.session, spans, at_s)
        pieces = tuple(piece for span in spans for piece in self._pieces(span))
        draft = _Draft(self.num_requests, at_s, submit, turn, pieces)
        self.likeness.add(draft.id, submit.token_ids)
        self.num_requests += 1
        self._drafts.append(draft)
        self._running[submit.request_id] = draft

    def said(self, output: TokenOut | Finished, now: float) -> None:
        draft = self._running.get(output.request_id)
        if draft is None:
            return
        if isinstance(output, TokenOut):
            if not draft.submit.is_silent:
                draft.output.append(output.sampled.token_id)
            return
        del self._running[output.request_id]
        self._end(draft, output, now - self.started_s)
        while self._drafts and (line := self._drafts[0].line) is not None:
            self._write(self._drafts.popleft(), line)

    def _write(self, draft: _Draft, line: Request) -> None:
        """Answers are compared here, not at their ends: only with those of earlier lines."""
        alike = self._answers.alike(draft.id, draft.submit.token_ids, draft.output)
        self.emit(replace(line, same_as=alike[0], begins_as=alike[1]))

    def _end(self, draft: _Draft, finished: Finished, now_s: float) -> None:
        prompt = draft.submit.token_ids
        if draft.output:
            self.likeness.add(draft.id, (*prompt, *draft.output))
        self._conversations.end(draft.turn.session, now_s)
        draft.line = self._line(draft, finished, now_s)

    def _line(self, draft: _Draft, finished: Finished, now_s: float) -> Request:
        submit, has_left = draft.submit, finished.reason in GONE
        return Request(
            id=draft.id,
            at_s=round(draft.at_s, 6),
            session=draft.turn.session,
            turn=draft.turn.number,
            is_named=submit.session is not None,
            purpose=submit.purpose,
            retain=submit.retain,
            retain_s=submit.retain_s,
            priority=submit.priority,
            tenant=self._tenants.of(submit.tenant),
            namespace=self._namespaces.of(submit.namespace),
            adapters=tuple(self._uses(submit)),
            reuse=submit.reuse,
            output_tokens=len(draft.output),
            is_silent=submit.is_silent,
            left_s=round(max(now_s - draft.at_s, 0.0), 6) if has_left else None,
            ready_tokens=finished.num_ready_tokens if has_left else None,
            think_s=None if draft.turn.think_s is None else round(draft.turn.think_s, 6),
            checkpoints=submit.checkpoints,
            prompt=draft.pieces,
            log_id=submit.request_id,
        )

    def _pieces(self, span: Span) -> Iterator[Piece]:
        """A span over the border of prompt and answer is two pieces."""
        if span.key is None:
            yield Fresh(span.length)
            return
        border = self._conversations.num_prompt_tokens(span.key)
        start, end = span.start, span.start + span.length
        if start < border:
            yield Ref(span.key, Part.PROMPT, start, min(end, border) - start)
        if end > border:
            start = max(start, border)
            yield Ref(span.key, Part.OUTPUT, start - border, end - start)

    def _uses(self, submit: Submit) -> Iterator[Use]:
        """Each adapter from the position on from which it is there."""
        seen: set[bytes] = set()
        for segment in submit.segments:
            for use in segment.adapters:
                if use.digest not in seen:
                    seen.add(use.digest)
                    yield Use(alias=self._alias(use), scale=use.scale, start=segment.start)

    def _alias(self, use: AdapterUse) -> str:
        """At its first use an adapter gets a line of its own."""
        if use.digest not in self._aliases:
            self._aliases[use.digest] = f"a{len(self._aliases)}"
            alone = AdapterUse(use.adapter_id, use.digest, 1.0)
            content = str(adapter_set([alone], self.log_key))
            self.emit(Adapter(alias=self._aliases[use.digest], content=content))
        return self._aliases[use.digest]
