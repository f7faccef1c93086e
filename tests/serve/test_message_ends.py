"""Where a chat's messages end in its ids."""

import pytest

from harness.serving import BOS, EOS, ByteTokenizer
from kvtrio.serve.message_ends import SLACK, message_ends

LONG = tuple(b"twelve bytes")


@pytest.mark.parametrize(
    ("ids", "ends"),
    [
        ((), ()),
        (LONG, ()),
        ((BOS, *LONG, EOS, 10, BOS, *LONG, EOS, 10, BOS, 65), (13, 28)),
        ((*LONG, EOS), (12,)),
        ((BOS, 65, EOS, 10, BOS, 66, EOS, 10, BOS, *LONG, EOS), (21,)),
    ],
    ids=["nothing", "no control tokens", "two messages", "no start token", "short messages"],
)
def test_ends_are_found_by_control_tokens(ids: tuple[int, ...], ends: tuple[int, ...]) -> None:
    """The first of a run of them, headers between included; a few tokens before it."""
    assert message_ends(ids, ByteTokenizer()) == tuple(end - SLACK for end in ends)
