"""What ``kvtrio inspect`` finds: rows of words and numbers, from files' heads alone."""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path

from attrs import frozen

from kvtrio.backends.base import BackendError, BackendInfo, BackendSettings
from kvtrio.backends.memory import Sizing
from kvtrio.cli import exits
from kvtrio.cli.backend import MIB, backend_settings, choose_backend
from kvtrio.cli.identity import server_identity
from kvtrio.cli.prepare import choose_context
from kvtrio.cli.rows import Rows, print_rows
from kvtrio.cli.sizing import sizing_of
from kvtrio.config import (
    ConfigError,
    HttpOptions,
    LogSettings,
    ModelSettings,
    SchedulingSettings,
    ServeConfig,
    StateSettings,
)
from kvtrio.core.stored import StoreError
from kvtrio.core.types import StateClass
from kvtrio.model.adapter_config import read_peft_config
from kvtrio.model.adapter_peft import CONFIG, MAX_CONFIG_BYTES
from kvtrio.model.adapters import load_adapter
from kvtrio.model.architectures import read_spec
from kvtrio.model.digest import content_digest
from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.model_file import ModelFile
from kvtrio.model.opening import open_model
from kvtrio.model.paths import open_path
from kvtrio.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec, ModelSpec
from kvtrio.model.template import TemplateError, check_usable, load_template
from kvtrio.model.tokenizer import load_tokenizer
from kvtrio.plugins import PluginError
from kvtrio.store.manifest import read_manifest

SESSION_START = b"kvtrio session "


@frozen
class Wishes:
    """What the command line said."""

    path: Path
    model: Path | None
    num_places: int
    context: int | None


def run_inspect(wishes: Wishes, *, as_json: bool) -> int:
    """Return the exit code."""
    try:
        rows = _rows(wishes)
    except (BackendError, ConfigError, ModelFileError, PluginError, TemplateError) as error:
        exits.complain(error)
        return exits.USAGE
    except StoreError as error:
        exits.complain(f"{wishes.path}: no usable session ({error})")
        return exits.USAGE
    except OSError as error:
        exits.complain(f"{wishes.path}: {error.strerror}")
        return exits.USAGE
    print_rows(rows, as_json=as_json)
    return exits.OK


def _rows(wishes: Wishes) -> Rows:
    path = wishes.path
    if path.is_file() and _begins_with(path, SESSION_START):
        return session_rows(path, wishes)
    if (path / CONFIG).is_file() or (path.is_file() and _is_adapter(path)):
        return adapter_rows(path, wishes.model)
    with open_model(path) as file:
        return model_rows(file, wishes)


def _begins_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def _is_adapter(path: Path) -> bool:
    with open_gguf(path) as file:
        return file.metadata.get("general.type") == "adapter"


# --- models ---


def model_rows(file: ModelFile, wishes: Wishes) -> Rows:
    """Raises ModelFileError for a model that would not be served."""
    spec = read_spec(file)
    sizing, _ = _sizing(file, spec, wishes)
    return {
        "model": spec.name or file.path.name,
        "architecture": spec.architecture,
        **_sizes(spec),
        "parameters": sum(prod(tensor.shape) for tensor in file.tensors.values()),
        "weights, MiB by type": _types(file),
        **_state(spec, sizing.info),
        **_memory(sizing, wishes.num_places),
        **_template(file),
        "kernels": _kernels(sizing.info),
    }


def _sizing(file: ModelFile, spec: ModelSpec, wishes: Wishes) -> tuple[Sizing, BackendSettings]:
    config = serve_config(wishes)
    settings = backend_settings(config, choose_context(spec.context_length, wishes.context))
    chosen = choose_backend(config.model)
    sizing = sizing_of(chosen, file, spec.for_context(settings.max_context), settings)
    assert sizing is not None, "the backends that are chosen by default say what they take"
    return sizing, settings


def serve_config(wishes: Wishes) -> ServeConfig:
    """What ``kvtrio serve`` would be told, with nothing kept of past requests."""
    return ServeConfig(
        name=str(wishes.path),
        model=ModelSettings(ctx_size=wishes.context),
        http=HttpOptions(),
        scheduling=SchedulingSettings(parallel=wishes.num_places),
        state=StateSettings(cache_ram=0),
        logs=LogSettings(),
    )


def _sizes(spec: ModelSpec) -> Rows:
    mixers = Counter(type(layer.mixer).__name__.removesuffix("Spec") for layer in spec.layers)
    experts = [layer.feed_forward for layer in spec.layers]
    known = [each for each in experts if isinstance(each, ExpertsSpec)]
    mixed = [layer.mixer for layer in spec.layers]
    attention = [mixer for mixer in mixed if isinstance(mixer, AttentionSpec)]
    latent = [mixer for mixer in mixed if isinstance(mixer, LatentAttentionSpec)]
    rows: Rows = {"layers": len(spec.layers), "of them": dict(mixers)}
    if attention:
        one = attention[0]
        heads = f"{one.num_heads} heads on {one.num_kv_heads} of keys, {one.head_dim} values each"
        rows["attention"] = heads
    if latent:
        heads = f"{latent[0].num_heads} heads on one row of {latent[0].key_dim} values per token"
        rows["attention"] = heads
    if known:
        rows["experts"] = f"{known[0].num_used} of {known[0].num_experts} in {len(known)} layers"
    rows |= {
        "hidden size": spec.hidden_size,
        "vocabulary": spec.vocab_size,
        "trained for tokens": spec.context_length,
    }
    return rows


