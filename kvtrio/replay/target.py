"""The server that a scenario is played to: what it is, what it speaks, and which of its things are
the scenario's."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from attrs import field, frozen

from kvtrio.replay.realise import Atoms
from kvtrio.replay.results import Api, ServerKind
from kvtrio.replay.scenario import Adapter
from kvtrio.replay.words import common_words, sample_text

MIN_VOCABULARY = 64
MAX_TEXT = 8000
"""Characters in one request to /tokenize."""
OK = 200
BARRED = {
    401: "the server asks for a key: --api-key",
    403: "the server does not accept the key",
    503: "the server is not ready yet",
}


class ReplayError(Exception):
    """The replay cannot begin, or go on; the message is one clear line."""


class Reply(Protocol):
    """A whole answer."""

    @property
    def status(self) -> int: ...

    def json(self) -> Any:
        """Raises ``ReplayError`` if it is none."""
        ...


class Http(Protocol):
    """A client of one server. All raise ``OSError`` where there is no server, and ``ReplayError``
    where it makes no sense."""

    async def get(self, path: str) -> Reply: ...

    async def post(self, path: str, body: Any) -> Reply: ...

    async def stream(self, path: str, body: Any, take: Callable[[int, bytes], None]) -> None:
        """POST; ``take`` gets the status and each piece of the answer as it arrives."""
        ...


@frozen(kw_only=True)
class Wishes:
    """What the user says about the server."""

    api: Api | None = None
    """None: token ids where the server takes them, else words."""
    model: str | None = None
    adapters: Mapping[str, str] = field(factory=dict)
    """The server's names, by alias."""
    without_adapters: bool = False
    more: Mapping[str, Any] = field(factory=dict)
    """Members to add to every body."""


@frozen(kw_only=True)
class Target:
    """A server that was looked at."""

    kind: ServerKind
    api: Api
    model: str
    max_context: int | None
    vocabulary: Atoms
    """Token ids, or places in a ``WordTable``."""
    adapter_ids: Mapping[str, int] = field(factory=dict)
    """By alias; for llama-server's ``lora``."""
    adapter_names: Mapping[str, str] = field(factory=dict)
    """By alias; for servers that have adapters as models."""
    all_ids: tuple[int, ...] = ()
    """Of the server's adapters, for ``lora``."""
    purposes: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(factory=dict)


async def look(http: Http, wishes: Wishes, adapters: tuple[Adapter, ...]) -> Target:
    """Find out what the server is; raises ``ReplayError`` and ``OSError``."""
    props = await _json(http, "/props")
    kind = _kind(props)
    api = wishes.api or (Api.WORDS if kind is ServerKind.OPENAI else Api.TOKENS)
    if api is Api.TOKENS and kind is ServerKind.OPENAI:
        raise ReplayError("the server has no /completion that takes token ids; --api words or chat")
    is_exact = api is Api.TOKENS
    own = await _json(http, "/lora-adapters") if kind is not ServerKind.OPENAI else None
    own = own if isinstance(own, list) else []
    ours = () if wishes.without_adapters else adapters
    return Target(
        kind=kind,
        api=api,
        model=wishes.model or await _model(http),
        max_context=_context(props),
        vocabulary=await token_vocabulary(http) if is_exact else np.arange(len(common_words())),
        adapter_ids=_adapter_ids(own, ours, wishes) if kind is not ServerKind.OPENAI else {},
        adapter_names=_adapter_names(ours, wishes) if kind is ServerKind.OPENAI else {},
        all_ids=tuple(int(_member(each, "id") or 0) for each in own),
        purposes=tuple(_member(props, "kvtrio", "purposes") or ()),
        more=wishes.more,
    )


async def token_vocabulary(http: Http) -> Atoms:
    """Ids that the server's tokenizer makes of ordinary text: none of them is special."""
    text, ids = sample_text(), set[int]()
    for start in range(0, len(text), MAX_TEXT):
        body = {"content": text[start : start + MAX_TEXT], "add_special": False}
        reply = await http.post("/tokenize", body | {"parse_special": False})
        found = reply.json().get("tokens") if reply.status == OK else None
        if not isinstance(found, list) or not all(isinstance(each, int) for each in found):
            raise ReplayError("the server has no /tokenize as llama-server has it; --api words")
        ids.update(found)
    if len(ids) < MIN_VOCABULARY:
        raise ReplayError("the server's tokenizer knows too few tokens")
    return np.array(sorted(ids), dtype=np.int64)


async def _json(http: Http, path: str) -> Any:
    """None if the server has nothing there."""
    reply = await http.get(path)
    if reply.status in BARRED:
        raise ReplayError(BARRED[reply.status])
    return reply.json() if reply.status == OK else None


def _kind(props: Any) -> ServerKind:
    if _member(props, "kvtrio") is not None:
        return ServerKind.KVTRIO
    is_llama = isinstance(_member(props, "build_info"), str)
    return ServerKind.LLAMA if is_llama else ServerKind.OPENAI


async def _model(http: Http) -> str:
    models = _member(await _json(http, "/v1/models"), "data")
    first = models[0] if isinstance(models, list) and models else None
    name = _member(first, "id")
    return name if isinstance(name, str) else ""


def _context(props: Any) -> int | None:
    found = _member(props, "default_generation_settings", "n_ctx")
    return found if isinstance(found, int) else None


def _adapter_ids(own: list[Any], adapters: tuple[Adapter, ...], wishes: Wishes) -> dict[str, int]:
    """By the names that the user gave, else by content, else in order."""
    by_name = {str(_member(each, "name") or _member(each, "path")): each for each in own}
    by_content = {str(_member(each, "log_digest")): each for each in own}
    ids: dict[str, int] = {}
    for number, adapter in enumerate(adapters):
        named = wishes.adapters.get(adapter.alias)
        if named is not None and named not in by_name:
            raise ReplayError(f"--adapter: the server has no adapter {named!r}")
        found = by_name.get(named or "") or by_content.get(adapter.content or "")
        if found is None and number < len(own):
            found = own[number]
        if found is None:
            raise ReplayError(
                f"the scenario has {len(adapters)} adapters and the server {len(own)};"
                " --adapter ALIAS=NAME says which to use, --no-adapters plays without"
            )
        ids[adapter.alias] = int(_member(found, "id") or 0)
    return ids


def _adapter_names(adapters: tuple[Adapter, ...], wishes: Wishes) -> dict[str, str]:
    missing = [each.alias for each in adapters if each.alias not in wishes.adapters]
    if missing:
        raise ReplayError(f"--adapter {missing[0]}=MODEL: which model of the server is it?")
    return dict(wishes.adapters)


def _member(value: Any, *names: str) -> Any:
    """None where it is not there."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value
