"""The application: routes only. Parse beside the loop, submit, answer.

Rules that the traps of this HTTP stack taught (each has a test):

1. No nursery and no task here: a request's one owner is the connection, which quart-trio cancels
   when the client leaves.
2. Whatever a handler hands to the engine is closed when its request is over, however it ends.
3. Nothing is computed on the event loop that could hold it: bodies become jobs beside it.
"""

from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import Any

from attrs import field, frozen
from quart import Response, request
from quart_trio import QuartTrio

from kvtrio.obs.families import Snapshot
from kvtrio.obs.metrics import MIME_TYPE as METRICS_TYPE
from kvtrio.obs.metrics import Metrics
from kvtrio.serve import info, sse
from kvtrio.serve.adapter_views import lora_adapter, lora_adapters, metric_labels
from kvtrio.serve.adapters import Lease, scales_of
from kvtrio.serve.answer import events, whole
from kvtrio.serve.arrivals import Arrivals, whole_body
from kvtrio.serve.bounds import Bounds
from kvtrio.serve.chat_answer import ChatDialect
from kvtrio.serve.choice import Choice
from kvtrio.serve.cleanup import ClosingConnection, cleanup
from kvtrio.serve.dialect import Dialect, Origin
from kvtrio.serve.epilogue import Epilogue
from kvtrio.serve.errors import NO_SLOT, ApiError
from kvtrio.serve.generation import Generation, Listener
from kvtrio.serve.guards import install_guards
from kvtrio.serve.idle import IdleTime
from kvtrio.serve.job import Job
from kvtrio.serve.keeping import Asker
from kvtrio.serve.line import line_of
from kvtrio.serve.named_sessions import begin_session, end_session
from kvtrio.serve.native_answer import NativeDialect
from kvtrio.serve.prepare import Preparer
from kvtrio.serve.replies import install_error_handlers, json_reply, raw_json_reply
from kvtrio.serve.schema import LoadAdapterBody, LoraList, UnloadAdapterBody, parse_whole
from kvtrio.serve.services import Services
from kvtrio.serve.session_note import SessionNote
from kvtrio.serve.state_routes import StateApi
from kvtrio.serve.text_answer import TextDialect
from kvtrio.serve.texts import Texts
from kvtrio.serve.warm import Warmer

PREDICTED_TTFT = "Kvtrio-Predicted-Ttft-Ms"


@frozen
class Route:
    """One handler's address."""

    method: str
    paths: tuple[str, ...]
    handler: str
    """Name of the method of ``Api``, or of a part of it."""


ROUTES = (
    Route("POST", ("/chat/completions", "/v1/chat/completions"), "chat"),
    Route("POST", ("/v1/completions",), "text"),
    Route("POST", ("/completion", "/completions", "/v1/completion"), "native"),
    Route("POST", ("/v1/cache/warm",), "state.warm"),
    Route("POST", ("/tokenize", "/v1/tokenize"), "tokenize"),
    Route("POST", ("/detokenize", "/v1/detokenize"), "detokenize"),
    Route("POST", ("/apply-template", "/v1/apply-template"), "apply_template"),
    Route("GET", ("/models", "/v1/models"), "models"),
    Route("GET", ("/models/<path:name>", "/v1/models/<path:name>"), "model"),
    Route("GET", ("/props", "/v1/props"), "props"),
    Route("GET", ("/slots", "/v1/slots"), "slots"),
    Route("POST", ("/slots/<slot>", "/v1/slots/<slot>"), "state.slot"),
    Route("GET", ("/lora-adapters", "/v1/lora-adapters"), "lora_adapters"),
    Route("POST", ("/lora-adapters", "/v1/lora-adapters"), "set_lora_adapters"),
    Route("POST", ("/v1/load_lora_adapter",), "load_lora_adapter"),
    Route("POST", ("/v1/unload_lora_adapter",), "unload_lora_adapter"),
    Route("GET", ("/metrics", "/v1/metrics"), "metrics"),
    Route("GET", ("/health", "/v1/health"), "health"),
    Route("GET", ("/",), "root"),
)


