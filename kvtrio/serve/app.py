"""The application: routes only. Parse beside the loop, submit, answer.

Rules that the traps of this HTTP stack taught (each has a test):

1. No nursery and no task here: a request's one owner is the connection, which quart-trio cancels
   when the client leaves.
2. Whatever a handler hands to the engine is closed when its request is over, however it ends.
3. Nothing is computed on the event loop that could hold it: bodies become jobs beside it.
"""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, cast

import trio
from attrs import field, frozen
from quart import Request, Response, request
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection

from kvtrio.serve import info, sse
from kvtrio.serve.answer import events, whole
from kvtrio.serve.chat_answer import ChatDialect
from kvtrio.serve.dialect import Dialect, Origin
from kvtrio.serve.errors import NO_SLOT, ApiError
from kvtrio.serve.generation import Generation
from kvtrio.serve.guards import install_guards
from kvtrio.serve.info import PlaceSettings
from kvtrio.serve.job import Job
from kvtrio.serve.native_answer import NativeDialect
from kvtrio.serve.prepare import Preparer
from kvtrio.serve.replies import install_error_handlers, json_reply, raw_json_reply
from kvtrio.serve.services import Services
from kvtrio.serve.shown_settings import short_settings
from kvtrio.serve.text_answer import TextDialect
from kvtrio.serve.texts import Texts

CLEANUP = "kvtrio.cleanup"
"""Key in the ASGI scope: an ExitStack that is closed when the request is over."""


@frozen
class Route:
    """One handler's address."""

    method: str
    paths: tuple[str, ...]
    handler: str
    """Name of the method of ``Api``."""


ROUTES = (
    Route("POST", ("/chat/completions", "/v1/chat/completions"), "chat"),
    Route("POST", ("/v1/completions",), "text"),
    Route("POST", ("/completion", "/completions", "/v1/completion"), "native"),
    Route("POST", ("/tokenize", "/v1/tokenize"), "tokenize"),
    Route("POST", ("/detokenize", "/v1/detokenize"), "detokenize"),
    Route("POST", ("/apply-template", "/v1/apply-template"), "apply_template"),
    Route("GET", ("/models", "/v1/models"), "models"),
    Route("GET", ("/props", "/v1/props"), "props"),
    Route("GET", ("/slots", "/v1/slots"), "slots"),
    Route("GET", ("/health", "/v1/health"), "health"),
    Route("GET", ("/",), "root"),
)


def cleanup(request: Request) -> ExitStack:
    stack = cast(dict[str, Any], request.scope)[CLEANUP]
    assert isinstance(stack, ExitStack)
    return stack


class ClosingConnection(TrioASGIHTTPConnection):
    """A request that cleans up after itself.

    The streaming generator closes its generation too, and sooner; but one that was never started,
    since the client left before the first byte, runs no ``finally``.
    """

    async def handle_request(  # type: ignore[override]  # quart-trio's own has a nursery too
        self, nursery: trio.Nursery, request: Request, send: Any
    ) -> None:
        with ExitStack() as stack:
            cast(dict[str, Any], request.scope)[CLEANUP] = stack
            await super().handle_request(nursery, request, send)


@frozen(eq=False)
class Api:
    """The handlers. They find their request in quart's context."""

    services: Services
    preparer: Preparer
    texts: Texts
    shown: PlaceSettings = field(factory=dict)

    # --- completions ---

    async def native(self) -> Response:
        return await self._complete(self.preparer.native, NativeDialect)

    async def text(self) -> Response:
        return await self._complete(self.preparer.text, TextDialect)

    async def chat(self) -> Response:
        return await self._complete(self.preparer.chat, ChatDialect)

    async def _complete(
        self,
        prepare: Callable[[bytes, int], Job],
        make_dialect: Callable[[Generation, Origin], Dialect],
    ) -> Response:
        settings = self.services.settings
        job = await self.services.offload.run(prepare, await _body(), settings.new_seed())
        generation = Generation.start(self.services.engine, job, settings.n_ctx, self._note)
        cleanup(request).callback(generation.close)
        dialect = make_dialect(generation, self._origin())
        if not job.wants.stream:
            return raw_json_reply(await whole(generation, dialect, self.services.offload))
        heartbeat_s = job.wants.heartbeat_s or settings.heartbeat_s
        stream = events(generation, dialect, heartbeat_s)
        return Response(stream, 200, sse.HEADERS, content_type=sse.MIME_TYPE)

    def _origin(self) -> Origin:
        settings = self.services.settings
        return Origin(
            id=settings.new_id(),
            created=int(settings.clock()),
            model=self.services.model,
            n_ctx=settings.n_ctx,
        )

    def _note(self, place: int, job: Job) -> None:
        self.shown[place] = short_settings(job)

    # --- texts ---

    async def tokenize(self) -> Response:
        return await self._offloaded(self.texts.tokenize)

    async def detokenize(self) -> Response:
        return await self._offloaded(self.texts.detokenize)

    async def apply_template(self) -> Response:
        return await self._offloaded(self.texts.apply_template)

    async def _offloaded(self, answer: Callable[[bytes], bytes]) -> Response:
        return raw_json_reply(await self.services.offload.run(answer, await _body()))

    # --- about the server ---

    async def health(self) -> Response:
        return json_reply({"status": "ok"})

    async def root(self) -> Response:
        return json_reply(info.root(self.services.model))

    async def models(self) -> Response:
        return json_reply(info.models(self.services.model, self.services.settings))

    async def props(self) -> Response:
        return json_reply(info.props(self.services.model, self.services.settings))

    async def slots(self) -> Response:
        statistics = self.services.engine.statistics()
        if request.args.get("fail_on_no_slot") and all(
            view.is_processing for view in statistics.places
        ):
            raise ApiError(NO_SLOT)
        return json_reply(info.slots(statistics, self.services.settings, self.shown))


async def _body() -> bytes:
    """Return the body whatever its content type says; quart's limits raise."""
    return await request.get_data(cache=False, as_text=False, parse_form_data=False)


def create_app(services: Services) -> QuartTrio:
    """Return the ASGI application; it starts nothing and owns nothing."""
    app = QuartTrio(__name__, static_folder=None, template_folder=None)
    settings = services.settings
    app.asgi_http_class = ClosingConnection
    # quart would cut every answer after 60 s, in the middle of a stream and without a word.
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["BODY_TIMEOUT"] = settings.body_timeout_s
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    # A redirect to the tidier path would be a page of HTML, and POST bodies do not survive it.
    app.url_map.merge_slashes = app.url_map.strict_slashes = False
    install_guards(app, settings.api_keys)
    install_error_handlers(app)
    api = Api(services, Preparer(services.model, settings), Texts(services.model, settings))
    for route in ROUTES:
        handler: Callable[[], Awaitable[Response]] = getattr(api, route.handler)
        for path in route.paths:
            app.add_url_rule(path, path, handler, methods=[route.method])
    return app
