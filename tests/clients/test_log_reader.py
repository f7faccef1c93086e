"""``kvtrio serve 2>&1 | head``: whoever read the log has gone."""

import json
import subprocess
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest

from harness.process import command
from kvtrio.cli import exits


@pytest.mark.slow
def test_a_log_without_reader(shared: Path) -> None:
    """The server goes on, and its exit code is that of a clean stop."""
    model = str(shared / "tiny" / "models" / "qwen3.gguf")
    process = subprocess.Popen(
        command("serve", model, "--port", "0", "--backend", "sim", "--log-level", "debug"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    with process, closing(process.stdout) as log:
        try:
            start = next(line for line in log if b'"server.start"' in line)
            port = json.loads(start)["port"]
            log.close()
            body = b'{"prompt": "Hi", "max_tokens": 50}'
            with urlopen(f"http://127.0.0.1:{port}/v1/completions", body, timeout=60) as answer:
                assert answer.status == 200
            process.terminate()
            assert process.wait(60) == exits.OK
        finally:
            process.kill()
