"""From a request's fields to ``SamplingParams``, with llama-server's defaults and meanings."""

from math import inf
from typing import Any

from attrs import evolve

from kvtrio.core.sampling import SamplingParams
from kvtrio.serve.errors import NOT_SUPPORTED, TOO_LONG_TEXT, UNKNOWN_TOKEN, WRONG_VALUE, ApiError
from kvtrio.serve.schema import MAX_BIAS_CHARS, MAX_STOP_CHARS, Bias, Biases, GenerationBody
from kvtrio.serve.served import TextTokenizer

RANDOM_SEEDS = (-1, 2**32 - 1)
"""llama-server's two ways to write "choose one"."""
MIN_TEMPERATURE = 1e-4
"""Below it, logits divided by the temperature leave float32; the limit is greedy anyway."""
MAX_BIAS = 1e6


def sampling_params(
    body: GenerationBody, defaults: SamplingParams, tokenizer: TextTokenizer, seed: int
) -> SamplingParams:
    """Return the request's settings; ``seed`` is for one that brings none. Raises ``ApiError``."""
    chosen: dict[str, Any] = {
        "temperature": _temperature(body.temperature),
        "top_k": None if body.top_k is None else max(body.top_k, 0),
        "top_p": body.top_p,
        "min_p": body.min_p,
        "typical_p": body.typical_p,
        "top_n_sigma": body.top_n_sigma,
        "repeat_penalty": _first(body.repeat_penalty, body.repetition_penalty),
        "repeat_last_n": body.repeat_last_n,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
    }
    return evolve(
        defaults,
        logit_bias=_logit_bias(body, tokenizer),
        seed=chosen_seed(body, seed),
        **{name: value for name, value in chosen.items() if value is not None},
    )


def is_seeded(body: GenerationBody) -> bool:
    return body.seed is not None and body.seed not in RANDOM_SEEDS


def chosen_seed(body: GenerationBody, random_seed: int) -> int:
    return random_seed if body.seed is None or not is_seeded(body) else body.seed


def stop_strings(body: GenerationBody) -> tuple[str, ...]:
    """Return the stop strings that are not empty; raises ``ApiError`` for too much text."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise ApiError(TOO_LONG_TEXT, "stop", limit=MAX_STOP_CHARS)
    return tuple(stop for stop in stops if stop)


def max_new_tokens(body: GenerationBody) -> int | None:
    """llama-server's order of names; -1 is no limit."""
    wanted = _first(body.n_predict, body.max_completion_tokens, body.max_tokens)
    return None if wanted is None or wanted == -1 else int(wanted)


def num_answers(body: GenerationBody) -> int:
    wanted = _first(body.n, body.n_cmpl)
    number = 1 if wanted is None else int(wanted)
    if body.best_of is not None and body.best_of > number:
        raise ApiError(NOT_SUPPORTED, "best_of")
    return number


def _temperature(value: float | None) -> float | None:
    return 0.0 if value is not None and value < MIN_TEMPERATURE else value


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _logit_bias(body: GenerationBody, tokenizer: TextTokenizer) -> tuple[tuple[int, float], ...]:
    """Merge the request's biases; a later entry replaces an earlier one for the same token."""
    biases: dict[int, float] = {}
    for key, value in _pairs(body.logit_bias):
        biases.update(dict.fromkeys(_biased_tokens(key, tokenizer), _bias(value)))
    if body.ignore_eos:
        biases.update(dict.fromkeys(sorted(tokenizer.eog_ids), -inf))
    return tuple(biases.items())


def _pairs(biases: Biases | None) -> list[tuple[int | str, Bias]]:
    if biases is None:
        return []
    return list(biases.items()) if isinstance(biases, dict) else biases


def _bias(value: Bias) -> float:
    if value is False:
        return -inf
    if value is True or abs(value) > MAX_BIAS:
        raise ApiError(WRONG_VALUE, "logit_bias", expected=f"a number up to {MAX_BIAS:g}, or false")
    return float(value)


def _biased_tokens(key: int | str, tokenizer: TextTokenizer) -> list[int]:
    """A number names a token; any other text stands for all tokens it is made of."""
    if isinstance(key, str):
        if len(key) > MAX_BIAS_CHARS:
            raise ApiError(TOO_LONG_TEXT, "logit_bias", limit=MAX_BIAS_CHARS, scope="each")
        number = _number(key)
        if number is None:
            return tokenizer.encode(key, add_special=False, parse_special=True)
        key = number
    if not 0 <= key < tokenizer.vocab_size:
        raise ApiError(UNKNOWN_TOKEN, "logit_bias", high=tokenizer.vocab_size - 1)
    return [key]


def _number(text: str) -> int | None:
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() else None
