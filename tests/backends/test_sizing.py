"""What a model would take is said by the sums that loading it does."""

from pathlib import Path

import pytest

from harness.cpu_models import cpu_settings, require_kernels
from harness.torch_models import settings
from kvtrio.backends.base import BackendError
from kvtrio.backends.cpu_backend import CpuBackend
from kvtrio.backends.memory import Needs, Room, Sizing
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import open_gguf

HOST_BYTES = 8 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen35", "mamba2", "llama256-iq1_s"])
def test_what_is_said_before_is_so_afterwards(shared: Path, name: str) -> None:
    """Blocks, parts in windows, slots and bytes, on both backends; and it allocates nothing, so
    a hundred thousand places can be asked for."""
    require_kernels()
    with open_gguf(shared / "tiny" / "models" / f"{name}.gguf") as file:
        spec = read_spec(file)
        for kind, made in ((CpuBackend, cpu_settings), (TorchBackend, settings)):
            chosen = made(host_bytes=HOST_BYTES, num_state_slots=6)
            said = kind.sizing(file, spec, chosen)
            backend = kind.load(file, spec, chosen)
            assert said.info == backend.info
            (room,) = said.rooms
            assert room.needs.host == HOST_BYTES
            assert room.needs.pools <= said.info.pool_bytes <= room.needs.pools + HOST_BYTES
            backend.close()
            huge = kind.sizing(
                file, spec, made(num_blocks=10**8, max_sampled=10**5, num_state_slots=10**9)
            )
            with pytest.raises(BackendError, match="not enough memory"):
                huge.require()


def test_every_memory_must_have_room(shared: Path) -> None:
    """Of two, the second one counts as much as the first; what nobody knows counts for nothing."""
    with open_gguf(shared / "tiny" / "models" / "llama3.gguf") as file:
        info = TorchBackend.sizing(file, read_spec(file), settings()).info
    needs = Needs(weights=10, pools=10, host=10)
    rooms = [Room(needs=needs, available=size) for size in (None, 30, 29)]
    Sizing(info=info, rooms=(rooms[0], rooms[1])).require()
    with pytest.raises(BackendError, match="not enough memory"):
        Sizing(info=info, rooms=(rooms[1], rooms[2])).require()
