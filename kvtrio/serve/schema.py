"""The bodies of requests, as they may arrive; null counts as absent everywhere.

Types are strict and numbers have ranges. What is checked here needs no knowledge of the model; the
rest follows in ``sampling``, ``prompts`` and ``chat``.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw

from kvtrio.serve.bounds import check_values
from kvtrio.serve.errors import BAD_JSON, BAD_TEXT, TOO_DEEP, WRONG_VALUE, ApiError
from kvtrio.serve.fields import IGNORED, REFUSED, refuse_unsupported

MAX_TOP_LOGPROBS = 20
MAX_PROBS = 100
MAX_CELLS = 2**20
"""Log-probabilities in all answers of one request together: about 100 MB of them."""
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
"""All stop strings of a request together."""
MAX_BIASES = 1024
MAX_BIAS_CHARS = 256
"""Of one key of ``logit_bias`` that is text."""
MAX_PROMPTS = 64
MAX_MESSAGES = 4096
MAX_NAME_CHARS = 64
MAX_ADAPTER_NAME_CHARS = 128
MAX_SESSION_CHARS = 128
MAX_PATH_CHARS = 1024
MAX_SALT_CHARS = 256
MAX_USER_CHARS = 512
MAX_PRIORITY = 10
MAX_DEADLINE_MS = 86_400_000
MAX_SCALE = 100.0
"""Of an adapter, either sign; a negative one turns its effect round."""
MAX_RETAIN_S = 86400.0
MAX_LORA = 64
MAX_WHOLE_VALUES = 1024
"""In a body that is no generation's."""

T = TypeVar("T")
Limit = Annotated[int, Meta(ge=-1)]
"""-1: none. As large as you like: it is cut to what there is."""
Small = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""-1 means "not set"."""
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]
Stop = str | Annotated[list[str], Meta(max_length=MAX_STOPS)]
Bias = float | bool
Biases = (
    Annotated[list[tuple[int | str, Bias]], Meta(max_length=MAX_BIASES)]
    | Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)]
)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Lora(msgspec.Struct):
    """An adapter's scale, in a request and in POST /lora-adapters."""

    id: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    scale: Annotated[float, Meta(ge=-MAX_SCALE, le=MAX_SCALE)] = 0.0
    """llama-server's default, which means: not used."""


LoraList = Annotated[list[Lora], Meta(max_length=MAX_LORA)]


class Extension(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``kvtrio``: what no other server has. An unknown member is an error: it would be ours."""

    session: Annotated[str, Meta(max_length=MAX_SESSION_CHARS)] | None = None
    """The conversation's name. With ``--slot-save-path``, one saved under it is gone on with."""
    save_session: bool | None = None
    """Save it under its name when the answer is done."""
    purpose: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    retain: Literal["auxiliary", "normal", "pin"] | None = None
    retain_s: Annotated[float, Meta(gt=0, le=MAX_RETAIN_S)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """A higher one goes first under the scheduler ``priority``; others do not ask."""
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_DEADLINE_MS)] | None = None
    """Start by then, counted from the request's arrival, or refuse."""
    predict: bool | None = None
    """Tell the time to the first token that was expected."""


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields that all three completion routes share, in both dialects."""

    # how much
    n_predict: Limit | None = None
    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    n_cmpl: Annotated[int, Meta(ge=1)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    # where, and with what
    id_slot: Small | None = None
    model: str | None = None
    """An adapter's name chooses it; every other name means the model that is served."""
    lora: LoraList | None = None
    cache_prompt: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None
    """vLLM's: state is shared only among requests of one key with one salt."""
    user: Annotated[str, Meta(max_length=MAX_USER_CHARS)] | None = None
    """Whose turn it is, together with the API key, where the scheduler is fair among users."""
    kvtrio: Extension | None = None
    # which token
    temperature: Annotated[float, Meta(ge=0, le=1000)] | None = None
    top_k: Small | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    top_n_sigma: Annotated[float, Meta(ge=-1, le=1000)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    """vLLM's name for ``repeat_penalty``."""
    repeat_last_n: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: int | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_PROBS)] | None = None
    # what to tell
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    sse_ping_interval: Small | None = None


class NativeBody(GenerationBody, kw_only=True):
    """POST /completion."""

    prompt: Any = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_PROBS)] | None = None
    response_fields: Annotated[list[str], Meta(max_length=64)] | None = None


class TextBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: Any = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_PROBS)] | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions; /apply-template reads the first five fields of it."""

    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize."""

    content: Any = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int] | None = None


class SlotBody(msgspec.Struct, kw_only=True):
    """POST /slots/ID?action=save, restore or erase."""

    filename: str | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None
    """Of the requests whose state it is; see ``GenerationBody``."""


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter; vLLM's."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=MAX_ADAPTER_NAME_CHARS)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARS)]


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter; vLLM's."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=MAX_ADAPTER_NAME_CHARS)]


def parse_whole(body: bytes, kind: type[T]) -> T:
    """Return a body that is no generation's; raises ``ApiError``."""
    check_values(body, MAX_WHOLE_VALUES)
    with _refusing(body, kind):
        return msgspec.json.decode(body, type=kind)


def parse(body: bytes, kind: type[T], max_values: int) -> T:
    """Return ``body`` as ``kind``; raises ``ApiError``."""
    check_values(body, max_values)
    with _refusing(body, kind):
        refuse_unsupported(msgspec.json.decode(body, type=dict[str, Raw]))
        return msgspec.json.decode(body, type=kind)


@contextmanager
def _refusing(body: bytes, kind: Any) -> Iterator[None]:
    """The whole body has to be Unicode, also where nobody looks."""
    try:
        body.decode()
        yield
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _unreadable(body, kind) from None
    except RecursionError:
        raise ApiError(TOO_DEEP) from None


def _unreadable(body: bytes, kind: Any) -> ApiError:
    """Name the field that is not Unicode, if it is one of ours and the rest is JSON."""
    try:
        found = json.loads(body.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return ApiError(BAD_JSON)
    ours = {*getattr(kind, "__struct_fields__", ()), *REFUSED, *IGNORED}
    for name, value in found.items() if isinstance(found, dict) else ():
        if name in ours and not _is_unicode(value):
            return ApiError(BAD_TEXT, name)
    return ApiError(BAD_JSON)


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


_PLACE = re.compile(r"(?P<why>.*) - at `\$\.?(?P<path>[\w.\[\]]+)`", re.DOTALL)
_WHY = re.compile(r"(Expected|Number out of range|Integer value out of range)[\w`|<>=,. +-]*")


def _wrong_value(text: str) -> ApiError:
    """msgspec names types, bounds and fields, all of them ours; anything else is left out."""
    if (found := _PLACE.fullmatch(text)) is None:
        return ApiError(BAD_JSON)
    why = found["why"] if _WHY.fullmatch(found["why"]) else "wrong value"
    return ApiError(WRONG_VALUE, found["path"], expected=why.replace("`", "").lower())
