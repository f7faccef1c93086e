"""Keys and CORS."""

from typing import Any

import pytest
from werkzeug.datastructures import Headers

from harness.serving import serving
from harness.virtual_http import Call
from kvtrio.serve.app import ROUTES
from kvtrio.serve.guards import PUBLIC_PATHS, is_allowed

KEYS = ("first-key", "second-key")
ADDRESSES = [(route.method, path) for route in ROUTES for path in route.paths]


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "Bearer second-key"},
        {"authorization": "second-key"},
        {"x-api-key": "first-key"},
        {"authorization": "", "x-api-key": "first-key"},
    ],
)
async def test_any_key_opens_in_any_form(autojump_clock: Any, headers: dict[str, str]) -> None:
    """Bearer, bare and x-api-key are the same, and any listed key is good."""
    async with serving(api_keys=KEYS) as server:
        assert (await server.get("/v1/models", **headers)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer first-ke"},
        {"authorization": "Bearer wrong", "x-api-key": "first-key"},
        {"x-api-key": ""},
    ],
)
async def test_a_wrong_key_is_a_401(autojump_clock: Any, headers: dict[str, str]) -> None:
    """Authorization decides if it is there; the body is llama-server's."""
    async with serving(api_keys=KEYS) as server:
        answer = await server.get("/v1/models", **headers)
        assert answer.status == 401
        assert answer.error["type"] == "authentication_error"
        assert answer.error["message"] == "Invalid API Key"


@pytest.mark.parametrize("given", ["Bearer ", "Bearer wr\xf6ng", "bearer first-key"])
def test_odd_keys_are_just_wrong(given: str) -> None:
    """An empty key or one beyond ASCII is refused like any other."""
    assert not is_allowed(Headers({"Authorization": given}), (b"first-key",))


@pytest.mark.parametrize(("method", "path"), [*ADDRESSES, ("GET", "/none")])
async def test_all_but_health_need_the_key(autojump_clock: Any, method: str, path: str) -> None:
    """Without a key only the health routes answer; unknown paths do not tell that they are."""
    async with serving(api_keys=KEYS) as server:
        answer = await server.call(Call(target=path, method=method, body=b"{}"))
        assert (answer.status == 401) == (path not in PUBLIC_PATHS)


async def test_without_keys_any_key_is_accepted(autojump_clock: Any) -> None:
    """Clients that must send something may."""
    async with serving() as server:
        assert (await server.get("/v1/models", authorization="Bearer x")).status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health", "/none"])
async def test_preflight_is_answered_before_everything(autojump_clock: Any, path: str) -> None:
    """OPTIONS needs no key and no route: 200, empty, with CORS headers."""
    async with serving(api_keys=KEYS) as server:
        origin = {"origin": "https://page.example"}
        answer = await server.call(Call(target=path, method="OPTIONS", headers=origin))
        assert answer.status == 200
        assert answer.raw.body == b""
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers
        assert "Authorization" in answer.headers["access-control-allow-headers"]


async def test_every_answer_has_cors_headers(autojump_clock: Any) -> None:
    """Errors and streams too, or a browser shows the page nothing at all."""
    async with serving() as server:
        answers = [
            await server.get("/health"),
            await server.get("/none"),
            await server.post("/completion", {"prompt": "x", "n_predict": 1, "stream": True}),
            await server.post("/completion", {}),
        ]
        origins = [each.headers["access-control-allow-origin"] for each in answers]
        assert origins == ["*"] * 4


@pytest.mark.parametrize("origin", ["https://page.example", "null", b"https://p\xe4ge.example"])
async def test_an_origin_is_never_repeated(autojump_clock: Any, origin: Any) -> None:
    """Every page is the same to us, with keys and without; nothing of it comes back."""
    async with serving(api_keys=KEYS) as server:
        for target in ("/health", "/v1/models"):
            answer = await server.get(target, origin=origin)
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in answer.headers
            assert not any("page.example" in value for value in answer.headers.values())
