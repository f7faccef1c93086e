"""``kvtrio bench``: compare two servers on this machine."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number


def bench(
    a: Annotated[
        str,
        Parameter(
            help="A server: the command that starts it, as one word, with {port} where the port "
            "goes; or the URL of one that runs. It has to speak llama-server's API."
        ),
    ],
    b: Annotated[str, Parameter(help="The other server, alike.")],
    /,
    *,
    rounds: Annotated[
        int,
        Parameter(
            name="--rounds",
            validator=Number(gte=1),
            help="How often everything is measured, A and B in turn; the table has the medians.",
        ),
    ] = 3,
    quick: Annotated[
        bool,
        Parameter(
            name="--quick",
            negative="",
            help="Short prompts and answers: a try in a minute or so, not a comparison.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None,
        Parameter(name="--json", help="Also write every single value to this file, as JSON."),
    ] = None,
    patience_s: Annotated[
        float,
        Parameter(
            name="--start-timeout-s",
            validator=Number(gt=0),
            help="How long a server may take from its start to its first answer.",
        ),
    ] = 300.0,
) -> int:
    """Compare two servers by playing the same requests against them in turn.

    For example: `kvtrio bench "kvtrio serve -np 16 -t 2 --port {port}" "llama-server -np 16 -t 2
    -c 131072 --port {port} -m FILE"`.

    Measured on the client's own clock: prompts of several lengths, one answer alone and after a
    long prompt, several streams together, a conversation that comes back, and of servers that
    were started here also the time until they answer and their memory. Both should have the same
    model, as many threads and places (16), and room for 6,200 tokens in each. Servers that were
    started are stopped again.

    Exit codes: 0 done, 2 a server cannot be measured (one line says why), 130 interrupted, 1 a
    fault.
    """
    # trio takes a while to import; --help does without it.
    from kvtrio.cli.compare import Wishes, run_bench

    return run_bench(Wishes(a, b, rounds, quick, patience_s), json_file)
