"""When requests come: at their times, after their sessions, around actions."""

from math import inf

from kvtrio.replay.arrivals import Arrivals
from kvtrio.replay.scenario import Action, Fresh, Header, Line, Origin, Request, What
from kvtrio.replay.scenario_file import checked, collect

HEADER = Header(origin=Origin.MADE, max_context=100)


def request(number: int, at_s: float, session: int | None = None, think_s: float = 0.0) -> Request:
    return Request(
        id=number,
        at_s=at_s,
        session=session,
        think_s=think_s,
        output_tokens=1,
        prompt=(Fresh(length=3),),
    )


def arrivals(*lines: Line, is_closed: bool = False) -> Arrivals:
    return Arrivals(collect(checked([HEADER, *lines])), is_closed)


def taken(source: Arrivals, now: float) -> list[tuple[float, object]]:
    return [
        (at_s, event.id if isinstance(event, Request) else event.what)
        for at_s, event in source.take(now)
    ]


def test_open_requests_come_at_their_times():
    """Whether others have ended or not."""
    source = arrivals(request(0, 1.0, 5), request(1, 2.0, 5), request(2, 2.0))
    assert source.next_s == 1.0
    assert taken(source, 0.5) == []
    assert taken(source, 1.5) == [(1.0, 0)]
    assert taken(source, 9.0) == [(2.0, 1), (2.0, 2)]
    assert source.next_s == inf
    assert source.is_done


def test_closed_turns_wait_for_the_turn_before():
    """And for their user, who thinks; other sessions do not wait."""
    lines = [request(0, 1.0, 5), request(1, 2.0, 5, think_s=3.0), request(2, 2.5, 6)]
    source = arrivals(*lines, request(3, 2.6, 5), is_closed=True)
    assert taken(source, 10.0) == [(1.0, 0), (2.5, 2)]
    assert source.next_s == inf
    assert not source.is_done, "turns are to come behind one that runs"
    source.end(0, 11.0)
    assert source.next_s == 14.0
    assert taken(source, 14.0) == [(14.0, 1)]
    source.end(1, 15.0)
    assert not source.is_done
    assert taken(source, 15.0) == [(15.0, 3)]
    assert source.is_done


def test_an_action_waits_for_all_before_it_and_holds_up_all_behind():
    """Also a session's turns on both sides of it."""
    restart = Action(at_s=2.0, what=What.RESTART)
    lines = [request(0, 1.0, 5), restart, request(1, 2.0, 5, think_s=1.0), request(2, 2.0)]
    for is_closed in (False, True):
        source = arrivals(*lines, is_closed=is_closed)
        assert taken(source, 5.0) == [(1.0, 0)]
        assert source.next_s == inf
        source.end(0, 5.0)
        assert source.next_s == 2.0
        events = taken(source, 5.0)
        assert events[0] == (2.0, What.RESTART)
        if is_closed:
            assert events[1:] == [(2.0, 2)]
            assert taken(source, 6.0) == [(6.0, 1)]
        else:
            assert events[1:] == [(2.0, 1), (2.0, 2)]
