"""Clients that leave: what a server is asked for, and what a simulation says of them."""

import pytest

from kvtrio.replay.leaving import MORE, UNKNOWN_OUTPUT, Stay, stay
from kvtrio.replay.results import Pacing, ServerKind
from kvtrio.replay.scenario import Fresh, Request

KVTRIO, LLAMA = ServerKind.KVTRIO, ServerKind.LLAMA
OPEN, SERIAL = Pacing.OPEN, Pacing.SERIAL


def left(output_tokens: int, ready_tokens: int | None) -> Request:
    """After 2 s, of a request with a prompt of 100 tokens."""
    return Request(
        id=0,
        at_s=0.0,
        left_s=2.0,
        output_tokens=output_tokens,
        ready_tokens=ready_tokens,
        prompt=(Fresh(100),),
    )


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (left(5, 105), Stay(num_wanted=6)),
        (left(5, 104), Stay(num_wanted=5)),
        (left(5, None), Stay(num_wanted=6)),
        (left(0, 100), Stay(num_wanted=1)),
        (left(0, 64), Stay(num_wanted=1, num_prompt=64)),
        (left(0, 0), Stay(num_wanted=1, is_sent=False)),
        (left(0, None), Stay(num_wanted=1, num_enough=1, after_s=2.0)),
    ],
)
def test_a_serial_replay_leaves_the_recorded_state(request_: Request, expected: Stay) -> None:
    """All servers are asked for just so much that as many tokens are computed; by time only where
    that is not known."""
    assert stay(request_, SERIAL, LLAMA) == expected


@pytest.mark.parametrize(
    ("request_", "kind", "expected"),
    [
        (left(5, 105), KVTRIO, Stay(num_wanted=6)),
        (left(5, 105), LLAMA, Stay(num_wanted=5 + MORE, num_enough=5)),
        (left(5, None), KVTRIO, Stay(num_wanted=5 + MORE, num_enough=5)),
        (left(0, 64), KVTRIO, Stay(num_wanted=1, num_enough=1, after_s=2.0)),
        (left(0, 64), LLAMA, Stay(num_wanted=UNKNOWN_OUTPUT, num_enough=1, after_s=2.0)),
    ],
)
def test_a_replay_in_time_leaves(request_: Request, kind: ServerKind, expected: Stay) -> None:
    """After the recorded tokens or seconds; kvtrio computes no more than it did all the same."""
    assert stay(request_, OPEN, kind) == expected
