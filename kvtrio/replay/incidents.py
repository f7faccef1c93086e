"""What went wrong on servers, as scenarios that say what has to come out instead.

``scenarios/README.md`` tells each one's story. They are written here once; ``kvtrio scenario
incident NAME FILE`` writes a file, and those in ``scenarios/`` are such files.
"""

from collections.abc import Callable, Mapping

from attrs import define, field

from kvtrio.core.types import Retain
from kvtrio.replay.scenario import (
    SCHEMA,
    Action,
    Adapter,
    Expect,
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

PURPOSES = ("chat", "title", "recap", "probe", "tool")
PROBE, RECAP = 3, 2
PROBE_EVERY_S = 390.0
Prompt = tuple[Piece, ...]


@define(eq=False)
class Story:
    """A scenario in the making."""

    name: str
    max_context: int = 8192
    num_places: int = 4
    num_adapters: int = 0
    lines: list[Line] = field(init=False, factory=list)
    requests: list[Request] = field(init=False, factory=list)
    now_s: float = field(init=False, default=0.0)

    def __attrs_post_init__(self) -> None:
        self.lines.append(
            Header(
                schema=SCHEMA,
                origin=Origin.MADE,
                max_context=self.max_context,
                purposes=PURPOSES,
                name=self.name,
                num_places=self.num_places,
            )
        )
        self.lines += [Adapter(alias=f"a{number}") for number in range(self.num_adapters)]

    def ask(self, prompt: Prompt, output: int, wait_s: float = 10.0, **more: object) -> int:
        """A request, ``wait_s`` after the one before; returns its number."""
        self.now_s += wait_s if self.requests else 0.0
        chosen: dict[str, object] = {"purpose": 0, **more}
        request = Request(
            id=len(self.requests),
            at_s=self.now_s,
            output_tokens=output,
            prompt=prompt,
            **chosen,  # type: ignore[arg-type] # fields by name
        )
        self.requests.append(request)
        self.lines.append(request)
        return request.id

    def turn(self, session: int, prompt: Prompt, output: int, wait_s: float = 10.0) -> int:
        """A request of a conversation that its caller named."""
        earlier = [each for each in self.requests if each.session == session]
        think_s = wait_s if earlier else None
        return self.ask(
            prompt,
            output,
            wait_s,
            session=session,
            is_named=True,
            turn=len(earlier),
            think_s=think_s,
        )

    def probe(self, wait_s: float) -> int:
        """A health probe: always the same 21 tokens."""
        first = next((each.id for each in self.requests if each.purpose == PROBE), None)
        prompt: Prompt = (Fresh(21),) if first is None else (Ref(first, Part.PROMPT, 0, 21),)
        return self.ask(prompt, 1, wait_s, purpose=PROBE, retain=Retain.AUXILIARY)

    def act(self, what: What, session: int | None = None, uses: tuple[Use, ...] = ()) -> None:
        self.lines.append(Action(at_s=self.now_s, what=what, session=session, scales=uses))

    def expect(self, request: int, **wanted: object) -> None:
        self.lines.append(Expect(request=request, **wanted))  # type: ignore[arg-type] # as above

    def expect_all_of(self, request: int, other: int) -> None:
        """All of another request's text was reused: of its last token there never was any state."""
        known = self.requests[other]
        self.expect(request, min_cached=known.prompt_tokens + known.output_tokens - 1)

    def after(self, other: int, new: int) -> Prompt:
        """Another request's prompt and answer, and ``new`` tokens."""
        known = self.requests[other]
        pieces: list[Piece] = [Ref(other, Part.PROMPT, 0, known.prompt_tokens)]
        if known.output_tokens:
            pieces.append(Ref(other, Part.OUTPUT, 0, known.output_tokens))
        return (*pieces, Fresh(new))

    def again(self, other: int) -> Prompt:
        return (Ref(other, Part.PROMPT, 0, self.requests[other].prompt_tokens),)


def adapter_returns() -> Story:
    story = Story("adapter-returns", num_places=1, num_adapters=1)
    uses = (Use(alias="a0"),)
    first = story.ask((Fresh(300),), 8, adapters=uses)
    story.ask((Fresh(300),), 8)
    back = story.ask((*story.again(first), Fresh(2)), 8, adapters=uses)
    story.expect(back, min_cached=300)
    bare = story.ask(story.again(first), 8)
    story.expect(bare, max_cached=0)
    return story


def global_scale() -> Story:
    story = Story("global-scale", num_places=1, num_adapters=1)
    uses = (Use(alias="a0"),)
    story.act(What.SCALES, uses=uses)
    first = story.ask((Fresh(300),), 16, adapters=uses, is_global=True)
    story.act(What.SCALES)
    bare = story.ask(story.again(first), 16, is_global=True)
    story.expect(bare, max_cached=0)
    story.act(What.SCALES, uses=uses)
    back = story.ask(story.again(first), 16, adapters=uses, is_global=True, same_as=first)
    story.expect(back, min_cached=299, output_as=first)
    return story


def save_restart_resume() -> Story:
    story = Story("save-restart-resume", max_context=4096, num_places=1)
    first = story.turn(0, (Fresh(3000),), 20)
    for what in (What.SAVE, What.RESTART, What.RESTORE):
        story.act(what, session=0)
    story.expect_all_of(story.turn(0, story.after(first, 30), 20), first)
    return story


def long_talker() -> Story:
    story = Story("long-talker", max_context=32_768, num_places=8)
    last = {session: story.turn(session, (Fresh(200),), 400, 1.0) for session in range(1, 5)}
    talker = story.turn(0, (Fresh(30_000),), 200, 2.0)
    for session, other in last.items():
        story.expect(other, max_gap_s=0.5)
        last[session] = story.turn(session, story.after(other, 40), 200, 30.0)
        story.expect_all_of(last[session], other)
    story.expect_all_of(story.turn(0, story.after(talker, 60), 50, 60.0), talker)
    return story


def probes() -> Story:
    story = Story("probes", num_places=1)
    last = story.turn(0, (Fresh(2000),), 60)
    for number in range(1, 13):
        story.probe(PROBE_EVERY_S)
        if number % 3 == 0:
            other = last
            last = story.turn(0, story.after(other, 40), 60, 20.0)
            story.expect_all_of(last, other)
    return story


def summary_at_the_head() -> Story:
    story = Story("summary-at-the-head", num_places=1)
    system = 500
    last = story.turn(0, (Fresh(system), Fresh(200)), 300)
    for _ in range(4):
        other = last
        last = story.turn(0, story.after(other, 150), 300, 30.0)
        story.expect_all_of(last, other)
    recap = story.ask(story.after(last, 30), 200, purpose=RECAP, retain=Retain.AUXILIARY)
    story.expect_all_of(recap, last)
    head = Ref(0, Part.PROMPT, 0, system)
    tail = Ref(last, Part.OUTPUT, 0, 300)
    prompt = (head, Fresh(8), Ref(recap, Part.OUTPUT, 0, 200), tail, Fresh(60))
    short = story.turn(0, prompt, 100)
    story.expect(short, min_cached=system)
    story.expect_all_of(story.turn(0, story.after(short, 40), 100, 30.0), short)
    story.expect_all_of(story.turn(0, story.after(last, 40), 100, 30.0), last)
    return story


def regenerate_and_delete() -> Story:
    story = Story("regenerate-and-delete", num_places=1)
    first = story.turn(0, (Fresh(400), Fresh(50)), 120)
    second = story.turn(0, story.after(first, 60), 120)
    story.expect_all_of(second, first)
    length = story.requests[second].prompt_tokens
    again = story.turn(0, story.again(second), 120)
    story.expect(again, min_cached=length - 1)
    third = story.turn(0, story.after(again, 60), 120)
    story.expect_all_of(third, again)
    deleted = story.turn(0, story.after(first, 45), 120)
    story.expect_all_of(deleted, first)
    edited = story.turn(0, (Ref(second, Part.PROMPT, 0, length - 20), Fresh(33)), 120)
    story.expect(edited, min_cached=length - 20, max_cached=length - 20)
    story.expect_all_of(story.turn(0, story.after(third, 30), 120), third)
    return story


def tenant_burst() -> Story:
    story = Story("tenant-burst", num_places=4)
    quiet = {tenant: story.ask((Fresh(300),), 60, 1.0, tenant=tenant) for tenant in (1, 2)}
    for number in range(40):
        story.ask((Fresh(400),), 100, 0.0 if number else 10.0, tenant=3)
    for tenant, other in quiet.items():
        mine = story.ask(story.after(other, 40), 60, 1.0, tenant=tenant)
        story.expect_all_of(mine, other)
        story.expect(mine, max_first_token_s=15.0)
    return story


def adapter_rotation() -> Story:
    story = Story("adapter-rotation", num_places=2, num_adapters=8)
    first = [
        story.ask((Fresh(300),) if not number else story.again(0), 10, 5.0, adapters=_one(number))
        for number in range(8)
    ]
    for number in first[1:]:
        story.expect(number, max_cached=0)
    for _ in range(2):
        for number in range(8):
            back = story.ask(story.again(0), 10, 5.0, adapters=_one(number), same_as=first[number])
            story.expect(back, min_cached=299, output_as=first[number])
    return story


def _one(number: int) -> tuple[Use, ...]:
    return (Use(alias=f"a{number}"),)


STORIES = (
    adapter_returns,
    adapter_rotation,
    global_scale,
    long_talker,
    probes,
    regenerate_and_delete,
    save_restart_resume,
    summary_at_the_head,
    tenant_burst,
)


def _teller(story: Callable[[], Story]) -> Callable[[], list[Line]]:
    return lambda: story().lines


INCIDENTS: Mapping[str, Callable[[], list[Line]]] = {
    story.__name__.replace("_", "-"): _teller(story) for story in STORIES
}
"""Lines, by name."""
