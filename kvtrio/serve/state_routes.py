"""Handlers about state: what is kept of conversations, and for how long."""

from functools import partial

from attrs import frozen
from quart import Response

from kvtrio.serve.arrivals import Arrivals
from kvtrio.serve.prepare import Preparer
from kvtrio.serve.replies import json_reply
from kvtrio.serve.warm import Warmer
from kvtrio.serve.warm_body import warm_job


@frozen(eq=False)
class StateApi:
    """They find their request in quart's context."""

    arrivals: Arrivals
    preparer: Preparer
    warmer: Warmer

    async def warm(self) -> Response:
        """POST /v1/cache/warm"""
        job, lease = await self.arrivals.admitted(partial(warm_job, self.preparer))
        model_name = self.arrivals.model_name(job)
        warmed = await self.warmer.warm(job, self.arrivals.on_start(lease))
        return json_reply(warmed.body(model_name))
