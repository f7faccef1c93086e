"""Random scenarios: conversations with all that a scenario can say, for replays of any kind."""

import random
from collections.abc import Iterator

from attrs import define, field, frozen

from kvtrio.core.types import Retain
from kvtrio.replay.scenario import (
    Action,
    Adapter,
    Block,
    Fresh,
    Header,
    Line,
    Origin,
    Part,
    Piece,
    Ref,
    Request,
    Use,
    What,
)
from kvtrio.replay.scenario_file import Scenario, checked, collect


@frozen(kw_only=True)
class Traffic:
    """How much of what."""

    num_requests: int = 60
    num_sessions: int = 8
    mean_gap_s: float = 0.2
    max_prompt: int = 120
    max_output: int = 30
    max_context: int = 400
    num_adapters: int = 2
    may_restart: bool = False
    tenants: int = 3


def random_scenario(seed: int, traffic: Traffic | None = None) -> Scenario:
    """Checked as a file would be."""
    return collect(checked(_Maker(random.Random(seed), traffic or Traffic()).lines()))


@define(eq=False)
class _Maker:
    rng: random.Random
    traffic: Traffic
    requests: list[Request] = field(factory=list)
    last: dict[int, Request] = field(factory=dict)
    """By session."""

    def lines(self) -> Iterator[Line]:
        rng, at_s = self.rng, 0.0
        yield Header(origin=Origin.MADE, max_context=self.traffic.max_context, purposes=("chat",))
        for number in range(self.traffic.num_adapters):
            yield Adapter(alias=f"a{number}")
        for _ in range(self.traffic.num_requests):
            at_s += rng.choice([0.0, rng.expovariate(1 / self.traffic.mean_gap_s)])
            if self.traffic.may_restart and rng.random() < 0.03:
                yield Action(at_s=at_s, what=What.RESTART)
            request = self.request(at_s)
            self.requests.append(request)
            if request.session is not None:
                self.last[request.session] = request
            yield request

    def request(self, at_s: float) -> Request:
        rng, number = self.rng, len(self.requests)
        session = rng.choice([None, *range(self.traffic.num_sessions)])
        prompt, turn = self.prompt(session)
        leaves = rng.random() < 0.1
        output = rng.randrange(1, self.traffic.max_output)
        output = output if not leaves else rng.choice([0, 0, output])
        uses = [Use(alias=f"a{i}", scale=rng.choice([0.5, 1.0])) for i in self.some_adapters()]
        return Request(
            id=number,
            at_s=at_s,
            session=session,
            turn=turn,
            purpose=rng.choice([None, 0]),
            retain=rng.choice([Retain.NORMAL] * 6 + [Retain.AUXILIARY, Retain.PIN]),
            retain_s=5.0,
            priority=rng.choice([0, 0, 0, 1]),
            tenant=rng.randrange(self.traffic.tenants),
            namespace=rng.choice([0, 0, 0, 1]),
            adapters=tuple(uses),
            reuse=rng.random() < 0.95,
            output_tokens=output,
            left_s=rng.uniform(0, 0.3) if leaves else None,
            ready_tokens=self.ready(prompt, output) if leaves else None,
            think_s=rng.uniform(0, 1),
            prompt=prompt,
        )

    def ready(self, prompt: tuple[Piece, ...], output: int) -> int | None:
        """How far the server was when a client left."""
        num_prompt = sum(piece.length for piece in prompt)
        if output:
            return self.rng.choice([None, num_prompt + output - 1, num_prompt + output])
        return self.rng.choice([None, 0, min(10, num_prompt), min(40, num_prompt), num_prompt])

    def some_adapters(self) -> list[int]:
        count = self.rng.choice([0, 0, 1, 2])
        return self.rng.sample(
            range(self.traffic.num_adapters), min(count, self.traffic.num_adapters)
        )

    def prompt(self, session: int | None) -> tuple[tuple[Piece, ...], int]:
        """Goes on from the session's last turn, from somebody's beginning, or from nowhere."""
        rng, last = self.rng, None if session is None else self.last.get(session)
        fresh = Fresh(length=rng.randrange(1, self.traffic.max_prompt))
        if last is None or last.prompt_tokens > self.traffic.max_context // 2:
            head: list[Piece] = []
            if rng.random() < 0.3:
                head.append(Block(digest=rng.randrange(2), length=rng.randrange(1, 40)))
            elif self.requests and rng.random() < 0.5:
                head.append(self.start_of(rng.choice(self.requests)))
            return (*head, fresh), 0
        if rng.random() < 0.2:
            return (self.start_of(last), fresh), last.turn + 1
        whole: list[Piece] = [Ref(last.id, Part.PROMPT, 0, last.prompt_tokens)]
        if last.output_tokens:
            whole.append(Ref(last.id, Part.OUTPUT, 0, last.output_tokens))
        return (*whole, fresh), last.turn + 1

    def start_of(self, other: Request) -> Ref:
        longest = min(other.prompt_tokens, self.traffic.max_context // 2)
        return Ref(other.id, Part.PROMPT, 0, self.rng.randrange(1, longest + 1))
