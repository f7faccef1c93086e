"""The first line of a simulated server's log: its sizes, and nothing of a model it has not got."""

from kvtrio.core.config import CoreConfig
from kvtrio.obs.events import ServerStart
from kvtrio.obs.schema import Digest
from kvtrio.obs.words import (
    BackendKind,
    CacheKind,
    ComputeType,
    DeviceKind,
    TemplateSource,
)


def simulated_start(
    config: CoreConfig, num_adapters: int, version: tuple[int, int, int]
) -> ServerStart:
    """What analysis and ``kvtrio simulate --like`` read of a server."""
    major, minor, patch = version
    return ServerStart(
        port=0,
        model=Digest(0),
        version_major=major,
        version_minor=minor,
        version_patch=patch,
        device=DeviceKind.OTHER,
        backend=BackendKind.SIM,
        compute_type=ComputeType.OTHER,
        key_type=CacheKind.OTHER,
        value_type=CacheKind.OTHER,
        instruction_set=None,
        num_converted=0,
        template=TemplateSource.DEFAULT,
        num_threads=None,
        num_places=config.num_places,
        max_context=config.max_context,
        max_waiting=config.max_waiting,
        max_batch_tokens=config.max_batch_tokens,
        max_gap_s=config.max_gap_s,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        num_window_blocks=config.num_window_blocks,
        num_host_window_blocks=config.num_host_window_blocks,
        num_groups=len(config.groups),
        num_state_slots=config.num_state_slots,
        num_host_state_slots=config.num_host_state_slots,
        bytes_per_state=sum(group.bytes_per_state for group in config.groups),
        shared_ram_bytes=config.ram.num_bytes if config.ram else 0,
        shared_block_bytes=config.ram.block_bytes if config.ram else 0,
        shared_part_bytes=config.ram.part_bytes if config.ram else 0,
        pool_bytes=0,
        weight_bytes=0,
        num_adapters=num_adapters,
        load_s=0.0,
        max_disk_bytes=0,
        num_disk_entries=0,
        num_disk_bytes=0,
        has_sessions=False,
    )
