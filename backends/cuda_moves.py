"""Copies between the tiers: many blocks in one launch, and on a GPU beside the step where they may.

1. Copies of a batch run in order. Neighbours go together while none reads or writes what another
   of them writes.
2. What leaves the device is gathered at once, into memory of its own, and travels behind the step
   on a stream of its own; so the step may overwrite its blocks. What comes back travels on that
   same stream, hence behind all that left, and the step waits for it.
3. Without a GPU there are no streams, and the same copies just run.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from attrs import define, field, frozen
from torch import Tensor

from kvtrio.backends.torch_caches import Pool
from kvtrio.backends.torch_memory import AnyPool, run_copy
from kvtrio.core.batch import Copy
from kvtrio.core.types import Tier
from kvtrio.kernels.reference import copy_places
from kvtrio.kernels.triton_blocks import Pairs, Places, copy_parts

Pools = Mapping[Tier, tuple[AnyPool, ...]]


@frozen(eq=False)
class _Run:
    """Copies of one group between two tiers that may be done at once."""

    copies: tuple[Copy, ...]
    group: int
    source: Tier
    target: Tier


@define(eq=False)
class Mover:
    """All copies of one backend."""

    _pools: Pools
    _device: torch.device
    _stream: torch.cuda.Stream | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        on_gpu = self._device.type == "cuda"
        # torch has no annotations for making a stream.
        stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._stream = stream

    def run(self, copies: Sequence[Copy]) -> None:
        """In order, before the step."""
        for run in runs(copies):
            pair = self._pools[run.source][run.group], self._pools[run.target][run.group]
            if isinstance(pair[0], Pool) and isinstance(pair[1], Pool):
                for source, target in _parts(pair[0], pair[1]):
                    self._move(source, target, run)
                continue
            if run.source is not run.target:
                self.wait()
            for copy in run.copies:
                run_copy(self._pools[copy.source_tier], self._pools[copy.target_tier], copy)

    def wait(self) -> None:
        """Until all that travels has arrived, for who reads RAM himself."""
        if self._stream is not None:
            self._stream.synchronize()

    def _move(self, source: Tensor, target: Tensor, run: _Run) -> None:
        """One of a group's pools, [layers, places, ...]."""
        if source.device == target.device and run.source is run.target is Tier.DEVICE:
            copy_parts(Places.of(source), Places.of(target), self._pairs(run, source))
        elif run.source is run.target:
            for copy in run.copies:
                copy_places(source[:, copy.source], target[:, copy.target], copy.num_tokens)
        elif run.target is Tier.HOST:
            self._leave(source, target, run)
        else:
            self._return(source, target, run)

    def _leave(self, source: Tensor, target: Tensor, run: _Run) -> None:
        staged = self._staging(source, run)
        order = range(len(run.copies))
        copy_parts(Places.of(source), Places.of(staged), self._pairs(run, source, targets=order))
        with self._travelling(staged):
            for i, copy in enumerate(run.copies):
                part = (slice(None), copy.target, slice(copy.num_tokens))
                target[part].copy_(staged[:, i, : copy.num_tokens], non_blocking=True)

    def _return(self, source: Tensor, target: Tensor, run: _Run) -> None:
        with self._travelling(None):
            staged = self._staging(target, run)
            for i, copy in enumerate(run.copies):
                part = (slice(None), copy.source, slice(copy.num_tokens))
                staged[:, i, : copy.num_tokens].copy_(source[part], non_blocking=True)
        if self._stream is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_stream(self._stream)
            staged.record_stream(now)
        order = range(len(run.copies))
        copy_parts(Places.of(staged), Places.of(target), self._pairs(run, target, sources=order))

    def _staging(self, like: Tensor, run: _Run) -> Tensor:
        """Blocks one behind the other, as in RAM: a whole one travels in one piece."""
        layers, _, *rest = like.shape
        return like.new_empty(len(run.copies), layers, *rest).transpose(0, 1)

    @contextmanager
    def _travelling(self, staged: Tensor | None) -> Iterator[None]:
        """On the stream of copies, behind the present one if that made ``staged``."""
        if self._stream is None:
            yield
            return
        if staged is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            staged.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def _pairs(
        self,
        run: _Run,
        pool: Tensor,
        sources: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
    ) -> Pairs:
        place_bytes = pool[0, 0].numel() * pool.itemsize
        token_words = place_bytes // Places.of(pool).words.itemsize // pool.shape[2]
        words = [copy.num_tokens * token_words for copy in run.copies]
        return Pairs(
            self._ints(sources or [copy.source for copy in run.copies]),
            self._ints(targets or [copy.target for copy in run.copies]),
            self._ints(words).int(),
        )

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values)).to(self._device)


def runs(copies: Sequence[Copy]) -> Iterator[_Run]:
    """Neighbours that may be done at once, in order."""
    own: list[Copy] = []
    for copy in copies:
        if own and not _go_together(own, copy):
            yield _run(own)
            own = []
        own.append(copy)
    if own:
        yield _run(own)


def _run(copies: list[Copy]) -> _Run:
    first = copies[0]
    return _Run(tuple(copies), first.group, first.source_tier, first.target_tier)


def _go_together(own: list[Copy], copy: Copy) -> bool:
    first = own[0]
    ways = [(each.group, each.source_tier, each.target_tier) for each in (first, copy)]
    if ways[0] != ways[1]:
        return False
    written = {(each.target_tier, each.target) for each in own}
    read = {(each.source_tier, each.source) for each in own}
    target = (copy.target_tier, copy.target)
    return (copy.source_tier, copy.source) not in written and target not in written | read


def _parts(source: Pool, target: Pool) -> Iterator[tuple[Tensor, Tensor]]:
    yield source.keys, target.keys
    yield source.values, target.values
