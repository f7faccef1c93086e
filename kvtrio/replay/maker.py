"""Made-up traffic: conversations, and what happens beside them. The same seed, the same scenario.

A conversation begins with a system prompt that others share; each turn is the prompt and the answer
before, and something new. Beside that: answers asked for again, last turns taken back, summaries
put at the head in place of the history, health probes, and a burst of one tenant.
"""

import math
from collections.abc import Iterator
from random import Random

from attrs import define, field, frozen

from kvtrio.core.types import Retain
from kvtrio.replay.make_settings import MakeSettings
from kvtrio.replay.scenario import (
    MAX_TOKENS,
    SCHEMA,
    Adapter,
    Fresh,
    Header,
    Line,
    Origin,
    Part,
    Piece,
    Ref,
    Request,
    Use,
)

PURPOSES = ("chat", "title", "recap", "probe", "tool")
CHAT, RECAP, PROBE = 0, 2, 3
SPREAD = 0.7
"""Of the logarithm of lengths: 5 % are over three times the median."""
TOKEN_S = 0.02
"""What an answer is thought to take, so that turns have times: for each token of it."""
PROMPT_TOKEN_S = 0.0005


@define(eq=False)
class _Draft:
    """A request before all are put into order."""

    at_s: float
    output: int
    prompt: "list[_Part]"
    session: int | None = None
    turn: int = 0
    purpose: int = CHAT
    retain: Retain = Retain.NORMAL
    tenant: int = 0
    adapter: int | None = None
    think_s: float | None = None
    left_s: float | None = None
    number: int = -1

    @property
    def length(self) -> int:
        return sum(part.length for part in self.prompt)

    @property
    def ends_s(self) -> float:
        return self.at_s + self.output * TOKEN_S + self.length * PROMPT_TOKEN_S


@frozen
class _Part:
    """Some of a prompt: of ``draft``; of a text that is shared, by the number of it; or new."""

    length: int
    draft: _Draft | None = None
    part: Part = Part.PROMPT
    shared: int | None = None


def make(settings: MakeSettings) -> Iterator[Line]:
    """The scenario's lines."""
    maker = _Maker(settings)
    drafts = sorted(maker.drafts(), key=lambda draft: draft.at_s)
    yield Header(
        schema=SCHEMA,
        origin=Origin.MADE,
        max_context=settings.max_context,
        purposes=PURPOSES,
        seed=settings.seed,
    )
    yield from (Adapter(alias=f"a{number}") for number in range(settings.num_adapters))
    first: dict[int, int] = {}
    for number, draft in enumerate(drafts):
        draft.number = number
        pieces = tuple(_piece(part, first, number) for part in draft.prompt)
        yield _request(draft, pieces, is_named=settings.named and draft.session is not None)


def _piece(part: _Part, first: dict[int, int], number: int) -> Piece:
    """``first``: who had a shared text first."""
    if part.draft is not None:
        return Ref(part.draft.number, part.part, 0, part.length)
    if part.shared is None or first.setdefault(part.shared, number) == number:
        return Fresh(part.length)
    return Ref(first[part.shared], Part.PROMPT, 0, part.length)


def _request(draft: _Draft, pieces: tuple[Piece, ...], *, is_named: bool) -> Request:
    return Request(
        id=draft.number,
        at_s=round(draft.at_s, 3),
        session=draft.session,
        turn=draft.turn,
        is_named=is_named,
        purpose=draft.purpose,
        retain=draft.retain,
        tenant=draft.tenant,
        adapters=() if draft.adapter is None else (Use(alias=f"a{draft.adapter}"),),
        output_tokens=draft.output,
        left_s=None if draft.left_s is None else round(draft.left_s, 3),
        think_s=None if draft.think_s is None else round(draft.think_s, 3),
        prompt=pieces,
    )


