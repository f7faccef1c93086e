"""What has to be right before the server starts: keys, sizes, the model file."""

import socket
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from attrs import evolve, frozen

from kvtrio import plugins
from kvtrio.backends.base import BackendInfo, BackendSettings
from kvtrio.cli.adapters import ReadyAdapter, read_adapters, wanted_adapters
from kvtrio.cli.backend import Chosen, backend_settings, choose_backend
from kvtrio.cli.saved_sessions import open_sessions
from kvtrio.cli.served import alias_of, read_text, served_model
from kvtrio.cli.weights import as_wanted, weights_of
from kvtrio.config import DEFAULT_CONTEXT, ConfigError, ServeConfig
from kvtrio.core.config import CoreConfig
from kvtrio.core.policy import Policy
from kvtrio.model.architectures import read_spec
from kvtrio.model.fetch import CATALOGUE, default_cache_dir, fetch
from kvtrio.model.folder import CONFIG
from kvtrio.model.model_file import ModelFile
from kvtrio.model.opening import open_model
from kvtrio.model.spec import ModelSpec
from kvtrio.serve.run import open_sockets
from kvtrio.serve.schema import MAX_NAME_CHARS
from kvtrio.serve.served import ServedModel
from kvtrio.store.sessions import SessionStore

DEFAULT_MODEL = "smollm2"
WAITING_PER_PLACE = 4
"""Of the longest requests, unless the user says otherwise."""


@frozen(kw_only=True, eq=False)
class Prepared:
    """All that the server needs, found and checked before its event loop starts."""

    config: ServeConfig
    keys: tuple[str, ...]
    policy: Policy
    backend: Chosen
    backend_settings: BackendSettings
    sockets: list[socket.socket]
    file: ModelFile
    weights: bytes
    """Digest of the model's files, and of how they are quantised on the way in, if they are."""
    spec: ModelSpec
    served: ServedModel
    adapters: tuple[ReadyAdapter, ...]
    purposes: tuple[str, ...]
    sessions: SessionStore | None
    """Where conversations are saved."""


@frozen(kw_only=True, eq=False)
class Opened:
    """A model and what goes with it, checked against each other; no weight is read yet."""

    file: ModelFile
    """As it is to be loaded."""
    spec: ModelSpec
    """For the context."""
    backend: Chosen
    settings: BackendSettings
    served: ServedModel
    adapters: tuple[ReadyAdapter, ...]


def prepare(config: ServeConfig, stack: ExitStack) -> Prepared:
    """Look at everything that can be wrong, the cheap things first; ``stack`` closes what is open.

    Raises ``ConfigError``, ``PluginError``, ``BindError``, ``FetchError``, ``ModelFileError`` or
    ``TemplateError``.
    """
    scheduling = config.scheduling
    check_given(config)
    purposes = split_purposes(config.state.purposes)
    sessions = open_sessions(config.state.slot_save_path, stack)
    keys = read_keys(config.http.api_key, config.http.api_key_file)
    policy = plugins.load(plugins.SCHEDULERS, scheduling.scheduler)()
    backend = choose_backend(config.model)
    sockets = open_sockets(config.http.host, config.http.port)
    for sock in sockets:
        stack.callback(sock.close)
    opened = open_checked(config, backend, stack)
    file, weights = weights_of(opened.file, config.model.quantize)
    stack.callback(file.close)
    return Prepared(
        config=config,
        keys=keys,
        policy=policy,
        backend=opened.backend,
        backend_settings=opened.settings,
        sockets=sockets,
        file=file,
        weights=weights,
        spec=opened.spec,
        served=opened.served,
        adapters=opened.adapters,
        purposes=purposes,
        sessions=sessions,
    )


def open_checked(config: ServeConfig, backend: Chosen, stack: ExitStack) -> Opened:
    """The model and its adapters; ``stack`` closes the files. Raises as ``prepare``."""
    path = find_model(config.name, config.model.model)
    file = as_wanted(stack.enter_context(open_model(path)), config.model.quantize)
    spec = read_spec(file)
    context = choose_context(spec.context_length, config.model.ctx_size)
    spec = spec.for_context(context)
    wanted = wanted_adapters(config.adapters, alias_of(file, config.model))
    adapters = read_adapters(wanted, spec)
    return Opened(
        file=file,
        spec=spec,
        backend=backend,
        settings=backend_settings(config, context, sum(each.data.num_bytes for each in adapters)),
        served=served_model(file, spec, config.model),
        adapters=adapters,
    )


