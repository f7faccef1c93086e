"""Sizes the core is built with."""

from attrs import frozen

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
    disk_bytes: int = 0
    """Of all files of the disk tier; 0: there is none."""
    checkpoint_spacing: int = 32
    """Tokens; a prompt's checkpoints are not closer to each other, nor to where it resumed."""
    checkpoint_grid: int = 512
    """Tokens between the checkpoints of a long stretch."""

    @property
    def token_groups(self) -> tuple[int, ...]:
        """Those with K and V: a block has a place in each."""
        return tuple(
            i for i, group in enumerate(self.groups) if group.state_class is not StateClass.POINT
        )

    @property
    def point_groups(self) -> tuple[int, ...]:
        """Those of recurrent layers: a slot has a place in each."""
        return tuple(
            i for i, group in enumerate(self.groups) if group.state_class is StateClass.POINT
        )

    @property
    def num_blocks(self) -> int:
        """Per group, on the device: every place's longest request, and one block each to copy
        from. Running requests therefore never run out."""
        return self.num_places * (-(-self.max_context // self.block_size) + 1)
