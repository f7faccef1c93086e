"""``kvtrio serve --dry-run``: a start up to where memory is set aside, and what it would take."""

from contextlib import ExitStack

from kvtrio.backends.memory import require_room
from kvtrio.cli import exits
from kvtrio.cli.backend import MIB, choose_backend
from kvtrio.cli.prepare import Opened, check_given, open_checked, read_keys, split_purposes
from kvtrio.cli.record import check_record
from kvtrio.cli.rows import Rows, print_rows
from kvtrio.cli.run import USER_ERRORS
from kvtrio.cli.signals import Stop, StopSignals
from kvtrio.cli.sizing import memory_rows, sizing_of
from kvtrio.config import ServeConfig

UNKNOWN = "not known before it loads"


def run_dry(config: ServeConfig, stop: StopSignals, *, as_json: bool) -> int:
    """Return the exit code; 2 where something does not fit, and one line says what."""
    stop.way = Stop.UNWIND  # a model may be downloaded
    try:
        with ExitStack() as stack:
            check_given(config)
            split_purposes(config.state.purposes)
            read_keys(config.http.api_key, config.http.api_key_file)
            check_record(config.record)
            opened = open_checked(config, choose_backend(config.model), stack)
            rows = dry_rows(opened, config.scheduling.parallel)
    except USER_ERRORS as error:
        exits.complain(error)
        return exits.USAGE
    if opened.backend.warning is not None:
        exits.complain(opened.backend.warning)
    print_rows(rows, as_json=as_json)
    return exits.OK


def dry_rows(opened: Opened, num_places: int) -> Rows:
    """Raises BackendError where it does not fit."""
    rows: Rows = {
        "model": opened.served.alias,
        "architecture": opened.spec.architecture,
        "backend": opened.backend.name,
        "places": num_places,
        "tokens per place": opened.settings.max_context,
        "adapters": len(opened.adapters),
    }
    sizing = sizing_of(opened.backend, opened.file, opened.spec, opened.settings)
    if sizing is None:
        return rows | {"memory": UNKNOWN, "fits": UNKNOWN}
    sizing.require()
    _require_adapters(opened, sizing.rooms[0].available, sizing.rooms[0].needs.weights)
    adapter_bytes = sum(each.data.num_bytes for each in opened.adapters)
    # Where kinds of state share RAM, either number is what one could have alone.
    at_most = ", at most" if sizing.info.ram else ""
    return rows | {
        **memory_rows(sizing),
        "adapters, MiB": round(adapter_bytes / MIB, 1),
        f"past tokens in RAM{at_most}": sizing.info.num_host_blocks * sizing.info.block_size,
        f"checkpoints in RAM{at_most}": sizing.info.num_host_state_slots,
        "fits": True,
    }


def _require_adapters(opened: Opened, available: int | None, taken: int) -> None:
    """As the start does, where weights lie in memory already and pools are not touched yet."""
    left = None if available is None else available - taken
    for each in opened.adapters:
        require_room(each.data.num_bytes, left)
        left = None if left is None else left - each.data.num_bytes
