"""Numbers of an answer: ``timings``, ``usage``, ``prompt_progress``, and why it ended."""

from typing import Any

from kvtrio.core.types import FinishReason
from kvtrio.serve.choice import Choice, Prefill
from kvtrio.serve.generation import Generation


def timings(choice: Choice) -> dict[str, int | float]:
    """llama-server's ``timings``; ``cache_n + prompt_n`` is the prompt's length once it is done.

    The clock starts when the request leaves the queue. Never infinite or NaN.
    """
    prompt_s, predicted_s = _times(choice)
    prompt_n = choice.num_processed_tokens - choice.num_cached_tokens
    predicted_n = choice.num_generated_tokens
    # The first token comes with the prompt: n tokens are n - 1 decode steps.
    num_steps = max(predicted_n - 1, 0)
    return {
        "cache_n": choice.num_cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_s * 1e3,
        "prompt_per_token_ms": _ratio(prompt_s * 1e3, prompt_n),
        "prompt_per_second": _ratio(prompt_n, prompt_s),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_s * 1e3,
        "predicted_per_token_ms": _ratio(predicted_s * 1e3, num_steps),
        "predicted_per_second": _ratio(num_steps, predicted_s),
    }


def _times(choice: Choice) -> tuple[float, float]:
    """Seconds of prefill and decode: the core's account, or so far as can be seen from here."""
    if choice.finished is not None:
        return choice.finished.prefill_s, choice.finished.decode_s
    started = choice.now_s if choice.started_s is None else choice.started_s
    first = choice.now_s if choice.first_token_s is None else choice.first_token_s
    return first - started, choice.now_s - first


def _ratio(number: float, divisor: float) -> float:
    return number / divisor if divisor > 0 else 0.0


def usage(generation: Generation) -> dict[str, Any]:
    """OpenAI's ``usage``: every prompt counts once, every answer's tokens count."""
    firsts = [choice for choice in generation.in_order if choice.index % generation.job.n == 0]
    prompt = sum(choice.num_prompt_tokens for choice in firsts)
    completion = sum(choice.num_generated_tokens for choice in generation.in_order)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.num_cached_tokens for choice in firsts)
        },
    }


def prompt_progress(delta: Prefill) -> dict[str, int | float]:
    """llama-server's ``prompt_progress``: ``processed`` starts at ``cache``, ends at ``total``."""
    return {
        "total": delta.choice.num_prompt_tokens,
        "cache": delta.choice.num_cached_tokens,
        "processed": delta.num_processed_tokens,
        "time_ms": delta.time_s * 1e3,
    }


def finish_reason(choice: Choice) -> str:
    """OpenAI's word."""
    return "length" if stop_type(choice) == "limit" else "stop"


def stop_type(choice: Choice) -> str:
    """llama-server's word."""
    finished = choice.finished
    if finished is None:
        return "none"
    if choice.is_silent or finished.reason is FinishReason.LENGTH:
        return "limit"
    return "word" if finished.stopped_by_text else "eos"


def is_truncated(choice: Choice, n_ctx: int) -> bool:
    """The context was full before the answer was done."""
    is_full = choice.num_prompt_tokens + choice.num_generated_tokens >= n_ctx
    return is_full and stop_type(choice) == "limit" and not choice.is_silent
