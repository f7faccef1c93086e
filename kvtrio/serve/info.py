"""What the server says of itself: /props, /slots, /models, and the root."""

from typing import Any

from kvtrio import __version__
from kvtrio.core.machine import CoreStatistics
from kvtrio.core.places import PlaceView
from kvtrio.core.types import Tier
from kvtrio.serve.adapter_views import model_entries
from kvtrio.serve.adapters import Adapters
from kvtrio.serve.dialect import BUILD
from kvtrio.serve.errors import NO_MODEL, ApiError
from kvtrio.serve.served import ServedModel
from kvtrio.serve.services import ServeSettings
from kvtrio.serve.shown_settings import default_settings

PlaceSettings = dict[int, dict[str, Any]]
"""Per place, the settings of the request that runs there or was the last to."""


def root(model: ServedModel) -> dict[str, Any]:
    """GET /"""
    return {
        "name": "kvtrio",
        "version": __version__,
        "model": model.alias,
        "endpoints": ["/v1/chat/completions", "/v1/completions", "/completion", "/v1/models"],
    }


def models(model: ServedModel, settings: ServeSettings, adapters: Adapters) -> dict[str, Any]:
    """GET /v1/models: Ollama's list and OpenAI's; ``max_model_len`` is what vLLM's clients read."""
    listed = {
        "name": model.alias,
        "model": model.alias,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": model.spec.architecture,
            "families": [model.spec.architecture],
            "parameter_size": "",
            "quantization_level": model.ftype,
        },
    }
    data = {
        "id": model.alias,
        "aliases": [model.alias],
        "tags": [],
        "object": "model",
        "created": int(settings.clock()),
        "owned_by": "kvtrio",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "max_model_len": settings.n_ctx,
        "meta": {
            "vocab_type": model.vocab_type,
            "n_vocab": model.tokenizer.vocab_size,
            "n_ctx": settings.n_ctx,
            "n_ctx_train": model.spec.context_length,
            "n_embd": model.spec.hidden_size,
            "n_params": model.n_params,
            "size": model.size,
            "ftype": model.ftype,
        },
    }
    data_list = [data, *model_entries(adapters, data)]
    return {"models": [listed], "object": "list", "data": data_list}


def model_entry(
    name: str, model: ServedModel, settings: ServeSettings, adapters: Adapters
) -> dict[str, Any]:
    """GET /v1/models/NAME: the model or an adapter, as the list has it; raises ``ApiError``."""
    entries: list[dict[str, Any]] = models(model, settings, adapters)["data"]
    for entry in entries:
        if entry["id"] == name:
            return entry
    raise ApiError(NO_MODEL, "model")


def props(
    model: ServedModel, settings: ServeSettings, statistics: CoreStatistics, *, has_sessions: bool
) -> dict[str, Any]:
    """GET /props. ``has_sessions``: conversations can be saved."""
    return {
        "default_generation_settings": {
            "params": default_settings(settings.sampling),
            "n_ctx": settings.n_ctx,
        },
        "total_slots": settings.num_places,
        "model_alias": model.alias,
        "model_ftype": model.ftype,
        "model_path": model.model_path_name,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": "",
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "ui": False,
        "ui_settings": {},
        "chat_template": model.template.source,
        "chat_template_caps": model.template.caps(),
        "bos_token": model.tokenizer.bos_text,
        "eos_token": model.tokenizer.eos_text,
        "build_info": BUILD,
        "is_sleeping": False,
        "cors_proxy_enabled": False,
        "kvtrio": {
            "chat_template_name": model.template.name,
            "note": model.template_note,
            "purposes": list(settings.purposes),
            "memory": _memory(statistics),
            "disk": _disk(statistics),
            "sessions": {"enabled": has_sessions},
            "reuse": {
                "resumes_at": _resumes_at(statistics),
                "notes": list(settings.reuse_notes),
            },
        },
    }


def _resumes_at(statistics: CoreStatistics) -> str:
    """Between which tokens a request can go on from what is known of them."""
    if statistics.max_slots:
        return "checkpoints"
    return "kept_windows" if statistics.max_parts else "any_token"


def _memory(statistics: CoreStatistics) -> dict[str, dict[str, int]]:
    """How many blocks of tokens there is room for, in groups of layers that see all of them and in
    those that see a window, and how many states of recurrent layers; of each kind that there is.
    Where they share RAM, the numbers there are what each could have alone."""
    kinds = {
        "blocks": statistics.max_blocks,
        "window_blocks": statistics.max_parts,
        "states": statistics.max_slots,
    }
    shown = {
        name: {tier.value: number for tier, number in limits.items()}
        for name, limits in kinds.items()
        if limits
    }
    if statistics.max_ram_bytes:
        shown["shared_bytes"] = {Tier.HOST.value: statistics.max_ram_bytes}
    return shown


def _disk(statistics: CoreStatistics) -> dict[str, bool | int]:
    """The disk tier: bytes of its files, and how many blocks and states they are."""
    return {
        "enabled": statistics.max_disk_bytes > 0,
        "limit_bytes": statistics.max_disk_bytes,
        "used_bytes": statistics.num_disk_bytes,
        "entries": statistics.num_disk_entries,
    }


def slots(
    statistics: CoreStatistics, settings: ServeSettings, shown: PlaceSettings
) -> list[dict[str, Any]]:
    """GET /slots: counts only, never text or tokens."""
    return [_slot(view, settings, shown) for view in statistics.places]


def _slot(view: PlaceView, settings: ServeSettings, shown: PlaceSettings) -> dict[str, Any]:
    slot: dict[str, Any] = {
        "id": view.place,
        "n_ctx": settings.n_ctx,
        "speculative": False,
        "is_processing": view.is_processing,
    }
    if view.num_restored_tokens:
        return {**slot, "n_prompt_tokens": view.num_restored_tokens}
    if view.request_id is None or view.place not in shown:
        return slot
    return {**slot, **_counts(view), "params": shown[view.place]}


def _last(view: PlaceView) -> dict[str, int]:
    """What the place held last, busy or not. State itself is no place's: it is found wherever it
    is."""
    num_tokens = view.num_prompt_tokens + view.num_generated_tokens
    return {
        "n_prompt_tokens": view.num_prompt_tokens,
        "n_prompt_tokens_cache": view.num_cached_tokens,
        "n_decoded": view.num_generated_tokens,
        "n_past": min(view.num_computed_tokens, num_tokens),
    }


def _counts(view: PlaceView) -> dict[str, Any]:
    is_busy, limit = view.is_processing, view.max_new_tokens
    processed = min(view.num_computed_tokens, view.num_prompt_tokens) - view.num_cached_tokens
    decoded = view.num_generated_tokens if is_busy else 0
    return {
        "id_task": view.request_id,
        "n_prompt_tokens": view.num_prompt_tokens + view.num_generated_tokens,
        "n_prompt_tokens_processed": processed if is_busy else 0,
        "n_prompt_tokens_cache": view.num_cached_tokens if is_busy else 0,
        "kvtrio": {"last": _last(view)},
        "next_token": [
            {
                "has_next_token": is_busy,
                "has_new_line": False,
                "n_remain": limit - decoded if is_busy and limit is not None else -1,
                "n_decoded": decoded,
            }
        ],
    }
