"""Handlers about state: what is kept of conversations, and for how long."""

from functools import partial
from typing import Any

import trio
from attrs import frozen
from quart import Response, request

from kvtrio.core.stored import StoreError
from kvtrio.engine import EngineStopped
from kvtrio.serve.arrivals import Arrivals, whole_body
from kvtrio.serve.errors import (
    BAD_ACTION,
    BAD_SLOT,
    EMPTY_SLOT,
    MISSING,
    NO_SESSION_DIR,
    STOPPED,
    ApiError,
)
from kvtrio.serve.job import Owner
from kvtrio.serve.keeping import owner_of
from kvtrio.serve.prepare import Preparer
from kvtrio.serve.replies import json_reply
from kvtrio.serve.schema import SlotBody, parse_whole
from kvtrio.serve.session_files import session_error
from kvtrio.serve.sessions import NothingThere, Sessions
from kvtrio.serve.warm import Warmer
from kvtrio.serve.warm_body import warm_job

MAX_SLOT_DIGITS = 9


@frozen(eq=False)
class StateApi:
    """They find their request in quart's context."""

    arrivals: Arrivals
    preparer: Preparer
    warmer: Warmer
    sessions: Sessions | None

    async def warm(self) -> Response:
        """POST /v1/cache/warm"""
        job = await self.arrivals.job(partial(warm_job, self.preparer))
        job, lease = self.arrivals.admitted(job)
        model_name = self.arrivals.model_name(job)
        warmed = await self.warmer.warm(job, self.arrivals.on_start(lease))
        return json_reply(warmed.body(model_name))

    async def slot(self, slot: str) -> Response:
        """POST /slots/ID?action=save, restore or erase"""
        place, action = self._place(slot), request.args.get("action")
        answer = {"save": self._save, "restore": self._restore, "erase": self._erase}.get(
            action or ""
        )
        if answer is None:
            raise ApiError(BAD_ACTION)
        raw = await whole_body()
        body = parse_whole(raw, SlotBody) if raw.strip() else SlotBody()
        owner = owner_of(self.arrivals.asker(), body.cache_salt, self.arrivals.services.settings)
        try:
            return json_reply({"id_slot": place, **await answer(place, body.filename, owner)})
        except StoreError as error:
            raise session_error(error, "filename") from None
        except NothingThere:
            raise ApiError(EMPTY_SLOT) from None
        except EngineStopped:
            raise ApiError(STOPPED) from None

    async def _save(self, place: int, name: str | None, owner: Owner) -> dict[str, Any]:
        sessions, name = self._sessions_and(name)
        begun_s = trio.current_time()
        info = await sessions.save_place(name, place, owner)
        return {
            "filename": name,
            "n_saved": info.num_tokens,
            "n_written": info.num_bytes,
            "timings": {"save_ms": _ms_since(begun_s)},
            "kvtrio": {"new_bytes": info.num_new_bytes, "checkpoints": info.num_states},
        }

    async def _restore(self, place: int, name: str | None, owner: Owner) -> dict[str, Any]:
        sessions, name = self._sessions_and(name)
        begun_s = trio.current_time()
        num_tokens, info = await sessions.restore_place(name, place, owner)
        return {
            "filename": name,
            "n_restored": num_tokens,
            "n_read": info.num_bytes,
            "timings": {"restore_ms": _ms_since(begun_s)},
            "kvtrio": {"checkpoints": info.num_states},
        }

    async def _erase(self, place: int, _: str | None, owner: Owner) -> dict[str, Any]:
        engine = self.arrivals.services.engine
        return {"n_erased": await engine.erase_place(place, owner.namespace)}

    def _sessions_and(self, name: str | None) -> tuple[Sessions, str]:
        if self.sessions is None:
            raise ApiError(NO_SESSION_DIR)
        if name is None:
            raise ApiError(MISSING, "filename")
        return self.sessions, name

    def _place(self, slot: str) -> int:
        num_places = self.arrivals.services.settings.num_places
        # Many digits would be an error of their own.
        is_number = slot.isascii() and slot.isdigit() and len(slot) <= MAX_SLOT_DIGITS
        if not is_number or int(slot) >= num_places:
            raise ApiError(BAD_SLOT, high=num_places - 1)
        return int(slot)


def _ms_since(begun_s: float) -> float:
    return (trio.current_time() - begun_s) * 1e3
