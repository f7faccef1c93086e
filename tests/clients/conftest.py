"""One real server with the real SmolLM2 for all tests of this folder that only talk to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.process import ServerProcess, running_server


@pytest.fixture(scope="session")
def server(smollm2: Path) -> Iterator[ServerProcess]:
    """In f32, where an answer does not depend on who shares the batch."""
    flags = ("--alias", "smollm2", "--dtype", "f32", "--log-level", "debug")
    with running_server(str(smollm2), *flags) as server:
        yield server
