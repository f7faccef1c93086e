"""``generation_settings``: a request's effective settings as llama-server shows them."""

from typing import Any

from kvtrio.core.sampling import SamplingParams
from kvtrio.serve.job import Job
from kvtrio.serve.sampling import RANDOM_SEEDS

SAMPLERS = ["penalties", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "temperature"]
ABSENT: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "speculative.types": "none",
    "post_sampling_probs": False,
    "backend_sampling": False,
}
"""Settings of llama-server's that this server does not have, at the values that mean "off"."""


def short_settings(job: Job) -> dict[str, Any]:
    """Return the settings without the caller's texts, as /slots and /props show them."""
    limit = -1 if job.max_new_tokens is None else job.max_new_tokens
    return {
        "seed": job.sampling.seed if job.is_seeded else RANDOM_SEEDS[1],
        **sampling_settings(job.sampling),
        "max_tokens": limit,
        "n_predict": limit,
        "ignore_eos": job.ignore_eos,
        "stream": job.wants.stream,
        "n_probs": job.sampling.num_logprobs or 0,
        "timings_per_token": job.wants.timings_per_token,
        "lora": job.selection.shown,
    }


def full_settings(job: Job) -> dict[str, Any]:
    """Return the settings as the final object of /completion shows them."""
    return {
        **short_settings(job),
        "stop": list(job.stops),
        "logit_bias": [{"bias": bias, "token": token} for token, bias in job.sampling.logit_bias],
        "dry_sequence_breakers": ["\n", ":", '"', "*"],
        "grammar": "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
    }


def default_settings(sampling: SamplingParams) -> dict[str, Any]:
    """Return what a request gets that says nothing, as /props shows it."""
    return {
        "seed": RANDOM_SEEDS[1],
        **sampling_settings(sampling),
        "max_tokens": -1,
        "n_predict": -1,
        "ignore_eos": False,
        "stream": True,
        "n_probs": 0,
        "timings_per_token": False,
        "lora": [],
    }


def sampling_settings(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_n_sigma": sampling.top_n_sigma,
        "typical_p": sampling.typical_p,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "samplers": SAMPLERS,
        **ABSENT,
    }
