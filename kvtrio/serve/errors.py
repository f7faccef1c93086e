"""The error catalogue: every answer that is not a success comes from here.

An entry has a name that never changes, a status, llama-server's ``type`` and a fixed text. Only
numbers and names of ours (fields, limits) are ever filled in: no error can carry a user's words, a
file name or an exception's text. One exception: whoever loads an adapter is told what is wrong with
it, in the reader's words, which may name tensors of that file.
"""

from math import ceil
from typing import Any

from attrs import frozen


@frozen
class ErrorSpec:
    """One kind of error. ``text`` may hold ``{names}`` for ``ApiError``'s values."""

    code: str
    status: int
    type: str
    text: str
    retry_after_s: int | None = None
    """Sent as ``Retry-After`` where trying again makes sense."""


INVALID, UNSUPPORTED, UNAVAILABLE = (
    "invalid_request_error",
    "not_supported_error",
    "unavailable_error",
)

BAD_REQUEST = ErrorSpec("bad_request", 400, INVALID, "the request is malformed")
BAD_JSON = ErrorSpec("bad_json", 400, INVALID, "the body is not a JSON object in UTF-8")
TOO_MANY_VALUES = ErrorSpec(
    "too_many_values", 400, INVALID, "the body has more than {limit} JSON values"
)
BAD_TEXT = ErrorSpec(
    "bad_text",
    400,
    INVALID,
    "Field '{param}': not Unicode: bytes that are not UTF-8, or half of a surrogate pair",
)
TOO_DEEP = ErrorSpec("too_deep", 400, INVALID, "the body is nested too deeply")
MISSING = ErrorSpec("missing_field", 400, INVALID, "Field '{param}': required")
WRONG_VALUE = ErrorSpec("wrong_value", 400, INVALID, "Field '{param}': {expected}")
OUT_OF_RANGE = ErrorSpec(
    "out_of_range", 400, INVALID, "Field '{param}': must lie in {low} .. {high}"
)
TOO_MANY = ErrorSpec("too_many", 400, INVALID, "Field '{param}': at most {limit} entries")
TOO_LONG_TEXT = ErrorSpec(
    "too_long_text", 400, INVALID, "Field '{param}': at most {limit} characters {scope}"
)
TOO_MUCH_TEXT = ErrorSpec(
    "too_much_text", 400, INVALID, "Field '{param}': at most {limit} bytes of text"
)
UNKNOWN_TOKEN = ErrorSpec(
    "unknown_token", 400, INVALID, "Field '{param}': token ids lie in 0 .. {high}"
)
NOT_SUPPORTED = ErrorSpec(
    "not_supported", 400, UNSUPPORTED, "Field '{param}': not supported by this server"
)
ONLY_TEXT = ErrorSpec(
    "only_text", 400, UNSUPPORTED, "message {index}: only text content is supported"
)
BAD_MESSAGE = ErrorSpec("bad_message", 400, INVALID, "message {index}: {expected}")
BAD_TEMPLATE_INPUT = ErrorSpec(
    "template_error", 400, INVALID, "message {index}: refused by the chat template"
)
TEMPLATE_FAILED = ErrorSpec(
    "template_failed", 400, INVALID, "the chat template could not render this conversation"
)
TOO_MANY_CELLS = ErrorSpec(
    "too_many_logprobs",
    400,
    INVALID,
    "Field '{param}': answers x tokens x log-probabilities may be {limit} at most;"
    " set a lower max_tokens",
)
CONFLICT = ErrorSpec(
    "conflict", 400, INVALID, "Field '{param}': does not go together with '{other}'"
)
NEEDS = ErrorSpec("needs_field", 400, INVALID, "Field '{param}': needs '{other}'")
UNKNOWN_ADAPTER = ErrorSpec("unknown_adapter", 400, INVALID, "Field '{param}': no such adapter id")
REPEATED_ADAPTER = ErrorSpec(
    "repeated_adapter", 400, INVALID, "Field '{param}': an adapter id is there twice"
)
ADAPTER_REFUSED = ErrorSpec("adapter_refused", 400, INVALID, "Field '{param}': {expected}")
NO_ADAPTER_ROOM = ErrorSpec(
    "no_adapter_room",
    400,
    INVALID,
    "Field '{param}': the adapter does not fit into memory, or not to this model",
)
ADAPTERS_FULL = ErrorSpec(
    "adapters_full", 400, INVALID, "there are {limit} adapters already; unload one"
)
ADAPTERS_TOO_LARGE = ErrorSpec(
    "adapters_too_large", 400, INVALID, "all adapters together may take {limit} bytes at most"
)
TAKEN_NAME = ErrorSpec("taken_name", 400, INVALID, "Field '{param}': this is the model's own name")
NO_ADAPTER = ErrorSpec("no_adapter", 404, "not_found_error", "Field '{param}': no such adapter")
NO_ADAPTER_DIR = ErrorSpec(
    "no_adapter_dir",
    501,
    UNSUPPORTED,
    "this server loads no adapters at run time; start it with --lora-dir to permit it",
)
NO_SESSION_DIR = ErrorSpec(
    "no_session_dir",
    501,
    UNSUPPORTED,
    "this server saves no sessions; start it with --slot-save-path to permit it",
)
BAD_SLOT = ErrorSpec("bad_slot", 400, INVALID, "Invalid slot ID: expected 0 to {high}")
BAD_ACTION = ErrorSpec(
    "bad_action", 400, INVALID, "Invalid action: expected save, restore or erase"
)
EMPTY_SLOT = ErrorSpec(
    "empty_slot", 400, INVALID, "Unable to save slot: it holds nothing, or nothing of this key's"
)
SESSION_NAME = ErrorSpec(
    "bad_session_name",
    400,
    INVALID,
    "Field '{param}': Invalid filename: expected 1 to 255 bytes that name one file",
)
_RESTORE = "Unable to restore slot: "
SESSION_NOT_FOUND = ErrorSpec(
    "session_not_found", 404, "not_found_error", _RESTORE + "no such session"
)
SESSION_TAKEN = ErrorSpec(
    "session_taken", 400, INVALID, "Unable to save slot: the name is another key's"
)
SESSION_LOCKED = ErrorSpec(
    "session_locked", 503, UNAVAILABLE, "another process works on the saved sessions", 1
)
SESSION_NOT_REGULAR = ErrorSpec(
    "session_not_regular", 400, INVALID, _RESTORE + "this is no regular file"
)
SESSION_TRUNCATED = ErrorSpec("session_truncated", 400, INVALID, _RESTORE + "a part is missing")
SESSION_DAMAGED = ErrorSpec("session_damaged", 400, INVALID, _RESTORE + "its checksum is wrong")
SESSION_FOREIGN = ErrorSpec(
    "session_foreign", 400, INVALID, _RESTORE + "this is no session of kvtrio's"
)
SESSION_NEWER = ErrorSpec(
    "session_newer", 400, INVALID, _RESTORE + "a newer version of kvtrio saved it"
)
SESSION_MODEL = ErrorSpec("session_model", 400, INVALID, _RESTORE + "it is of another model")
SESSION_FORMAT = ErrorSpec(
    "session_format",
    400,
    INVALID,
    _RESTORE + "it was saved with another KV format, block size, backend or device",
)
SESSION_ADAPTERS = ErrorSpec(
    "session_adapters", 400, INVALID, _RESTORE + "it has state of adapters that are not loaded"
)
SESSION_DISK_FULL = ErrorSpec(
    "session_disk_full", 500, "server_error", "Unable to save slot: the disk is full"
)
SESSION_DISK = ErrorSpec(
    "session_disk", 500, "server_error", "the disk failed under --slot-save-path"
)
UNKNOWN_PURPOSE = ErrorSpec(
    "unknown_purpose", 400, INVALID, "Field '{param}': not one of this server's; /props lists them"
)
EMPTY_PROMPT = ErrorSpec("empty_prompt", 400, INVALID, "the prompt is empty")
# Three clients recognise an overflow by three different substrings of this text.
CONTEXT_SIZE = ErrorSpec(
    "context_length_exceeded",
    400,
    "exceed_context_size_error",
    "request ({about}{n_prompt_tokens} tokens) exceeds the available context size ({n_ctx} tokens),"
    " try increasing it (context_length_exceeded)",
)
TEXT_TOO_LONG = ErrorSpec(
    "text_too_long",
    400,
    "exceed_context_size_error",
    "Field '{param}': more than {limit} characters in one text exceeds the available context size"
    " of every model (context_length_exceeded)",
)
UNAUTHORIZED = ErrorSpec("unauthorized", 401, "authentication_error", "Invalid API Key")
NOT_FOUND = ErrorSpec("not_found", 404, "not_found_error", "File Not Found")
NO_MODEL = ErrorSpec("no_model", 404, "not_found_error", "no such model; /v1/models lists them")
METHOD_NOT_ALLOWED = ErrorSpec(
    "method_not_allowed", 405, INVALID, "this path does not answer this method"
)
BODY_TIMEOUT = ErrorSpec("body_timeout", 408, INVALID, "the body took too long to arrive")
BODY_TOO_LARGE = ErrorSpec("body_too_large", 413, INVALID, "the body is too large")
QUEUE_FULL = ErrorSpec(
    "queue_full",
    429,
    "rate_limit_error",
    "the queue, or the part of it that one user may fill, is full ({limit} may wait in all)",
    1,
)
QUEUE_TOKENS = ErrorSpec(
    "queue_tokens",
    429,
    "rate_limit_error",
    "the queue, or the part of it that one user may fill, is full"
    " (its prompts may have {limit} tokens together)",
    1,
)
INTERNAL = ErrorSpec(
    "internal", 500, "server_error", "the server failed on this request; it has been logged"
)
NOT_FINITE = ErrorSpec(
    "not_finite",
    500,
    "server_error",
    "the model, with the adapters of this request, gives no finite numbers for it",
)
NO_MEMORY = ErrorSpec(
    "no_memory", 503, UNAVAILABLE, "the device has no memory for a step of this request", 1
)
DRAINING = ErrorSpec(
    "draining", 503, UNAVAILABLE, "the server is shutting down and takes no new requests", 5
)
STOPPED = ErrorSpec(
    "stopped", 503, UNAVAILABLE, "the server stopped before the answer was complete", 5
)
DEADLINE = ErrorSpec(
    "deadline", 503, UNAVAILABLE, "the request cannot start before its deadline", 1
)
NO_SLOT = ErrorSpec("no_slot", 503, UNAVAILABLE, "no slot available", 1)