@frozen(eq=False)
class Api:
    """The handlers. They find their request in quart's context."""

    services: Services
    arrivals: Arrivals
    preparer: Preparer
    texts: Texts
    epilogue: Epilogue
    state: StateApi
    shown_metrics: Metrics = field(factory=Metrics)

    # --- completions ---

    async def native(self) -> Response:
        return await self._complete(self.preparer.native, NativeDialect)

    async def text(self) -> Response:
        return await self._complete(self.preparer.text, TextDialect)

    async def chat(self) -> Response:
        return await self._complete(self.preparer.chat, ChatDialect)

    async def _complete(
        self,
        prepare: Callable[[bytes, Asker], Job],
        make_dialect: Callable[[Generation, Origin], Dialect],
    ) -> Response:
        settings = self.services.settings
        job = await self.arrivals.job(prepare)
        note = await begin_session(self.services.sessions, job)
        job, lease = self.arrivals.admitted(job)
        cleanup(request).enter_context(self.state.warmer.idle.served())
        generation = Generation.start(
            self.services.engine, job, settings.n_ctx, self._listener(lease, note)
        )
        cleanup(request).callback(generation.close)
        dialect = make_dialect(generation, self._origin(job))
        if not job.wants.stream:
            return raw_json_reply(await whole(generation, dialect, self.services.offload))
        heartbeat_s = job.wants.heartbeat_s or settings.heartbeat_s
        stream = events(generation, dialect, heartbeat_s, line_of(request.scope))
        headers = {**sse.HEADERS, **_forecast(generation.predicted_s)}
        return Response(stream, 200, headers, content_type=sse.MIME_TYPE)

    def _listener(self, lease: Lease, note: SessionNote | None) -> Listener:
        async def on_end(choice: Choice) -> None:
            choice.session = note
            await self.services.offload.run(self.epilogue.conclude, choice)
            await end_session(self.services.sessions, choice)

        on_start = self.arrivals.on_start(lease)
        return Listener(on_start=on_start, on_end=on_end, on_leave=self.epilogue.leave)

    def _origin(self, job: Job) -> Origin:
        settings = self.services.settings
        return Origin(
            id=settings.new_id(),
            created=int(settings.clock()),
            model=self.services.model,
            model_name=self.arrivals.model_name(job),
            n_ctx=settings.n_ctx,
        )

    # --- adapters ---

    async def lora_adapters(self) -> Response:
        services = self.services
        return json_reply(lora_adapters(services.loader, services.model.tokenizer))

    async def set_lora_adapters(self) -> Response:
        entries = await self._parsed(LoraList)
        self.services.loader.set_scales(scales_of((each.id, each.scale) for each in entries))
        return json_reply({"success": True})

    async def load_lora_adapter(self) -> Response:
        body, services = await self._parsed(LoadAdapterBody), self.services
        adapter = await services.loader.load(body.lora_name, body.lora_path)
        shown = lora_adapter(adapter, services.loader, services.model.tokenizer)
        return json_reply({"success": True, **shown})

    async def unload_lora_adapter(self) -> Response:
        body = await self._parsed(UnloadAdapterBody)
        await self.services.loader.unload(body.lora_name)
        return json_reply({"success": True})

    async def _parsed(self, kind: Any) -> Any:
        raw = await whole_body()
        return await self.services.offload.run(parse_whole, raw, kind, num_bytes=len(raw))

    # --- texts ---

    async def tokenize(self) -> Response:
        return await self._offloaded(self.texts.tokenize)

    async def detokenize(self) -> Response:
        return await self._offloaded(self.texts.detokenize)

    async def apply_template(self) -> Response:
        return await self._offloaded(self.texts.apply_template)

    async def _offloaded(self, answer: Callable[[bytes], bytes]) -> Response:
        raw = await whole_body()
        return raw_json_reply(await self.services.offload.run(answer, raw, num_bytes=len(raw)))

    # --- about the server ---

    async def health(self) -> Response:
        return json_reply({"status": "ok"})

    async def root(self) -> Response:
        return json_reply(info.root(self.services.model))

    async def models(self) -> Response:
        services = self.services
        return json_reply(info.models(services.model, services.settings, services.loader.adapters))

    async def model(self, name: str) -> Response:
        services, adapters = self.services, self.services.loader.adapters
        return json_reply(info.model_entry(name, services.model, services.settings, adapters))

    async def props(self) -> Response:
        services, statistics = self.services, self.services.engine.statistics()
        has_sessions = services.sessions is not None
        return json_reply(
            info.props(services.model, services.settings, statistics, has_sessions=has_sessions)
        )

    async def slots(self) -> Response:
        statistics = self.services.engine.statistics()
        if request.args.get("fail_on_no_slot") and all(
            view.is_processing for view in statistics.places
        ):
            raise ApiError(NO_SLOT)
        return json_reply(info.slots(statistics, self.services.settings, self.arrivals.shown))

    async def metrics(self) -> Response:
        services, adapters = self.services, self.services.loader.adapters
        snapshot = Snapshot(
            tally=services.tally,
            statistics=services.engine.statistics(),
            cost=services.engine.cost(),
            block_size=services.settings.block_size,
            model=services.model.alias,
            adapters=metric_labels(adapters),
            max_adapters=adapters.max_adapters,
            now_s=services.settings.clock(),
        )
        return Response(self.shown_metrics.render(snapshot), 200, content_type=METRICS_TYPE)


def _forecast(predicted_s: float | None) -> dict[str, str]:
    """A stream tells at its end, like every answer; too late for one that waits for its start."""
    return {} if predicted_s is None else {PREDICTED_TTFT: f"{predicted_s * 1e3:.0f}"}


def _api(services: Services) -> Api:
    model, settings = services.model, services.settings
    bounds = Bounds.of(model.tokenizer, settings.n_ctx)
    arrivals, preparer = Arrivals(services), Preparer(model, settings, services.recall, bounds)
    warmer = Warmer(services.engine, IdleTime(), settings.n_ctx)
    return Api(
        services,
        arrivals,
        preparer,
        Texts(model, settings, bounds),
        Epilogue(services.recall, model.tokenizer, services.emit),
        StateApi(arrivals, preparer, warmer, services.sessions),
    )


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
    api = _api(services)
    for route in ROUTES:
        handler: Callable[..., Awaitable[Response]] = attrgetter(route.handler)(api)
        for path in route.paths:
            app.add_url_rule(path, f"{route.method} {path}", handler, methods=[route.method])
    return app
