"""The whole server in virtual time: real routes and templates, tokens of bytes, the sim engine.

>>> async with serving(then=ord("a")) as server:
...     answer = await server.post("/completion", {"prompt": "hi", "n_predict": 4})
...     assert answer.json["content"] == "aaaa"
"""

import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import trio
from attrs import evolve, frozen
from quart_trio import QuartTrio

from harness.virtual import SimSettings, SimStack, script, sim_stack
from harness.virtual_http import Answer, Call, VirtualServer
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.session import ServerIdentity
from kvtrio.engine.offload import InlineOffload
from kvtrio.model.adapters import AdapterData, AdapterKind
from kvtrio.model.answers import AnswerStore
from kvtrio.model.recall import Recall
from kvtrio.model.spec import ModelSpec
from kvtrio.model.template import load_template
from kvtrio.model.tokenizer import MAX_TEXT_CHARS, Fragment, TextTooLong
from kvtrio.obs.identity import Sealer
from kvtrio.obs.tally import Tally
from kvtrio.serve.adapter_loading import AdapterLoader, LoadingSettings
from kvtrio.serve.adapters import Adapter, AdapterInfo, Adapters
from kvtrio.serve.app import create_app
from kvtrio.serve.served import ServedModel
from kvtrio.serve.services import ServeSettings, Services
from kvtrio.serve.sessions import Sessions
from kvtrio.store.sessions import SessionStore

BOS, EOS = 256, 257
WORDS = ("hello", " world", "al", "pha be", "ta ga", "mma!", "\n")
"""Tokens 258 and up; everything else is one token per byte."""
VOCAB_SIZE = 258 + len(WORDS)
NOW = 1_790_000_000.0
SEALER = Sealer(b"tenants of the tests", b"log key of the tests")
HEARTBEAT_S = 5.0
IDENTITY = ServerIdentity(b"model of the tests".ljust(32), b"format of the tests".ljust(32), 0)
"""Of saved sessions; with the block size of the server."""


class ByteTokenizer:
    """Each byte is a token; two control tokens; a few words that are generated but never read."""

    vocab_size = VOCAB_SIZE
    eog_ids = frozenset({EOS})
    bos_text, eos_text = "<s>", "</s>"
    add_bos, add_eos = True, False

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if len(text) > MAX_TEXT_CHARS:
            raise TextTooLong
        ids = [BOS] if add_special and not (parse_special and text.startswith("<s>")) else []
        pieces = text.replace("</s>", "\0e").replace("<s>", "\0b") if parse_special else text
        marks = {ord("e"): EOS, ord("b"): BOS}
        data = iter(pieces.encode("utf-8", "replace"))
        for byte in data:
            ids.append(marks[next(data)] if byte == 0 and parse_special else byte)
        return ids

    def fragments(self, text: str, *, parse_special: bool) -> list[Fragment]:
        parts = re.split("(<s>|</s>)", text) if parse_special else [text]
        marks = {"<s>": BOS, "</s>": EOS}
        return [Fragment(marks.get(part, part), False) for part in parts if part]

    def encode_fragment(self, fragment: Fragment) -> list[int]:
        content = fragment.content
        return [content] if isinstance(content, int) else list(content.encode("utf-8", "replace"))

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return ("<s>", "</s>", *WORDS)[token_id - 256].encode()

    def is_control(self, token_id: int) -> bool:
        return token_id in (BOS, EOS)


def word(text: str) -> int:
    return 258 + WORDS.index(text)


def token_ids(*texts: str) -> tuple[int, ...]:
    """Ids of words where there are such, else of bytes."""
    return tuple(
        each for text in texts for each in ([word(text)] if text in WORDS else list(text.encode()))
    )


def served_model(chat_template: str | None = "chatml") -> ServedModel:
    return ServedModel(
        alias="sim-model",
        tokenizer=ByteTokenizer(),
        template=load_template({}, chat_template, "<s>", "</s>"),
        spec=ModelSpec(
            architecture="llama",
            name="sim",
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            context_length=4096,
            norm_eps=1e-5,
            embedding_scale=1.0,
            tied_output=True,
            final_softcap=None,
            layers=(),
        ),
        model_path_name="sim-model.gguf",
        size=1000,
        n_params=500,
        ftype="F32",
    )


