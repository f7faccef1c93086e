"""The table of states."""

import itertools

import pytest

from harness.core_fakes import submit
from kvtrio.core.identity import KeyMaker, TokenTrail
from kvtrio.core.request import TRANSITIONS, IllegalTransition, Request
from kvtrio.core.types import RequestState


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RequestState, RequestState)))
def test_a_move_is_in_the_table_or_changes_nothing(old, new):
    """Illegal moves raise and leave the state as it was."""
    request = Request(submit(1), 0.0, [1], TokenTrail(KeyMaker(b"", b""), 4, ()), state=old)
    if new in TRANSITIONS[old]:
        request.move(new)
        assert request.state is new
    else:
        with pytest.raises(IllegalTransition):
            request.move(new)
        assert request.state is old
