"""What happens before and after every handler: preflight, API key, CORS headers."""

from hmac import compare_digest

from quart import Quart, Response, request
from werkzeug.datastructures import Headers

from kvtrio.serve.errors import UNAUTHORIZED, ApiError
from kvtrio.serve.replies import error_reply

CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "*, Authorization",
}
"""Any page may call: access is a matter of the key, which a page must have and send itself, and of
the address listened on. What a browser would add on its own (cookies, a proxy's login) is not
accepted from pages: without Allow-Credentials it sends none of it."""
PUBLIC_PATHS = frozenset({"/health", "/v1/health"})
"""Answered without a key."""


def install_guards(app: Quart, api_keys: tuple[str, ...]) -> None:
    """Check order: preflight (empty 200), then the key, then the handler."""
    keys = tuple(key.encode() for key in api_keys)

    async def before() -> Response | None:
        if request.method == "OPTIONS":
            return Response(b"", 200, content_type="text/plain")
        if request.path in PUBLIC_PATHS or is_allowed(request.headers, keys):
            return None
        return error_reply(ApiError(UNAUTHORIZED))

    async def after(response: Response) -> Response:
        response.headers.update(CORS)
        response.headers["Server"] = "kvtrio"
        return response

    app.before_request(before)
    app.after_request(after)


def is_allowed(headers: Headers, keys: tuple[bytes, ...]) -> bool:
    """Whether the request brings one of ``keys``; without keys everybody may.

    ``Authorization`` (with or without "Bearer ") comes before ``X-Api-Key``, as in llama-server.
    """
    if not keys:
        return True
    key = given_key(headers)
    # No short cut: the time must not tell which key was nearly right.
    matches = [compare_digest(key, each) for each in keys]
    return any(matches)


def given_key(headers: Headers) -> bytes:
    """Return the key that a request brings, right or wrong; empty if none."""
    given = headers.get("Authorization") or headers.get("X-Api-Key") or ""
    return given.removeprefix("Bearer ").encode()
