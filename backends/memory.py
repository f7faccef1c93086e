"""How much memory there is, and whether what a backend needs fits; without any tensor library."""

from pathlib import Path

from attrs import frozen

from kvtrio.backends.base import BackendError, BackendInfo

MIB = 1 << 20


def ram_available() -> int | None:
    """Bytes that can be had now; None where nobody says."""
    return meminfo_available(Path("/proc/meminfo"))


def meminfo_available(path: Path) -> int | None:
    """The kernel's estimate, in bytes; None where it gives none."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(fields[0][1]) * 1024 if fields else None


@frozen(kw_only=True)
class Needs:
    """Bytes that a backend wants to take."""

    weights: int
    """With what loading needs besides."""
    pools: int
    """For requests that run."""
    host: int
    """For the state of past requests, in RAM."""


@frozen(kw_only=True)
class Room:
    """What is to be taken of one memory."""

    needs: Needs
    available: int | None
    """Bytes; None where nobody says."""


@frozen(kw_only=True)
class Sizing:
    """What loading a model would take. Nothing is allocated yet."""

    info: BackendInfo
    """As it would be afterwards."""
    rooms: tuple[Room, ...]

    def require(self) -> None:
        """Raise BackendError, with the sum, where not all fits."""
        for room in self.rooms:
            require_memory(room.needs, room.available)


def shrunk_host_bytes(needs: Needs, available: int | None) -> int:
    """At most half of what the rest leaves, so that the machine is not filled unasked."""
    if available is None:
        return needs.host
    left = max(0, available - needs.weights - needs.pools)
    return min(needs.host, left // 2)


def require_memory(needs: Needs, available: int | None) -> None:
    """Raise BackendError, with the sum, when not all fits; None: nobody knows."""
    needed = needs.weights + needs.pools + needs.host
    if available is not None and needed > available:
        raise BackendError(
            f"not enough memory: weights {mib(needs.weights)} + KV pools {mib(needs.pools)} + "
            f"--cache-ram {mib(needs.host)} = {mib(needed)}, available {mib(available)}; a "
            "smaller context, fewer places, a smaller type or --cache-ram needs less"
        )


def require_room(num_bytes: int, available: int | None) -> None:
    """Raise BackendError when an adapter of that size does not fit beside what is there."""
    if available is not None and num_bytes > available:
        raise BackendError(
            f"not enough memory for an adapter of {mib(num_bytes)}, available {mib(available)}"
        )


def mib(num_bytes: int) -> str:
    """As people read it."""
    """As people read it."""
    return f"{num_bytes / MIB:,.0f} MiB"
