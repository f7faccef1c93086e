"""``kvtrio serve``: the flags. What they start is in ``kvtrio.cli.run``."""

from typing import Annotated

from cyclopts import Parameter

from kvtrio.cli import exits
from kvtrio.cli.signals import Stop, stop_signals
from kvtrio.config import (
    AdapterSettings,
    HttpOptions,
    LogSettings,
    ModelSettings,
    RecordSettings,
    SchedulingSettings,
    ServeConfig,
    StateSettings,
)


def serve(
    model: Annotated[
        str | None,
        Parameter(
            help="A GGUF file (of a split one, the first part), a Hugging Face folder, or smollm2 "
            "or gemma3-270m, which are downloaded on first use. Default: smollm2."
        ),
    ] = None,
    /,
    *,
    model_settings: ModelSettings | None = None,
    http: HttpOptions | None = None,
    scheduling: SchedulingSettings | None = None,
    state: StateSettings | None = None,
    adapters: AdapterSettings | None = None,
    logs: LogSettings | None = None,
    record: RecordSettings | None = None,
    dry_run: Annotated[
        bool,
        Parameter(
            name="--dry-run",
            negative="",
            help="Read the model and the adapters, say whether all would fit into memory with "
            "these flags, and exit: 0 it fits, 2 it does not. No port is taken and nothing "
            "written, and no memory set aside.",
        ),
    ] = False,
    json: Annotated[
        bool, Parameter(name="--json", negative="", help="With --dry-run: print JSON.")
    ] = False,
) -> int:
    """Serve a model until SIGTERM or Ctrl-C; then running answers finish and the process exits.
    While it still loads, it exits at once.

    Exit codes: 0 stopped as asked, 2 something given does not fit (one line says what), 1 a fault.
    """
    config = ServeConfig(
        name=model,
        model=model_settings or ModelSettings(),
        http=http or HttpOptions(),
        scheduling=scheduling or SchedulingSettings(),
        state=state or StateSettings(),
        adapters=adapters or AdapterSettings(),
        logs=logs or LogSettings(),
        record=record or RecordSettings(),
    )
    if json and not dry_run:
        exits.complain("--json is for --dry-run: a server prints nothing but its log.")
        return exits.USAGE
    # torch, trio and quart take seconds to import; --help and --version do without them.
    with stop_signals(Stop.LEAVE) as stop:
        if dry_run:
            from kvtrio.cli.dry_run import run_dry

            return run_dry(config, stop, as_json=json)
        from kvtrio.cli.run import run_server

        return run_server(config, stop)
