"""A server to compare: a command to start it with, or the URL of one that runs."""

from contextlib import suppress

import trio
from attrs import frozen

from kvtrio.bench.completion import Ask, complete, tokenise
from kvtrio.bench.errors import BenchError, NotMeasured
from kvtrio.bench.http import OK, Client, client_for, client_for_url
from kvtrio.bench.processes import PORT, ServerProcess

POLL_S = 0.01


@frozen
class Target:
    """What the user gave: ``url``, or a ``command`` with ``{port}``."""

    label: str
    given: str

    @property
    def url(self) -> str | None:
        return self.given if "://" in self.given.partition(" ")[0] else None

    def check(self) -> None:
        """Raises ``BenchError``."""
        if self.url is not None:
            client_for_url(self.url)
        elif PORT not in self.given:
            raise BenchError(f"{self.label} is neither a URL nor a command with {PORT}")


@frozen(kw_only=True, eq=False)
class Server:
    """One that answers."""

    target: Target
    client: Client
    process: ServerProcess | None
    """None: somebody else's."""
    start_s: float | None = None
    """From its start to the end of its first answer."""

    def resident_mib(self) -> float | None:
        """None where that is not known."""
        size = self.process.resident_bytes() if self.process else None
        return None if size is None else size / (1 << 20)

    async def version(self) -> str:
        """What it says it is; may be empty."""
        with suppress(BenchError, OSError):
            props = (await self.client.get("/props")).json()
            return str(props.get("build_info", "")) if isinstance(props, dict) else ""
        return ""

    async def stop(self) -> None:
        """If it was started here."""
        if self.process:
            await self.process.stop()


async def open_server(target: Target, patience_s: float) -> Server:
    """Start it, or find it, and have one answer. Raises ``BenchError``; nothing is left behind."""
    start_s = trio.current_time()
    if target.url is not None:
        server = Server(target=target, client=client_for_url(target.url), process=None)
        await _first_answer(server, patience_s)
        return server
    process = ServerProcess.start(target.given)
    client = client_for("127.0.0.1", process.port)
    server = Server(target=target, client=client, process=process)
    try:
        await _first_answer(server, patience_s)
    except BaseException:
        await server.stop()
        raise
    taken_s = trio.current_time() - start_s
    return Server(target=target, client=client, process=process, start_s=taken_s)


async def _first_answer(server: Server, patience_s: float) -> None:
    with trio.move_on_after(patience_s):
        while not await _is_healthy(server):  # noqa: ASYNC110 - another process's state
            await trio.sleep(POLL_S)
        await _answer(server)
        return
    raise BenchError(f"{server.target.label} gave no answer within {patience_s:g} s")


async def _is_healthy(server: Server) -> bool:
    if server.process:
        server.process.check()
    try:
        return (await server.client.get("/health")).status == OK
    except (OSError, BenchError):
        if server.process is None:
            raise BenchError(f"{server.target.label}: no server at {server.target.url}") from None
        return False


async def _answer(server: Server) -> None:
    try:
        ids = await tokenise(server.client, "One word")
        await complete(server.client, Ask(token_ids=ids, num_tokens=1))
    except (OSError, NotMeasured) as error:
        raise BenchError(f"{server.target.label} is healthy but gives no answer: {error}") from None
