"""``kvtrio inspect``: what a model, an adapter or a saved session is, on one screen."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

Count = Number(gte=1)


def inspect(
    path: Annotated[
        Path,
        Parameter(
            help="A GGUF model or the first file of a split one, a Hugging Face folder, a GGUF "
            "adapter or a PEFT folder, or a session that `kvtrio session export` wrote."
        ),
    ],
    /,
    *,
    model: Annotated[
        Path | None,
        Parameter(
            name=["--model", "-m"],
            help="The adapter's or the session's model: whether it fits there.",
        ),
    ] = None,
    parallel: Annotated[
        int, Parameter(name=["--parallel", "-np"], validator=Count, help="Places to count for.")
    ] = 4,
    ctx_size: Annotated[
        int | None,
        Parameter(
            name=["--ctx-size", "-c"],
            validator=Count,
            help="Longest request in tokens to count for. Default: what `kvtrio serve` takes.",
        ),
    ] = None,
    json: Annotated[
        bool, Parameter(name="--json", negative="", help="Print JSON instead of a table.")
    ] = False,
) -> int:
    """Show what a file is: architecture, sizes, types, memory, state, template; or why it is
    refused.

    Weights are read for a session's --model only, and no memory is set aside. For example:
    `kvtrio inspect model.gguf -np 8 -c 32768`.

    Exit codes: 0 it can be used, 2 it cannot (one line says why), 1 a fault.
    """
    from kvtrio.cli.inspection import Wishes, run_inspect

    return run_inspect(Wishes(path, model, parallel, ctx_size), as_json=json)
