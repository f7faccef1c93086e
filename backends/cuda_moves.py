"""Copies between the tiers: many blocks in one launch, and on a GPU beside the step where they may.

1. Copies of a batch run in order. Neighbours go together while none reads or writes what another
   of them writes.
2. What leaves the device is gathered into staging memory on the compute stream, in front of the
   step, and travels behind that on the copies' stream; so the step may overwrite its blocks. What
   comes back travels on the same stream, hence behind all that left, and the compute stream waits
   for it before it takes it out of staging memory.
3. Staging memory is used by turns. Who fills a turn waits until it was emptied.
4. Pinned RAM is touched on the copies' stream, or by the CPU when nothing is on that stream.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from kvtrio.backends.cuda_devices import Device, Stream, surely
from kvtrio.backends.cuda_staging import Staging, Turn, place_bytes, tensors_of
from kvtrio.backends.torch_caches import Pool
from kvtrio.backends.torch_memory import AnyPool
from kvtrio.core.batch import Copy
from kvtrio.core.types import Tier
from kvtrio.kernels.reference import copy_places
from kvtrio.kernels.triton_blocks import Pairs, Places, copy_parts

Pools = Mapping[Tier, tuple[AnyPool, ...]]


@frozen(eq=False)
class Run:
    """Copies of one group between two tiers that may be done at once."""

    copies: tuple[Copy, ...]
    group: int
    source: Tier
    target: Tier

    def cut(self, most: int) -> Iterator["Run"]:
        """The same in parts of at most so many copies."""
        for first in range(0, len(self.copies), most):
            yield evolve(self, copies=self.copies[first : first + most])


@define(eq=False)
class Mover:
    """All copies of one device's pools."""

    _pools: Pools
    _device: Device
    _staging: Staging = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._staging = Staging.of(self._pools[Tier.DEVICE], self._device.place)

    def run(self, copies: Sequence[Copy]) -> None:
        """In order, before the step."""
        for run in runs(copies):
            pools = self._pools[run.source][run.group], self._pools[run.target][run.group]
            if run.source is run.target is Tier.HOST:
                self.wait()
            by_tokens = isinstance(pools[0], Pool)
            for source, target in zip(*map(tensors_of, pools), strict=True):
                self._move(source, target, run if by_tokens else _whole(run))

    def wait(self) -> None:
        """Until all that travels has arrived, for who reads or writes RAM himself."""
        self._device.copies.synchronise()

    def _move(self, source: Tensor, target: Tensor, run: Run) -> None:
        """One of a group's tensors, [layers, places, tokens, ...]."""
        if run.source is run.target is Tier.DEVICE:
            self._device.compute.run(
                lambda: copy_parts(Places.of(source), Places.of(target), self._pairs(run, source))
            )
        elif run.source is run.target:
            for copy in run.copies:
                copy_places(source[:, copy.source], target[:, copy.target], copy.num_tokens)
        elif run.target is Tier.HOST:
            for part in run.cut(self._staging.capacity(source)):
                self._leave(source, target, part)
        else:
            for part in run.cut(self._staging.capacity(target)):
                self._return(source, target, part)

    def _leave(self, source: Tensor, target: Tensor, run: Run) -> None:
        compute, copies = self._device.compute, self._device.copies
        turn = self._staging.leaving()
        staged, order = turn.view(source, len(run.copies)), range(len(run.copies))

        def gather() -> None:
            pairs = self._pairs(run, source, targets=order)
            copy_parts(Places.of(source), Places.of(staged), pairs)

        def travel() -> None:
            for i, copy in enumerate(run.copies):
                ways = target[:, copy.target], staged[:, i]
                for mine, theirs in zip(*(_pieces(w, copy.num_tokens) for w in ways), strict=True):
                    mine.copy_(theirs, non_blocking=True)

        _wait_for(compute, turn)
        compute.run(gather)
        copies.wait(compute.mark())
        copies.run(travel)
        turn.emptied = copies.mark()

    def _return(self, source: Tensor, target: Tensor, run: Run) -> None:
        compute, copies = self._device.compute, self._device.copies
        turn = self._staging.returning()
        staged, order = turn.view(target, len(run.copies)), range(len(run.copies))

        def travel() -> None:
            for i, copy in enumerate(run.copies):
                # A whole place lies in one piece. A part of it torch would first gather on the CPU,
                # and not wait for what is still on its way there.
                staged[:, i].copy_(source[:, copy.source], non_blocking=True)

        def scatter() -> None:
            pairs = self._pairs(run, target, sources=order)
            copy_parts(Places.of(staged), Places.of(target), pairs)

        _wait_for(copies, turn)
        copies.run(travel)
        compute.wait(copies.mark())
        compute.run(scatter)
        turn.emptied = compute.mark()

    def _pairs(
        self,
        run: Run,
        pool: Tensor,
        sources: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
    ) -> Pairs:
        """``pool`` [layers, places, tokens, ...], on the device that copies."""
        token_words = place_bytes(pool) // pool.shape[0] // pool.shape[2]
        token_words //= Places.of(pool).words.itemsize
        columns = (
            [copy.source for copy in run.copies] if sources is None else sources,
            [copy.target for copy in run.copies] if targets is None else targets,
            [copy.num_tokens * token_words for copy in run.copies],
        )
        rest = [0] * (len(run.copies) % 2)  # so that each column begins at a multiple of ALIGNMENT
        numbers = torch.tensor([[*column, *rest] for column in columns])
        first, second, words = surely(self._device, lambda: numbers.to(pool.device))
        size = len(run.copies)
        return Pairs(first[:size], second[:size], words.int()[:size])


def _pieces(place: Tensor, num_tokens: int) -> tuple[Tensor, ...]:
    """The first tokens of a place [layers, tokens, ...], in parts that lie in one piece each: of
    anything else torch would make a copy first, and wait for it."""
    if num_tokens == place.shape[1]:
        return (place,)
    return place[:, :num_tokens].unbind()


def _wait_for(stream: Stream, turn: Turn) -> None:
    if turn.emptied is not None:
        stream.wait(turn.emptied)


def _whole(run: Run) -> Run:
    """Of states: all of a slot."""
    return evolve(run, copies=tuple(evolve(copy, num_tokens=1) for copy in run.copies))


def runs(copies: Sequence[Copy]) -> Iterator[Run]:
    """Neighbours that may be done at once, in order."""
    own: list[Copy] = []
    for copy in copies:
        if own and not _go_together(own, copy):
            yield _run(own)
            own = []
        own.append(copy)
    if own:
        yield _run(own)


def _run(copies: list[Copy]) -> Run:
    first = copies[0]
    return Run(tuple(copies), first.group, first.source_tier, first.target_tier)


def _go_together(own: list[Copy], copy: Copy) -> bool:
    first = own[0]
    ways = [(each.group, each.source_tier, each.target_tier) for each in (first, copy)]
    if ways[0] != ways[1]:
        return False
    written = {(each.target_tier, each.target) for each in own}
    read = {(each.source_tier, each.source) for each in own}
    target = (copy.target_tier, copy.target)
    return (copy.source_tier, copy.source) not in written and target not in written | read
