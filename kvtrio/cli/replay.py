"""``kvtrio replay``: the flags."""

from pathlib import Path
from typing import Annotated, Literal

from attrs import field, frozen
from cyclopts import Parameter
from cyclopts.validators import Number


@Parameter(name="*")
@frozen(kw_only=True)
class ReplayOptions:
    """How a scenario is played, and to what."""

    out: Annotated[
        Path | None,
        Parameter(name=["--out", "-o"], help="Write results here, for `kvtrio analyze`."),
    ] = None
    pacing: Annotated[
        Literal["open", "closed", "serial"],
        Parameter(
            name="--pacing",
            help="open: at the recorded times, however slow the answers; closed: a turn comes when "
            "the one before has ended and its user has thought; serial: one after the other.",
        ),
    ] = "open"
    speed: Annotated[
        float, Parameter(name="--speed", validator=Number(gt=0), help="2 is twice as fast.")
    ] = 1.0
    sample: Annotated[
        float,
        Parameter(
            name="--sample",
            validator=Number(gt=0, lte=1),
            help="Play only this share of the sessions, each of them whole.",
        ),
    ] = 1.0
    seed: Annotated[
        int, Parameter(name="--seed", validator=Number(gte=0), help="For made-up tokens.")
    ] = 0
    api: Annotated[
        Literal["tokens", "words", "chat"] | None,
        Parameter(
            name="--api",
            help="tokens: ids to /completion, exact; words: text to /v1/completions; chat: text as "
            "one message. Default: tokens where the server takes them, else words.",
        ),
    ] = None
    model: Annotated[
        str | None, Parameter(name="--model", help="Default: the first that the server lists.")
    ] = None
    adapter: Annotated[
        tuple[str, ...],
        Parameter(
            name="--adapter",
            negative="",
            help="ALIAS=NAME: the server's adapter for one of the scenario's. Default: the one of "
            "the same content, else in the server's order.",
        ),
    ] = ()
    adapters: Annotated[
        bool, Parameter(name="--adapters", negative="--no-adapters", help="Play adapters at all.")
    ] = True
    body: Annotated[
        str,
        Parameter(name="--body", help='More members for every request, as JSON: {"top_k": 1}.'),
    ] = "{}"
    restart: Annotated[
        str | None,
        Parameter(
            name="--restart",
            help="A command that restarts the server and ends when it is ready, for scenarios that "
            "contain restarts.",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        Parameter(name="--api-key", env_var="KVTRIO_API_KEY", show_default=False, help="To send."),
    ] = field(default=None, repr=False)


def replay(
    scenario: Annotated[Path, Parameter(help="A scenario file; see scenarios/README.md.")],
    url: Annotated[str, Parameter(help="The server, such as http://127.0.0.1:8080.")],
    /,
    *,
    options: ReplayOptions | None = None,
) -> int:
    """Play recorded or made-up traffic to a server: kvtrio, llama-server, or any OpenAI-compatible
    one.

    Tokens are made up, alike where the scenario's are alike. What a server answered is part of the
    prompts that come after. Ctrl-C ends it; the results so far are kept.

    Exit codes: 0 done and all that the scenario expects came true, 3 something did not, 2 it cannot
    be played (one line says why), 130 interrupted, 1 a fault.
    """
    # trio takes a while to import; --help does without it.
    from kvtrio.cli.replaying import run_replay

    return run_replay(scenario, url, options or ReplayOptions())