CATALOGUE = {value.code: value for value in list(globals().values()) if type(value) is ErrorSpec}
"""Every entry by its name."""

BODY_NUMBERS = frozenset({"n_prompt_tokens", "n_ctx"})
"""Values that llama-server's clients read from the body as numbers."""
MAX_RETRY_AFTER_S = 600


def forecast(predicted_s: float | None) -> dict[str, float]:
    """What an answer or an error says under ``kvtrio`` to one who asked when to expect a token."""
    return {} if predicted_s is None else {"predicted_ttft_ms": predicted_s * 1e3}


DEFAULTS = {"about": "", "scope": "in all"}
"""Words that only some errors of a kind need."""


class ApiError(Exception):
    """An error from the catalogue with its values filled in."""

    def __init__(
        self,
        spec: ErrorSpec,
        param: str | None = None,
        *,
        retry_after_s: float | None = None,
        predicted_s: float | None = None,
        **values: int | float | str,
    ):
        """``values`` are numbers, or words of ours; never a caller's. ``retry_after_s``, if it is
        known better than the catalogue knows it, is told in whole seconds, from 1 to 600;
        ``predicted_s`` is until the first token."""
        super().__init__(spec.code)
        self.spec = spec
        self.param = param
        self.message = spec.text.format(param=param, **{**DEFAULTS, **values})
        self.numbers = {name: values[name] for name in values if name in BODY_NUMBERS}
        self.predicted_s = predicted_s
        self.retry_after_s = spec.retry_after_s
        if retry_after_s is not None:
            self.retry_after_s = max(1, ceil(min(retry_after_s, MAX_RETRY_AFTER_S)))

    def body(self) -> dict[str, Any]:
        """Return what openai, LangChain, LiteLLM and llama.cpp's own clients all understand."""
        return {
            "error": {
                "message": self.message,
                "type": self.spec.type,
                "param": self.param,
                "code": self.spec.status,
                **self.numbers,
                "kvtrio": {"code": self.spec.code, **forecast(self.predicted_s)},
            }
        }

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(self.retry_after_s)}
