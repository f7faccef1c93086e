"""Where a request can resume: one rule for all kinds of layers.

Full attention resumes at any position whose tokens match, windows where all that the next token
sees is there, recurrent layers at exact checkpoints; the longest position that suits all counts.
"""

from attrs import evolve

from kvtrio.core.checkpoints import resumable as with_checkpoint
from kvtrio.core.index import Match
from kvtrio.core.windows import RequestWindows


def resumable(match: Match, done: int, windows: RequestWindows | None, has_states: bool) -> Match:
    """A match of tokens, cut where all layers can resume; ``done`` tokens or less are as good as
    none. The match of tokens is kept in it, if it was longer or there are states."""
    found = match
    while found.num_tokens > done:
        if windows is not None:
            found = shortened(found, windows.covered(found))
        if not has_states:
            break
        found = with_checkpoint(found, done)
        if windows is None or windows.covered(found) == found.num_tokens:
            break
        found = shortened(found, found.num_tokens - 1)
    is_whole = found.num_tokens == match.num_tokens and found.checkpoint is None
    return found if is_whole else evolve(found, whole=match)


def shortened(match: Match, num_tokens: int) -> Match:
    """The first ``num_tokens`` of a match of tokens."""
    if num_tokens >= match.num_tokens:
        return match
    num_whole = sum(block.end <= num_tokens for block in match.blocks)
    blocks, num_partial = match.blocks[:num_whole], num_tokens
    if blocks:
        num_partial -= blocks[-1].end
    partial = None
    if num_partial:
        is_inside = num_whole < len(match.blocks)
        partial = match.blocks[num_whole] if is_inside else match.partial
    return Match(blocks, partial, num_partial, num_tokens)
