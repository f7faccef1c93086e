"""Sizes the core is built with."""

from collections.abc import Iterable

from attrs import field, frozen

from kvtrio.core.types import StateClass


@frozen
class Group:
    """Layers that share one block table."""

    state_class: StateClass
    window: int | None
    """Positions that a query sees, its own included; None: all."""
    bytes_per_token: int
    """0 for recurrent layers."""
    bytes_per_state: int = 0
    """Of one slot: the state of all the group's recurrent layers; 0 for other layers."""
    bytes_per_block: int = 0
    """Of one block as it is read and written, where that is not its tokens' bytes."""

    def part_bytes(self, block_size: int) -> int:
        """Of one block or slot as it is read and written."""
        by_token = self.bytes_per_block or self.bytes_per_token * block_size
        return self.bytes_per_state or by_token


@frozen(kw_only=True)
class RamBudget:
    """One limit in bytes for all that is kept in RAM, and what one of each kind takes there."""

    num_bytes: int
    block_bytes: int
    """In groups with all tokens; where there are none, a node of the index."""
    part_bytes: int = 0
    """In groups with a sliding window."""
    state_bytes: int = 0
    """In groups of recurrent layers."""

    def most(self, item_bytes: int) -> int:
        """How many would fit if there were nothing else."""
        return self.num_bytes // item_bytes if item_bytes else 0

    @property
    def num_with_parts(self) -> int:
        """Blocks that would fit with their parts, if there were nothing else."""
        return self.most(self.block_bytes + self.part_bytes)


@frozen(kw_only=True)
class CoreConfig:
    """Limits; every one is a hard bound."""

    groups: tuple[Group, ...]
    block_size: int
    """Tokens per block."""
    num_places: int
    """Requests that run at once."""
    max_context: int
    """Longest request, prompt and answer together, in tokens."""
    max_waiting: int
    """Requests."""
    max_batch_tokens: int
    max_waiting_tokens: int | None = None
    """Prompt tokens of all waiting requests together; None: no limit."""
    max_gap_s: float = 0.1
    """What a step may take while an answer streams."""
    max_step_s: float = 0.25
    """What it may take otherwise."""
    num_host_blocks: int = 0
    """Per group, in RAM; 0: no RAM tier."""
    is_unified: bool = True
    """Device and host are one memory: moving a block between them copies nothing."""
    num_state_slots: int = 0
    """Per group of recurrent layers, on the device: one for each place, the others for checkpoints;
    0 where there are no such groups."""
    num_host_state_slots: int = 0
    """The same in RAM, all for checkpoints."""
    ram: RamBudget | None = None
    """What all in RAM shares: the numbers above are then the most that there are of each kind.
    None: each has its own share."""
    disk_bytes: int = 0
    """Of all files of the disk tier; 0: there is none."""
    num_spare_blocks: int = 0
    """Per group, on the device, beyond what running requests may need: for state that is kept."""
    num_spare_window_blocks: int = 0
    """The same per group with a sliding window."""
    num_host_window_blocks: int = field()
    """Per group with a sliding window, in RAM; by default as many as ``num_host_blocks``."""
    checkpoint_spacing: int = 32
    """Tokens; a prompt's checkpoints are not closer to each other, nor to where it resumed."""
    checkpoint_grid: int = 512
    """Tokens between the checkpoints of a long stretch."""

    @num_host_window_blocks.default
    def _as_many(self) -> int:
        return self.num_host_blocks

    @property
    def token_groups(self) -> tuple[int, ...]:
        """Those with K and V of all tokens: a block has a place in each."""
        return self._of_class(StateClass.TOKEN)

    @property
    def window_groups(self) -> tuple[int, ...]:
        """Those with K and V of the last tokens: a block's part has a place in each."""
        return self._of_class(StateClass.WINDOW)

    @property
    def point_groups(self) -> tuple[int, ...]:
        """Those of recurrent layers: a slot has a place in each."""
        return self._of_class(StateClass.POINT)

    @property
    def kept_groups(self) -> tuple[int, ...]:
        """Those with K and V: what is stored of a block has a part for each."""
        return tuple(sorted((*self.token_groups, *self.window_groups)))

    def _of_class(self, state_class: StateClass) -> tuple[int, ...]:
        return tuple(i for i, group in enumerate(self.groups) if group.state_class is state_class)

    @property
    def window(self) -> int:
        """Of the groups with one, the widest: all go by it; 0 where there is none."""
        return widest_window(self.groups)

    @property
    def num_blocks(self) -> int:
        """Per group, on the device: every place's longest request, and one block each to copy
        from. Running requests therefore never run out. And what is spare."""
        return self._num_needed_blocks + self.num_spare_blocks

    @property
    def num_window_blocks(self) -> int:
        """Per group with a sliding window, on the device."""
        sizes = (self.window, self.block_size, self.num_places, self.max_batch_tokens)
        return window_blocks(*sizes, self._num_needed_blocks) + self.num_spare_window_blocks

    @property
    def _num_needed_blocks(self) -> int:
        return self.num_places * (-(-self.max_context // self.block_size) + 1)


def widest_window(groups: Iterable[Group]) -> int:
    """Of the groups that are kept as windows, in tokens; 0: there is none."""
    windows = (g.window or 0 for g in groups if g.state_class is StateClass.WINDOW)
    return max(windows, default=0)


def window_blocks(
    window: int, block_size: int, num_places: int, max_batch_tokens: int, num_blocks: int
) -> int:
    """How many blocks running requests may need at once in a group with a window, and a window more
    for each place, to keep; never more than ``num_blocks``, what they need without a window.

    A chunk of n tokens sees and fills ceil((window - 1 + n) / size) + 1 blocks at most, those of a
    step together have ``max_batch_tokens``, and each request may hold one block to copy from.
    """
    if not window:
        return 0
    per_window = -(-(window - 1) // block_size) + 1
    most = num_places * (2 * per_window + 2) + -(-max_batch_tokens // block_size)
    return min(num_blocks, most)
