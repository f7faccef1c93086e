"""What is done to a server beside sending requests: scales, saved places, a restart."""

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from attrs import define, field

from kvtrio.replay.pacing import action_session
from kvtrio.replay.scenario import Action, Request, What
from kvtrio.replay.target import OK, Http, ReplayError, Target

UNKNOWN = (404, 405, 501)
"""The server cannot do it, or was started without what it needs."""
Restart = Callable[[], Awaitable[None]]
"""Stops the server, starts it again, and waits until it is ready."""


@define(eq=False)
class Operator:
    """Performs actions. What the server or the user gave no means for is left out, and counted."""

    http: Http
    target: Target
    on_left_out: Callable[[], None]
    restart: Restart | None = None
    left_out: Counter[What] = field(init=False, factory=Counter)
    _places: dict[int, int] = field(init=False, factory=dict)
    """In which a session ran last."""

    def note(self, request: Request, final: dict[str, Any]) -> None:
        """A request ended."""
        place = final.get("id_slot")
        if request.session is not None and isinstance(place, int):
            self._places[request.session] = place

    async def do(self, action: Action) -> None:
        """Raises ``ReplayError`` if the server refuses."""
        if action.what is What.SCALES:
            await self._set_scales(action)
        elif action.what is What.RESTART:
            await self._restart()
        else:
            await self._place(action)

    async def _set_scales(self, action: Action) -> None:
        scales = {self.target.adapter_ids.get(use.alias): use.scale for use in action.scales}
        if None in scales or not self.target.all_ids:
            self._leave_out(action.what)
            return
        body = [{"id": number, "scale": scale} for number, scale in scales.items()]
        await self._post("/lora-adapters", body, action.what)

    async def _restart(self) -> None:
        if self.restart is None:
            self._leave_out(What.RESTART)
        else:
            await self.restart()

    async def _place(self, action: Action) -> None:
        place = self._places.get(action.session or 0)
        if place is None:
            self._leave_out(action.what)
            return
        path = f"/slots/{place}?action={action.what.value}"
        await self._post(path, {"filename": action_session(action)}, action.what)

    async def _post(self, path: str, body: Any, what: What) -> None:
        reply = await self.http.post(path, body)
        if reply.status in UNKNOWN:
            self._leave_out(what)
        elif reply.status != OK:
            raise ReplayError(f"POST {path.partition('?')[0]}: status {reply.status}")

    def _leave_out(self, what: What) -> None:
        self.left_out[what] += 1
        self.on_left_out()
