"""A long text arrives at a whole server: nobody else notices."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness.process import ServerProcess, running_server


def words(seed: int, count: int) -> str:
    """Words that no cache of words has seen."""
    return " ".join(f"w{seed:x}x{number * 2654435761 % 2**32:x}" for number in range(count))


@contextmanager
def posted(server: ServerProcess, **body: Any) -> Iterator[HTTPResponse]:
    address = urlsplit(server.url)
    connection = HTTPConnection(address.hostname or "", address.port or 0, timeout=120)
    with closing(connection):
        connection.request("POST", "/completion", json.dumps(body))
        with connection.getresponse() as response:
            yield response


@contextmanager
def streaming(server: ServerProcess) -> Iterator[None]:
    """Somebody reads a long answer all the while."""
    has_begun, is_over = threading.Event(), threading.Event()

    def read() -> None:
        body = {"prompt": "Once", "n_predict": 32_000, "stream": True, "ignore_eos": True}
        with posted(server, **body) as response:
            for _ in response:
                has_begun.set()
                if is_over.is_set():
                    return

    reader = threading.Thread(target=read)
    reader.start()
    has_begun.wait(60)
    yield
    is_over.set()
    reader.join()


@pytest.mark.slow
@pytest.mark.models
def test_long_prompts_do_not_hold_the_loop(gemma3: Path) -> None:
    """Prompts of 30,000 tokens arrive, in a vocabulary that is encoded in Python, while an answer
    streams: it flows on, and the watch has next to nothing to report. On a machine that is busy
    with other things a task may look long without being so: a few lines are no failure."""
    flags = ("--backend", "sim", "-c", "32768", "-np", "2", "--log-level", "debug")
    with running_server(str(gemma3), *flags) as server:
        with streaming(server):
            for seed in range(4):
                with posted(server, prompt=words(seed, 2500), n_predict=1) as response:
                    assert 20_000 < json.load(response)["tokens_evaluated"] < 32_000
        steps = [line for line in server.events("sched.step") if line["num_chunks"] == 2]
        held_s = [line["held_s"] for line in server.events("loop.stall")]
    assert sum(line["num_prefill_tokens"] for line in steps) > 20_000, "beside the stream"
    assert len(held_s) <= 6, held_s