def _types(file: ModelFile) -> Mapping[str, float]:
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.ggml_type.name] += tensor.num_bytes
    return {name: round(size / MIB, 1) for name, size in sizes.most_common()}


WORDS = {
    StateClass.TOKEN: "a token",
    StateClass.WINDOW: "a token in a window",
    StateClass.POINT: "a checkpoint",
}


def _state(spec: ModelSpec, info: BackendInfo) -> Rows:
    """Bytes that are kept, by how far they reach."""
    sizes: Counter[str] = Counter()
    windows = sorted({group.window for group in info.groups if group.window})
    for group in info.groups:
        sizes[WORDS[group.state_class]] += group.bytes_per_token or group.bytes_per_state
    rows: Rows = {"state, bytes for": dict(sizes)}
    if windows:
        rows["windows, tokens"] = windows
    kept = "at any token" if spec.resumes_anywhere else "at any token whose window is kept"
    resumes = "at checkpoints" if spec.has_states else kept
    return rows | {"conversations resume": resumes}


def _memory(sizing: Sizing, num_places: int) -> Rows:
    """What ``kvtrio serve`` sets aside, without ``--cache-ram``, by its own sums."""
    needs, info = sizing.rooms[0].needs, sizing.info
    return {
        f"memory, MiB for {num_places} places of {info.max_context:,} tokens": {
            "weights": round(info.weight_bytes / MIB, 1),
            "steps and loading": round((needs.weights - info.weight_bytes) / MIB, 1),
            "state": round(needs.pools / MIB, 1),
            "sum": round((needs.weights + needs.pools) / MIB, 1),
        }
    }


def _template(file: ModelFile) -> Rows:
    tokenizer = load_tokenizer(file.metadata, cutting=file.pre_tokenizer)
    template = load_template(file.metadata, None, tokenizer.bos_text, tokenizer.eos_text)
    check_usable(template)
    able = [
        name.removeprefix("supports_").replace("_", " ")
        for name, is_there in template.caps().items()
        if is_there
    ]
    return {"chat template": template.name, "it takes": able}


def _kernels(info: BackendInfo) -> str:
    if info.num_converted:
        return f"compiled ones; {info.num_converted} matrices of other types become Q8_0"
    return "compiled ones, where this machine has them"


# --- adapters, sessions ---


def adapter_rows(path: Path, model: Path | None) -> Rows:
    """Of one with its model all that it changes; alone what its head says."""
    if model is None:
        return _head_of_adapter(path) | {"fits": "--model tells"}
    with ExitStack() as stack:
        spec = read_spec(stack.enter_context(open_model(model)))
        data = load_adapter(path, spec)
    ranks = sorted({target.a.shape[0] for target in data.targets.values()})
    kinds = Counter(name.split(".")[-2] for name in data.targets)
    return {
        "adapter": data.kind.value,
        "digest": data.digest.hex(),
        "fits": True,
        "ranks": ranks,
        "matrices": dict(kinds),
        "MiB": round(data.num_bytes / MIB, 1),
        "invoked by tokens": len(data.invocation_tokens),
    }


def _head_of_adapter(path: Path) -> Rows:
    if path.is_dir():
        with open_path(path) as folder, folder.child(CONFIG) as child:
            config = read_peft_config(bytes(child.read(MAX_CONFIG_BYTES)))
        return {"adapter": "peft", "rank": config.rank, "alpha": config.alpha}
    with open_gguf(path) as file:
        return {
            "adapter": "gguf",
            "architecture": str(file.metadata.get("general.architecture", "")),
            "matrices": len(file.tensors) // 2,
            "MiB": round(file.tensor_bytes / MIB, 1),
        }


def session_rows(path: Path, wishes: Wishes) -> Rows:
    """With its model also whether a server with the flags' defaults here takes it. Raises
    StoreError."""
    with path.open("rb") as file:
        manifest = read_manifest(file.read)
    info = manifest.info(path.name)
    rows: Rows = {
        "session": path.name,
        "tokens": info.num_tokens,
        "checkpoints": info.num_states,
        "MiB": round(info.num_bytes / MIB, 1),
        "complete": manifest.is_complete,
        "model": manifest.identity.model.hex(),
    }
    if wishes.model is None:
        return rows | {"fits": "--model tells"}
    with open_model(wishes.model) as model:
        spec = read_spec(model)
        sizing, settings = _sizing(model, spec, wishes)
        spec = spec.for_context(settings.max_context)
        weights = content_digest(model.part_paths)
    own = server_identity(weights, spec, sizing.info, settings)
    return rows | {
        "same model": manifest.identity.model == own.model,
        "same types and kernels": manifest.identity.format == own.format,
    }
