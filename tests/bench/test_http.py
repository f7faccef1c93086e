"""The client of ``kvtrio bench``, against answers written out byte for byte."""

import pytest

from harness.scripted_http import playing
from kvtrio.bench.errors import BenchError
from kvtrio.bench.http import Reply, client_for_url

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi and more", b"hi"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end", b"to the end"),
        (CHUNKED + b"2\r\nhi\r\n3;x=y\r\n\r\nx\r\n0\r\n\r\n", b"hi\r\nx"),
        (CHUNKED + b"A\r\n0123456789\r\n0\r\nTrailer: 1\r\n\r\n", b"0123456789"),
    ],
)
async def test_every_frame_of_a_body(wire: bytes, body: bytes) -> None:
    """With a length, to the end, in chunks: the body is what the server meant, wherever the network
    cuts it."""
    for cut in range(len(wire)):
        assert await playing(wire[:cut], wire[cut:]).get("/") == Reply(200, body)


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        (b"", "does not answer in HTTP"),
        (b"SSH-2.0-server\r\n\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", "in the middle"),
        (CHUNKED + b"9\r\nhi", "in the middle"),
        (CHUNKED + b"what\r\n", "makes no sense"),
    ],
)
async def test_what_is_no_answer_is_one_line(wire: bytes, says: str) -> None:
    """A server that speaks something else, or stops, is named as that."""
    with pytest.raises(BenchError, match=says):
        await playing(wire).get("/")


async def test_pieces_of_a_stream_come_one_by_one() -> None:
    """Each chunk is handed on as it arrives, with the status."""
    seen: list[tuple[int, bytes]] = []
    client = playing(CHUNKED, b"1\r\na\r\n", b"1\r\nb\r\n0\r\n\r\n")
    await client.stream("/", {}, lambda status, piece: seen.append((status, piece)))
    assert [piece for _, piece in seen if piece] in ([b"a", b"b"], [b"ab"])
    assert {status for status, _ in seen} == {200}


@pytest.mark.parametrize("url", ["https://host:1", "http://", "http://host:port", "http://h/path"])
def test_urls_that_cannot_be_measured(url: str) -> None:
    """Only a plain address of a server will do."""
    with pytest.raises(BenchError, match="does not look like"):
        client_for_url(url)
