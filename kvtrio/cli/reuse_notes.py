"""Where a model or a setting makes reuse of state impossible or pointless, said at start."""

from kvtrio.backends.base import BackendInfo

FEW_TOKENS = 64
"""That may be computed again without a word."""
ENOUGH = 4
"""Checkpoints for each place: two conversations, or a turn and an earlier one."""
SCARCE = (
    "{number} checkpoints are few for {places} places: most turns will be computed from the start"
    " of their conversation (--cache-ram gives more)"
)
COARSE = (
    "with --block-size {size} this model resumes at multiples of {size} tokens and where a request"
    " ended, and nowhere else: identical and edited requests compute up to {size} tokens again"
)
NO_RAM = (
    "no RAM is set aside for past requests (--cache-ram): a conversation is computed from its start"
    " whenever the {places} places needed its memory for others"
)


def reuse_notes(info: BackendInfo, num_places: int) -> list[str]:
    """What is to be said; mostly nothing."""
    notes: list[str] = []
    if any(group.bytes_per_state for group in info.groups):
        number = info.num_state_slots - num_places + info.num_host_state_slots
        if number < ENOUGH * num_places:
            notes.append(SCARCE.format(number=number, places=num_places))
        if info.block_size > FEW_TOKENS:
            notes.append(COARSE.format(size=info.block_size))
    elif not info.num_host_blocks:
        notes.append(NO_RAM.format(places=num_places))
    return notes