def check_given(config: ServeConfig) -> None:
    """Refuse flags that do not go together, and empty words: an unset variable of the user's shell
    must not choose a default."""
    scheduling = config.scheduling
    if scheduling.batch_size < scheduling.parallel:
        raise ConfigError(
            f"--batch-size {scheduling.batch_size} is less than --parallel {scheduling.parallel}"
        )
    check_adapter_dir(config.adapters.lora_dir)
    words = {
        "MODEL": config.name,
        "--model": config.model.model,
        "--alias": config.model.alias,
        "--chat-template": config.model.chat_template,
        "--host": config.http.host,
    }
    for flag, word in words.items():
        if word is not None and not word.strip():
            raise ConfigError(f"{flag} is empty; is a variable of the shell not set?")


def find_model(argument: str | None, flag: str | None) -> Path:
    """Return the model's file or folder, downloaded if it is one of the catalogue's.

    A file or a model's folder of that name wins over the catalogue.
    """
    if argument is not None and flag is not None:
        raise ConfigError("the model was given twice: as MODEL and with --model")
    name = argument or flag or DEFAULT_MODEL
    path = Path(name).expanduser()
    if path.is_file() or (path / CONFIG).is_file() or (path.is_dir() and name not in CATALOGUE):
        return path
    if name in CATALOGUE:
        return fetch(name, default_cache_dir(), progress=True)
    raise ConfigError(f"no file {name!r}, and no model of that name: {', '.join(CATALOGUE)}")


def choose_context(trained: int, asked: int | None) -> int:
    """Return the longest request in tokens, at most what the model was trained for."""
    if asked is None:
        return min(trained, DEFAULT_CONTEXT)
    if asked > trained:
        raise ConfigError(f"--ctx-size {asked}: the model was made for at most {trained} tokens")
    return asked


def core_config(config: ServeConfig, info: BackendInfo, disk_bytes: int = 0) -> CoreConfig:
    """The core's limits over the memory that the backend has."""
    scheduling = config.scheduling
    longest_queue = WAITING_PER_PLACE * scheduling.parallel * info.max_context
    core = CoreConfig(
        groups=info.groups,
        block_size=info.block_size,
        num_places=scheduling.parallel,
        max_context=info.max_context,
        max_waiting=scheduling.max_waiting,
        max_waiting_tokens=scheduling.max_waiting_tokens or longest_queue,
        max_batch_tokens=scheduling.batch_size,
        max_gap_s=scheduling.max_gap_ms / 1e3,
        num_host_blocks=info.num_host_blocks,
        num_host_window_blocks=info.num_host_window_blocks,
        num_state_slots=info.num_state_slots,
        num_host_state_slots=info.num_host_state_slots,
        ram=info.ram,
        is_unified=info.is_unified,
        disk_bytes=disk_bytes,
    )
    spare = info.num_blocks - core.num_blocks
    spare_parts = info.num_window_blocks - core.num_window_blocks
    assert min(spare, spare_parts) >= 0, "core and backend count blocks alike"
    return evolve(core, num_spare_blocks=spare, num_spare_window_blocks=spare_parts)


def check_adapter_dir(folder: Path | None) -> None:
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--lora-dir {folder}: no such folder")


def split_purposes(given: Iterable[str]) -> tuple[str, ...]:
    """Raises ``ConfigError`` for a word that no request could send."""
    words = [word.strip() for part in given for word in part.split(",")]
    purposes = tuple(dict.fromkeys(word for word in words if word))
    if any(len(word) > MAX_NAME_CHARS for word in purposes):
        raise ConfigError(f"--purposes: a word has at most {MAX_NAME_CHARS} characters")
    return purposes


def read_keys(given: Iterable[str], file: Path | None) -> tuple[str, ...]:
    """All API keys: flags (each may hold several with commas) and the lines of a file."""
    given = tuple(given)
    keys = [key.strip() for part in given for key in part.split(",")]
    if given and not any(keys):
        raise ConfigError("--api-key (or KVTRIO_API_KEY) is empty; is a variable not set?")
    if file is not None:
        keys += [line.strip() for line in read_text(file, "--api-key-file").splitlines()]
        if not any(keys):
            # An empty file would leave the server open to everybody, the opposite of the wish.
            raise ConfigError("--api-key-file holds no key")
    return tuple(dict.fromkeys(key for key in keys if key))
