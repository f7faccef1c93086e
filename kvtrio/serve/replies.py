"""Responses: JSON encoded by msgspec (quart's encoder sorts keys), errors from the catalogue."""

import logging

import msgspec
from quart import Quart, Response
from werkzeug.exceptions import HTTPException

from kvtrio.serve.errors import (
    BAD_REQUEST,
    BODY_TIMEOUT,
    BODY_TOO_LARGE,
    INTERNAL,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    ApiError,
)

log = logging.getLogger(__name__)

JSON = "application/json; charset=utf-8"
BY_STATUS = {
    404: NOT_FOUND,
    405: METHOD_NOT_ALLOWED,
    408: BODY_TIMEOUT,
    413: BODY_TOO_LARGE,
}

_encoder = msgspec.json.Encoder()


def encode_json(payload: object) -> bytes:
    """Return ``payload`` as JSON; infinite numbers become null."""
    return _encoder.encode(payload)


def json_reply(payload: object, status: int = 200) -> Response:
    return raw_json_reply(encode_json(payload), status)


def raw_json_reply(data: bytes, status: int = 200) -> Response:
    return Response(data, status, content_type=JSON)


def error_reply(error: ApiError) -> Response:
    reply = json_reply(error.body(), error.spec.status)
    reply.headers.update(error.headers())
    return reply


def install_error_handlers(app: Quart) -> None:
    """Answer every failure with a body from the catalogue; quart's HTML never appears."""

    async def refused(error: ApiError) -> Response:
        return error_reply(error)

    async def refused_by_quart(error: HTTPException) -> Response:
        code = error.code or 500
        spec = BY_STATUS.get(code, BAD_REQUEST if code < 500 else INTERNAL)
        reply = error_reply(ApiError(spec))
        if code == METHOD_NOT_ALLOWED.status:
            reply.headers["Allow"] = ", ".join(sorted(getattr(error, "valid_methods", None) or ()))
        return reply

    async def failed(error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return error_reply(ApiError(INTERNAL))

    app.register_error_handler(ApiError, refused)
    app.register_error_handler(HTTPException, refused_by_quart)
    app.register_error_handler(Exception, failed)
