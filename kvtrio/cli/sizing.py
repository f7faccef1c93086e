"""What a start would take of memory, by the sums of the start itself."""

from kvtrio.backends.base import BackendSettings
from kvtrio.backends.memory import Sizing
from kvtrio.cli.backend import MIB, Chosen
from kvtrio.cli.rows import Rows
from kvtrio.model.model_file import ModelFile
from kvtrio.model.spec import ModelSpec


def sizing_of(
    chosen: Chosen, file: ModelFile, spec: ModelSpec, settings: BackendSettings
) -> Sizing | None:
    """None: this backend does not say before it loads. Raises BackendError as loading would, but
    not for too little memory."""
    own = getattr(chosen.backend, "sizing", None)
    sizing: Sizing | None = own(file, spec, settings) if own else None
    return sizing


def memory_rows(sizing: Sizing) -> Rows:
    """MiB, by what they are for; per memory where device and RAM are two."""
    rows: Rows = {}
    places = ("",) if len(sizing.rooms) == 1 else (" on the device", " in RAM")
    for place, room in zip(places, sizing.rooms, strict=True):
        needs = room.needs
        kept = sizing.info.weight_bytes if needs.weights else 0
        rows[f"memory{place}, MiB"] = {
            "weights": _mib(kept),
            "steps and loading": _mib(needs.weights - kept),
            "state of those that run": _mib(needs.pools),
            "state of past requests": _mib(needs.host),
            "sum": _mib(needs.weights + needs.pools + needs.host),
        }
        if room.available is not None:
            rows[f"available{place}, MiB"] = _mib(room.available)
    return rows


def _mib(num_bytes: int) -> float:
    return round(num_bytes / MIB, 1)