@frozen
class Reply:
    """An answer, decoded."""

    raw: Answer

    @property
    def status(self) -> int | None:
        return self.raw.status

    @property
    def headers(self) -> dict[str, str]:
        return self.raw.headers

    @property
    def json(self) -> Any:
        return json.loads(self.raw.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def frames(self) -> list[bytes]:
        """The stream's events, comments too, without their blank lines."""
        assert self.raw.body.endswith(b"\n\n")
        return self.raw.body.removesuffix(b"\n\n").split(b"\n\n")

    @property
    def events(self) -> list[Any]:
        """The stream's JSON; comments and [DONE] are left out."""
        data = [frame.removeprefix(b"data: ") for frame in self.frames if frame != b":"]
        return [json.loads(each) for each in data if each != b"[DONE]"]


@frozen(kw_only=True)
class Serving:
    """A running application on a running engine."""

    app: QuartTrio
    http: VirtualServer
    stack: SimStack
    services: Services
    nursery: trio.Nursery
    """Of the connections; cancelled at the end."""
    lines: list[Any]
    """What was written to the log by routes, as events."""

    async def add_adapter(
        self, name: str, content: str = "", scale: float = 0.0, **more: Any
    ) -> Adapter:
        """Load an adapter as the command line does; equal ``content``, equal adapter."""
        data = adapter_data(content or name, **more)
        info = AdapterInfo.of(f"{name}.gguf", data)
        return await self.services.loader.put(name, info, data, scale)

    async def call(self, call: Call) -> Reply:
        return Reply(await self.http.call(call))

    async def get(self, target: str, **headers: str) -> Reply:
        return Reply(await self.http.get(target, headers))

    async def post(self, target: str, body: Any, **more: Any) -> Reply:
        """``body``: bytes as they are, or anything that becomes JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.call(Call(target=target, method="POST", body=raw, **more))


@asynccontextmanager
async def serving(
    tokens: tuple[int, ...] = (),
    then: int = ord("a"),
    *,
    sim: SimSettings | None = None,
    model: ServedModel | None = None,
    **settings: Any,
) -> AsyncIterator[Serving]:
    """Serve in virtual time; every answer is ``tokens`` and then ``then`` for ever, unless ``sim``
    has a token function. ``settings`` are those of ``ServeSettings``; ``lora_dir``: where adapters
    may be loaded from; ``recall_bytes``: room for past answers, 0 for none; ``session_dir``: where
    conversations are saved; ``identity``: of the state in them."""
    sim = evolve(sim or SimSettings(), vocab_size=VOCAB_SIZE)
    if sim.token_function is None:
        sim = evolve(sim, token_function=script(tokens, then))
    ids, seeds = count(), count(1000)
    defaults: dict[str, Any] = {
        "n_ctx": sim.max_context,
        "num_places": sim.num_places,
        "clock": lambda: NOW,
        "new_id": lambda: f"{next(ids):032}",
        "new_seed": lambda: next(seeds),
        "heartbeat_s": HEARTBEAT_S,
        "sampling": SamplingParams(),
        "sealer": SEALER,
        "block_size": sim.block_size,
    }
    lines: list[Any] = []
    tally, folder = Tally(), settings.pop("lora_dir", None)
    recall_bytes = settings.pop("recall_bytes", 1 << 20)
    session_dir, identity = settings.pop("session_dir", None), settings.pop("identity", IDENTITY)
    async with sim_stack(sim, tally) as stack, trio.open_nursery() as nursery:
        model = model or served_model()
        loading = LoadingSettings(
            folder=folder,
            spec=model.spec,
            reserved=model.alias,
            log_key=SEALER.log_key,
            emit=lines.append,
        )
        services = Services(
            engine=stack.engine,
            model=model,
            offload=InlineOffload(),
            settings=ServeSettings(**{**defaults, **settings}),
            loader=AdapterLoader(Adapters(), loading, stack.engine, InlineOffload()),
            recall=Recall(model.tokenizer, AnswerStore(recall_bytes)) if recall_bytes else None,
            tally=tally,
            emit=lines.append,
        )
        nursery.start_soon(services.loader.reap)
        with sessions_in(session_dir, identity, services) as sessions:
            services = evolve(services, sessions=sessions)
            app = create_app(services)
            http = VirtualServer(app, nursery)
            yield Serving(
                app=app, http=http, stack=stack, services=services, nursery=nursery, lines=lines
            )
            nursery.cancel_scope.cancel()


@contextmanager
def sessions_in(
    folder: Path | None, identity: ServerIdentity, services: Services
) -> Iterator[Sessions | None]:
    """Real files, touched on the spot."""
    if folder is None:
        yield None
        return
    identity = evolve(identity, block_size=services.settings.block_size)
    with closing(SessionStore.open(folder)) as store:
        yield Sessions(
            engine=services.engine,
            files=store,
            identity=identity,
            adapters=services.loader.adapters,
            beside=InlineOffload(),
            emit=services.emit,
            sealer=SEALER,
        )


def adapter_data(content: str, **changes: Any) -> AdapterData:
    """An adapter without weights: the sim backend knows it by its digest."""
    fields: dict[str, Any] = {
        "kind": AdapterKind.GGUF,
        "digest": blake2b(content.encode(), digest_size=32).digest(),
        "targets": {},
        "invocation_tokens": (),
        "task_name": "",
        "prompt_prefix": "",
    }
    return AdapterData(**{**fields, **changes})
