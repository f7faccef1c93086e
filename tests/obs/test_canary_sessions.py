"""No word of a user in what is said of saved sessions, nor in the log about them.

As ``test_canary``, for the routes of slots and for sessions that requests name. Only who saves or
restores by a name is told it again, as by llama-server.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from obs.test_canary import CANARY, CHAT, HEADERS, Recorder, assert_clean, full_body
from obs.test_canary import recorder as recorder  # a fixture

from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.serve.session_files import FAULTS
from kvtrio.store.sessions import SessionStore

BODY = {"filename": CANARY, CANARY: CANARY}
ACTIONS = ("save", "restore", "erase", CANARY)


async def test_slots_and_named_sessions(
    autojump_clock: Any, recorder: Recorder, tmp_path: Path
) -> None:
    """Saved, restored and refused, by routes and by requests: the log has counts and digests."""
    ours = {"kvtrio": {"session": CANARY, "save_session": True}}
    async with recorder.serving(session_dir=tmp_path) as server:
        for slot in ("0", "99", CANARY):
            for action in ACTIONS:
                reply = await server.post(f"/slots/{slot}?action={action}", BODY, headers=HEADERS)
                recorder.look(reply)
        reply = await server.post(CHAT, full_body(stop=[], **ours), headers=HEADERS)
        assert_clean(json.dumps(reply.json["kvtrio"]))
        assert reply.json["kvtrio"]["session"]["saved"]
        for action in ACTIONS:
            await server.post(f"/slots/3?action={action}", BODY, headers=HEADERS)
        recorder.look(await server.get("/slots"), about_server=True)
    async with recorder.serving() as server:
        recorder.look(await server.post("/slots/0?action=save", BODY, headers=HEADERS))
        recorder.look(await server.post(CHAT, full_body(**ours), headers=HEADERS))
    assert recorder.codes == {
        "no_session_dir",
        "bad_slot",
        "bad_action",
        "empty_slot",
        "session_not_found",
    }
    lines = [json.loads(line) for line in recorder.out.getvalue().splitlines()]
    changes = [line for line in lines if line["event"] == "session.change"]
    assert {line["what"] for line in changes} == {"saved", "restored"}
    assert {line["fault"] for line in changes} == {None, "not_found"}
    (named,) = {line["session"] for line in lines if line["event"] == "request.done"} - {None}
    assert named in {line["name"] for line in changes}


async def test_every_fault_of_files(
    autojump_clock: Any, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with them has an answer, and the name is not told."""
    assert set(FAULTS) == set(StoreFault)
    async with recorder.serving(session_dir=tmp_path) as server:
        for fault in FAULTS:

            def fail(*_: Any, fault: Any = fault, **__: Any) -> Any:
                raise StoreError(fault)

            monkeypatch.setattr(SessionStore, "restoring", fail)
            reply = await server.post("/slots/0?action=restore", BODY, headers=HEADERS)
            recorder.look(reply)
            assert reply.error["kvtrio"]["code"] == FAULTS[fault].code
    assert recorder.codes == {spec.code for spec in FAULTS.values()}
