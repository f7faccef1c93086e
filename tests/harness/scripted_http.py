"""A server that sends fixed bytes, whatever it is asked."""

import trio
from trio.testing import memory_stream_pair

from kvtrio.bench.http import Client


def playing(*pieces: bytes) -> Client:
    """A client whose server sends ``pieces`` and closes."""

    async def connect() -> trio.abc.Stream:
        client, server = memory_stream_pair()
        for piece in pieces:
            await server.send_all(piece)
        await server.send_eof()
        return client

    return Client("fake:1", connect)
