"""The server's log: where it goes, and its first line."""

import os
import re
import sys
import time
from contextlib import ExitStack
from enum import Enum
from typing import TypeVar
from urllib.parse import urlsplit

from attrs import field, frozen

import kvtrio
from kvtrio.backends.base import BackendInfo
from kvtrio.cli.backend import CPU
from kvtrio.cli.prepare import Prepared
from kvtrio.config import ConfigError, LogSettings
from kvtrio.obs.events import ServerStart
from kvtrio.obs.logging import Clock, Log, library_bridge, open_log_file
from kvtrio.obs.schema import Digest, Level
from kvtrio.obs.words import (
    BackendKind,
    CacheKind,
    ComputeType,
    DeviceKind,
    InstructionSet,
    TemplateSource,
)

Word = TypeVar("Word", bound=Enum)
Other = TypeVar("Other", bound=Enum | None)


def open_log(settings: LogSettings, stack: ExitStack) -> Log:
    """Open the log and make it the way out for libraries too; raises ``ConfigError``."""
    file = sys.stderr.buffer
    if settings.log_file is not None:
        try:
            file = stack.enter_context(open_log_file(settings.log_file))
        except OSError as error:
            reason = os.strerror(error.errno or 5)
            raise ConfigError(f"--log-file {settings.log_file}: {reason}") from None
    clock = Clock(monotonic_ns=time.monotonic_ns, wall_s=time.time)
    log = Log(file, clock, Level(settings.log_level))
    stack.enter_context(library_bridge(log))
    return log


@frozen(kw_only=True)
class Begun:
    """A server that listens."""

    url: str
    load_s: float
    max_disk_bytes: int
    num_disk_entries: int
    """What was found on disk."""
    num_disk_bytes: int
    log_key: bytes = field(repr=False)


def version() -> tuple[int, int, int]:
    """Of kvtrio."""
    major, minor, patch = map(int, re.findall(r"\d+", kvtrio.__version__)[:3])
    return major, minor, patch


def server_start(prepared: Prepared, info: BackendInfo, begun: Begun) -> ServerStart:
    """What was set up, in numbers. The digest's key lives as long as the process."""
    scheduling, settings = prepared.config.scheduling, prepared.backend_settings
    is_cpu = info.name == CPU
    compute = ComputeType.FILE.value if is_cpu else settings.dtype
    major, minor, patch = version()
    return ServerStart(
        port=urlsplit(begun.url).port or 0,
        model=Digest.of(prepared.served.model_path_name, begun.log_key),
        version_major=major,
        version_minor=minor,
        version_patch=patch,
        device=_word(DeviceKind, settings.device.partition(":")[0], DeviceKind.OTHER),
        backend=_word(BackendKind, info.name, BackendKind.OTHER),
        compute_type=_word(ComputeType, compute, ComputeType.OTHER),
        key_type=_word(CacheKind, settings.key_type if is_cpu else compute, CacheKind.OTHER),
        value_type=_word(CacheKind, settings.value_type if is_cpu else compute, CacheKind.OTHER),
        instruction_set=_word(InstructionSet, info.numerics, None),
        num_converted=info.num_converted,
        template=_template_source(prepared),
        num_threads=settings.num_threads,
        num_places=scheduling.parallel,
        max_context=info.max_context,
        max_waiting=scheduling.max_waiting,
        max_batch_tokens=scheduling.batch_size,
        max_gap_s=scheduling.max_gap_ms / 1e3,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        num_window_blocks=info.num_window_blocks,
        num_host_window_blocks=info.num_host_window_blocks,
        num_groups=len(info.groups),
        num_state_slots=info.num_state_slots,
        num_host_state_slots=info.num_host_state_slots,
        bytes_per_state=sum(group.bytes_per_state for group in info.groups),
        shared_ram_bytes=info.ram.num_bytes if info.ram else 0,
        shared_block_bytes=info.ram.block_bytes if info.ram else 0,
        shared_part_bytes=info.ram.part_bytes if info.ram else 0,
        pool_bytes=info.pool_bytes,
        weight_bytes=info.weight_bytes,
        num_adapters=len(prepared.adapters),
        load_s=begun.load_s,
        max_disk_bytes=begun.max_disk_bytes,
        num_disk_entries=begun.num_disk_entries,
        num_disk_bytes=begun.num_disk_bytes,
        has_sessions=prepared.sessions is not None,
    )


def _template_source(prepared: Prepared) -> TemplateSource:
    if prepared.config.model.chat_template is not None:
        return TemplateSource.OVERRIDE
    return TemplateSource.DEFAULT if prepared.served.template_note else TemplateSource.MODEL


def _word(words: type[Word], value: str, other: Other) -> Word | Other:
    return next((word for word in words if word.value == value), other)
