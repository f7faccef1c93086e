"""What the server says of its adapters: /lora-adapters, /v1/models, /metrics."""

from collections import Counter
from typing import Any

from kvtrio.obs.families import AdapterLabels
from kvtrio.serve.adapter_loading import AdapterLoader, content_digest
from kvtrio.serve.adapters import Adapter, Adapters
from kvtrio.serve.served import TextTokenizer


def lora_adapters(loader: AdapterLoader, tokenizer: TextTokenizer) -> list[dict[str, Any]]:
    """GET /lora-adapters: llama-server's members and ours."""
    return [lora_adapter(adapter, loader, tokenizer) for adapter in loader.adapters.all]


def lora_adapter(
    adapter: Adapter, loader: AdapterLoader, tokenizer: TextTokenizer
) -> dict[str, Any]:
    info, tokens = adapter.info, adapter.info.invocation_tokens
    shown = {
        "id": adapter.id,
        "path": info.path_name,
        "scale": loader.adapters.scales[adapter.id],
        "task_name": info.task_name,
        "prompt_prefix": info.prompt_prefix,
        "name": adapter.name,
        "digest": info.digest.hex(),
        "log_digest": str(content_digest(adapter, loader.settings.log_key)),
        "kind": info.kind.value,
    }
    if tokens:
        shown["alora_invocation_string"] = tokenizer.decode(tokens)
        shown["alora_invocation_tokens"] = list(tokens)
    return shown


def model_entries(adapters: Adapters, base: dict[str, Any]) -> list[dict[str, Any]]:
    """Adapters as models of their own, as vLLM lists them; ``base``: the model's own entry."""
    return [
        {**base, "id": each.name, "aliases": [each.name], "parent": base["id"]}
        for each in adapters.all
    ]


def metric_labels(adapters: Adapters) -> tuple[AdapterLabels, ...]:
    running, waiting = Counter[int](), Counter[int]()
    for lease in adapters.leases:
        handles = [adapter.handle for adapter, _ in lease.selection.chosen]
        (running if lease.is_running else waiting).update(handles)
    return tuple(
        AdapterLabels(
            name=each.name,
            digest=each.info.digest.hex(),
            num_running=running[each.handle],
            num_waiting=waiting[each.handle],
        )
        for each in adapters.all
    )
