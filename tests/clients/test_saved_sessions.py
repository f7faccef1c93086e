"""A real server that is stopped and started again: conversations go on where they were saved."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from harness.process import ServerProcess, running_server

pytestmark = pytest.mark.slow


def post(server: ServerProcess, target: str, body: Any) -> dict[str, Any]:
    request = urllib.request.Request(server.url + target, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        parsed: dict[str, Any] = json.loads(answer.read())
    return parsed


def test_a_conversation_survives_a_restart(shared: Path, tmp_path: Path) -> None:
    """By the routes of slots, and by its name in requests; the answers are those of no restart."""
    flags = (str(shared / "tiny" / "models" / "gemma3.gguf"), "-np", "1", "-c", "1024")
    ids = [7 + (31 * number) % 2000 for number in range(300)]
    ask = {"n_predict": 8, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    ours = {"session": "tale", "save_session": True}
    with running_server(*flags, "--slot-save-path", str(tmp_path)) as server:
        first = post(server, "/completion", {"prompt": ids, "kvtrio": ours, **ask})
        assert first["kvtrio"]["session"]["saved"] == len(ids) + 7
        saved = post(server, "/slots/0?action=save", {"filename": "same"})
        assert (saved["n_saved"], saved["kvtrio"]["new_bytes"]) == (len(ids) + 7, 0)
        longer = [*ids, *first["tokens"], 11, 12]
        expected = post(server, "/completion", {"prompt": longer, **ask})["tokens"]
        server.terminate()
        assert server.wait() == 0
    for way in ("route", "name"):
        with running_server(*flags, "--slot-save-path", str(tmp_path)) as server:
            if way == "route":
                restored = post(server, "/slots/0?action=restore", {"filename": "same"})
                assert restored["n_restored"] == saved["n_saved"]
            named = {"kvtrio": {"session": "tale"}} if way == "name" else {}
            answer = post(server, "/completion", {"prompt": longer, **named, **ask})
            assert answer["tokens"] == expected
            assert answer["timings"]["cache_n"] == saved["n_saved"]
            events = server.wait_for_events("session.change", 1)
            assert (events[0]["what"], events[0]["fault"]) == ("restored", None)
