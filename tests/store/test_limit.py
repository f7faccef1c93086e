"""The disk tier against a model of it: what is there, and that the limit holds at every instant."""

from contextlib import suppress
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from harness.file_faults import BrittleFiles, Fault, Stopped, Trouble
from harness.memory_files import MemoryFiles
from harness.stored import SECRET, chain, state
from kvtrio.core.stored import Stored, StoreError, StoreFault
from kvtrio.store.disk import DiskStore
from kvtrio.store.files import TEMPORARY
from kvtrio.store.scan import KEY_FILE, entry_name

GRAIN = 4096
BLOCKS = [*chain(0, 5), *chain(100, 5)]
ENTRIES = {
    entry_name(each.head.key, each.head.state_offset): each
    for each in (*BLOCKS, *map(state, BLOCKS))
}
names = st.sampled_from(sorted(ENTRIES))
limits = st.integers(1, 12).map(lambda grains: grains * GRAIN)
FAILURES = st.sampled_from([fault for fault in Fault if not fault.stops])


class DiskTier(RuleBasedStateMachine):
    """``known``: entries that are there and may have been damaged behind the store's back; with
    faults, entries may be missing, but never be others."""

    @initialize(limit=limits)
    def begin(self, limit: int) -> None:
        self.files = BrittleFiles(MemoryFiles.new())
        self.has_failed = False
        self.times = 0
        self.limit = limit
        self.store = DiskStore.open_files(self.files, limit, SECRET)
        self.known: set[str] = set()

    @rule(name=names)
    def write(self, name: str) -> None:
        has_room = name in self.known or self.store.used_bytes + GRAIN <= self.limit
        fault = None
        try:
            self.store.write(ENTRIES[name])
            self.known.add(name)
        except StoreError as error:
            fault = error.fault
        assert self.has_failed or fault is (None if has_room else StoreFault.LIMIT)

    @rule(name=names)
    def remove(self, name: str) -> None:
        with suppress(StoreError):
            self.store.remove(ENTRIES[name].head.key, ENTRIES[name].head.state_offset)
            self.known.discard(name)

    @rule(name=names)
    def touch(self, name: str) -> None:
        self.times += 1
        with suppress(StoreError):
            head = ENTRIES[name].head
            self.store.touch(head.key, head.state_offset, 1e9 + self.times)

    @rule(after=st.integers(0, 12), fault=FAILURES)
    def fail_soon(self, after: int, fault: Fault) -> None:
        self.files.trouble.strike(after, fault)
        self.has_failed = True

    @rule(limit=limits)
    def restart(self, limit: int) -> None:
        """Or a start that fails, and another one."""
        self.store.close()
        self.limit = limit
        try:
            self.store = DiskStore.open_files(self.files, limit, SECRET)
        except StoreError:
            self.files.trouble.at = None
            self.store = DiskStore.open_files(self.files, limit, SECRET)
        self._learn()

    @rule(after=st.integers(0, 12), name=names)
    def crash_while_writing(self, after: int, name: str) -> None:
        self.files.trouble.strike(after, Fault.STOPS)
        with suppress(Stopped, StoreError):
            self.store.write(ENTRIES[name])
        self._start_again(self.files.files.after_stop())

    @rule(seed=st.integers(0, 1000))
    def lose_power(self, seed: int) -> None:
        self._start_again(self.files.files.after_power_cut(Random(seed)))

    @rule(name=names, seed=st.integers(0, 1000))
    def leave_rubbish(self, name: str, seed: int) -> None:
        """Files of any size, put there while the server was down."""
        self.store.close()
        rng = Random(seed)
        self.files.files.put(rng.choice((name, name + TEMPORARY)), rng.randbytes(seed * 20))
        self._start_again(self.files.files)

    def _start_again(self, files: MemoryFiles) -> None:
        self.files = BrittleFiles(files, Trouble())
        self.store = DiskStore.open_files(self.files, self.limit, SECRET)
        self._learn()

    def _learn(self) -> None:
        """What a start finds is known from then on; what it does not find is gone."""
        self.known = {entry_name(head.key, head.state_offset) for head in self.store.heads()}
        self.files.files.disk.peak_bytes = self.files.files.total_bytes

    @invariant()
    def limit_holds(self) -> None:
        """Also in between: the peak counts every single write."""
        files = self.files.files
        files.disk.measure()
        assert files.disk.peak_bytes <= self.limit
        assert files.total_bytes <= self.store.used_bytes <= self.limit

    @invariant()
    def entries_are_what_was_written(self) -> None:
        heads = self.store.heads()
        assert {entry_name(head.key, head.state_offset) for head in heads} == self.known
        there = {name for name in self.files.files.names() if name != KEY_FILE}
        assert self.has_failed or there == self.known
        for head in heads:
            with suppress(StoreError):
                original = ENTRIES[entry_name(head.key, head.state_offset)]
                found: Stored = self.store.read(head.key, head.state_offset)
                assert found.parts == original.parts


DiskTier.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestDiskTier = pytest.mark.slow(DiskTier.TestCase)
