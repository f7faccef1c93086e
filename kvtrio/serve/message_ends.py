"""Where the messages of a chat end in its prompt's ids: there other prompts will part from it.

Templates put control tokens between messages, and text cannot hold any: so the first of a run of
them, headers included, is where a message ended. A template without control tokens shows no ends.
"""

from collections.abc import Sequence

from kvtrio.serve.served import TextTokenizer

HEADER_TOKENS = 8
"""Control tokens closer than that belong together: the end of a message and the next one's header;
or the message is so short that its end is of no use."""
SLACK = 4
"""Tokens before the end: should the message go on, its last ones may be read otherwise."""


def message_ends(ids: Sequence[int], tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Positions, ascending, each a few tokens before the end of a message."""
    ends: list[int] = []
    last = 0
    for position, token_id in enumerate(ids):
        if tokenizer.is_control(token_id):
            if position - last > HEADER_TOKENS:
                ends.append(position - SLACK)
            last = position
    return tuple(ends)
