"""What is taken of a device's memory before its pools are made: by weights, and by a step."""

from collections.abc import Callable, Sequence

import torch
from attrs import evolve

from kvtrio.backends.base import BackendError, BackendInfo, BackendSettings
from kvtrio.backends.cuda_devices import Device, Work
from kvtrio.core.batch import Batch, Chunk, SampleRow
from kvtrio.core.config import Group
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import BlockId, RequestId, StateClass

SAMPLED = SampleRow(SamplingParams(temperature=1.0, top_k=0, num_logprobs=20), 0.5, ())
"""What takes most: the whole vocabulary is sorted."""


def allowed_bytes(device: Device, settings: BackendSettings) -> tuple[int, int]:
    """Of all memory what may be taken, and what is taken now, by whomever."""
    free, total = device.memory()
    return int(total * settings.gpu_memory_fraction), total - free


def smallest(info: BackendInfo) -> BackendInfo:
    """One place of each kind: enough for ``largest_step``, whose requests all share it."""
    return evolve(
        info,
        num_blocks=1,
        num_host_blocks=0,
        num_window_blocks=1,
        num_host_window_blocks=0,
        num_state_slots=1,
        num_host_state_slots=0,
        is_unified=True,
    )


def largest_step(groups: Sequence[Group], settings: BackendSettings) -> Batch:
    """As many tokens and samples as a step may have, at the end of the longest context."""
    num_chunks = min(settings.max_sampled, settings.max_rows)
    left, chunks = settings.max_rows, list[Chunk]()
    for i in range(num_chunks):
        num_tokens = min(settings.max_context, left - (num_chunks - i - 1))
        left -= num_tokens
        chunks.append(
            Chunk(
                request_id=RequestId(i),
                start=settings.max_context - num_tokens,
                token_ids=(0,) * num_tokens,
                block_tables=tuple(_table(group, settings) for group in groups),
                sample=SAMPLED,
            )
        )
    return Batch(0, tuple(chunks))


def step_bytes(devices: Sequence[Device], work: Work, settings: BackendSettings) -> list[int]:
    """What ``work``, the largest step, takes at most on each device.

    Raises BackendError where it does not fit.
    """
    try:
        return _peaks(devices, work)
    except torch.OutOfMemoryError:
        pass
    raise BackendError(
        f"not enough memory for a step of {settings.max_rows} tokens beside the weights; a smaller "
        "--batch-size needs less"
    )


def _peaks(devices: Sequence[Device], work: Callable[[], None]) -> list[int]:
    if not devices:
        work()
        return []
    rest = list[int]()
    own = devices[0].peak_bytes(lambda: rest.extend(_peaks(devices[1:], work)))
    return [own, *rest]


def _table(group: Group, settings: BackendSettings) -> tuple[BlockId, ...]:
    is_point = group.state_class is StateClass.POINT
    num_blocks = 1 if is_point else -(-settings.max_context // settings.block_size)
    return (BlockId(0),) * num_blocks