@define(eq=False)
class _Maker:
    settings: MakeSettings
    random: Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.random = Random(self.settings.seed)

    def drafts(self) -> Iterator[_Draft]:
        for session in range(self.settings.num_sessions):
            yield from self._conversation(session)
        yield from self._probes()
        yield from self._burst()

    def _conversation(self, session: int) -> Iterator[_Draft]:
        settings = self.settings
        system = self._one_of(settings.num_systems)
        head = _Part(settings.system_tokens, shared=system)
        tenant = session % settings.num_tenants
        adapter = self._adapter()
        at_s, num_turns = self.random.random() * settings.span_s, self._num_turns()
        last: _Draft | None = None
        before: _Draft | None = None
        turn, think_s = 0, None
        for _ in range(num_turns):
            draft = _Draft(
                at_s=at_s,
                output=self._length(settings.output_tokens),
                prompt=self._prompt(head, last, before),
                session=session,
                turn=turn,
                tenant=tenant,
                adapter=self._adapter() if self._happens(settings.switch_share) else adapter,
                think_s=think_s,
            )
            if not self._fits(draft):
                return
            if self._happens(settings.leave_share):
                draft.left_s = draft.ends_s - draft.at_s
            yield draft
            think_s = self._think()
            at_s, turn = draft.ends_s + think_s, turn + 1
            before, last = last, draft
            if self._happens(settings.summary_share):
                recap = self._recap(draft, at_s, turn)
                if not self._fits(recap):
                    return
                yield recap
                head = _Part(recap.output, draft=recap, part=Part.OUTPUT)
                last = before = None
                at_s, turn = recap.ends_s + think_s, turn + 1

    def _prompt(self, head: _Part, last: _Draft | None, before: _Draft | None) -> list[_Part]:
        new = _Part(self._length(self.settings.user_tokens))
        if last is None:
            return [head, new]
        if self._happens(self.settings.again_share):
            return [_Part(last.length, draft=last)]
        if before is not None and self._happens(self.settings.back_share):
            last = before
        answer = _Part(last.output, draft=last, part=Part.OUTPUT)
        return [_Part(last.length, draft=last), answer, new]

    def _recap(self, draft: _Draft, at_s: float, turn: int) -> _Draft:
        """Asks for a summary of the conversation at its end."""
        answer = _Part(draft.output, draft=draft, part=Part.OUTPUT)
        return _Draft(
            at_s=at_s,
            output=self._length(self.settings.output_tokens),
            prompt=[_Part(draft.length, draft=draft), answer, _Part(20)],
            session=draft.session,
            turn=turn,
            purpose=RECAP,
            retain=Retain.AUXILIARY,
            tenant=draft.tenant,
            adapter=draft.adapter,
            think_s=at_s - draft.ends_s,
        )

    def _probes(self) -> Iterator[_Draft]:
        every_s, text = self.settings.probe_every_s, -1
        for number in range(int(self.settings.span_s / every_s) if every_s else 0):
            probe = _Part(self.settings.probe_tokens, shared=text)
            yield _Draft(
                at_s=(number + 0.5) * every_s,
                output=1,
                prompt=[probe],
                purpose=PROBE,
                retain=Retain.AUXILIARY,
            )

    def _burst(self) -> Iterator[_Draft]:
        for number in range(self.settings.num_burst):
            draft = _Draft(
                at_s=self.settings.span_s / 2 + number * 0.01,
                output=self._length(self.settings.output_tokens),
                prompt=[_Part(self._length(self.settings.burst_tokens))],
                tenant=self.settings.num_tenants,
            )
            if self._fits(draft):
                yield draft

    def _fits(self, draft: _Draft) -> bool:
        return draft.length + draft.output <= self.settings.max_context

    def _happens(self, share: float) -> bool:
        return share > 0 and self.random.random() < share

    def _one_of(self, number: int) -> int:
        return int(self.random.random() * number)

    def _adapter(self) -> int | None:
        number = self._one_of(self.settings.num_adapters + 1)
        return number - 1 if number else None

    def _num_turns(self) -> int:
        """Geometric, with the wanted mean."""
        go_on = 1 - 1 / self.settings.num_turns
        return 1 + int(math.log(1 - self.random.random()) / math.log(go_on)) if go_on else 1

    def _think(self) -> float:
        """Exponential."""
        return -math.log(1 - self.random.random()) * self.settings.think_s

    def _length(self, median: int) -> int:
        """Log-normal, by the method of Box and Muller (1958)."""
        radius = math.sqrt(-2 * math.log(1 - self.random.random()))
        normal = radius * math.cos(2 * math.pi * self.random.random())
        return min(max(1, round(median * math.exp(SPREAD * normal))), MAX_TOKENS)
