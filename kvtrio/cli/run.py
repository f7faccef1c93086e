"""Composition: settings to a running server, and every way it can end to an exit code.

The only ``trio.run`` and the only ``except*``. Three nested owners: engine, HTTP, requests.
"""

import secrets
import string
import time
from contextlib import ExitStack
from functools import partial

import trio
from attrs import evolve, frozen

from kvtrio.backends.base import BackendError, BackendInfo
from kvtrio.cli import exits
from kvtrio.cli.announce import announce
from kvtrio.cli.disk import disk_bytes, disk_of, open_disk
from kvtrio.cli.heap import keep_freed
from kvtrio.cli.identity import Secrets, key_maker, server_identity
from kvtrio.cli.interpreter import collect_garbage, collect_in_thread, tuned
from kvtrio.cli.logs import Begun, open_log, server_start
from kvtrio.cli.prepare import Prepared, core_config, prepare
from kvtrio.cli.record import Recorded, check_record, recording
from kvtrio.cli.reuse_notes import reuse_notes
from kvtrio.cli.signals import Stop, StopSignals
from kvtrio.config import ConfigError, ServeConfig
from kvtrio.core.machine import Core
from kvtrio.core.session import ServerIdentity
from kvtrio.engine.executor import ThreadExecutor, open_thread_executor
from kvtrio.engine.offload import ThreadOffload
from kvtrio.engine.open import Engine, open_engine
from kvtrio.model.answers import AnswerStore
from kvtrio.model.errors import FetchError, ModelFileError
from kvtrio.model.recall import Recall
from kvtrio.model.template import TemplateError
from kvtrio.obs.events import ServerCrash, ServerStop
from kvtrio.obs.instrument import StallWatch
from kvtrio.obs.logging import Log
from kvtrio.obs.observer import FanOut, JsonObserver
from kvtrio.obs.tally import Tally
from kvtrio.plugins import PluginError
from kvtrio.serve.adapter_loading import AdapterLoader, LoadingSettings
from kvtrio.serve.adapters import Adapters
from kvtrio.serve.app import create_app
from kvtrio.serve.errors import ApiError
from kvtrio.serve.run import BindError, HttpSettings, serve_http
from kvtrio.serve.services import ServeSettings, Services
from kvtrio.serve.sessions import Sessions
from kvtrio.store.disk import DiskStore

OFFLOAD_THREADS = 2
SETTLE_S = 20.0
"""After the last answer, for writing to disk what is only in memory."""
RECALL_BYTES = 64 << 20
"""For the texts and ids of past conversations."""
ID_ALPHABET = string.ascii_letters + string.digits

USER_ERRORS = (
    BackendError,
    BindError,
    ConfigError,
    FetchError,
    ModelFileError,
    PluginError,
    TemplateError,
)
"""Each carries one clear line; what to do about it is in the user's hands."""


def run_server(config: ServeConfig, stop: StopSignals) -> int:
    """Serve until told to stop; return the exit code."""
    with ExitStack() as stack:
        return _run(config, stack, stop)


def _run(config: ServeConfig, stack: ExitStack, stop: StopSignals) -> int:
    began_s = time.perf_counter()
    code, log = exits.OK, None
    try:
        log = open_log(config.logs, stack)
        disk = open_disk(config.state, stack)
        run_secrets = Secrets() if disk is None else Secrets.kept(disk.secret)
        observer = JsonObserver(log, key=run_secrets.sealer.log_key)
        check_record(config.record)
        stop.way = Stop.UNWIND  # a model may be downloaded
        prepared = prepare(config, stack)
        if prepared.backend.warning is not None:
            exits.complain(prepared.backend.warning)
        stop.way = Stop.LEAVE
        watch = StallWatch(log, time.perf_counter)
        sizes = [head.size for head in disk.heads()] if disk else []
        started = Started(prepared, run_secrets, disk, (len(sizes), sum(sizes)), observer)
        trio.run(_serve, started, stop, instruments=[watch])
        log.emit(_stop_line(observer, time.perf_counter() - began_s))
    except* USER_ERRORS as group:
        exits.complain(exits.first_leaf(group))
        code = exits.USAGE
    except* KeyboardInterrupt:
        code = exits.OK  # before anything was served: there is nothing to log
    except* Exception as group:
        exits.report_bug(group)
        if log is not None:
            error = type(exits.first_leaf(group))
            log.emit(ServerCrash(error=error, uptime_s=time.perf_counter() - began_s))
        code = exits.BUG
    return code


@frozen(eq=False)
class Started:
    """What there is before the weights are loaded."""

    prepared: Prepared
    secrets: Secrets
    disk: DiskStore | None
    found: tuple[int, int]
    """On disk: entries and their bytes."""
    observer: JsonObserver


async def _serve(started: Started, stop: StopSignals) -> None:
    """Load the weights on the model's own thread, then run engine and HTTP until a signal."""
    began_s, observer = time.perf_counter(), started.observer
    prepared, run_secrets = started.prepared, started.secrets
    load = prepared.backend.backend.load
    build = partial(load, prepared.file, prepared.spec, prepared.backend_settings)
    async with open_thread_executor(build) as executor:
        load_s = time.perf_counter() - began_s
        prepared.file.close()
        tally = Tally()
        core = _core(started, executor)
        is_paranoid = prepared.config.scheduling.paranoid
        both = FanOut((observer, tally))
        recorded = _recorded(prepared, executor.info, run_secrets)
        with recording(prepared.config.record, recorded, observer.log) as tap:
            async with open_engine(
                core, executor, both, paranoid=is_paranoid, tap=tap, disk=disk_of(started.disk)
            ) as engine:
                async with trio.open_nursery() as nursery:
                    services = _services(prepared, engine, run_secrets, observer.log, tally)
                    services = _with_model(services, prepared, executor.info)
                    await _load_adapters(prepared, services.loader)
                    urls = await nursery.start(_serve_http, prepared, services, name="http")
                    stop.way = Stop.IGNORE  # from here on a signal drains
                    begun = _begun(started, urls[0], load_s)
                    observer.log.emit(server_start(prepared, executor.info, begun))
                    announce(prepared, executor.info, urls[0])
                stop.way = Stop.LEAVE  # what is not on disk by now is only a miss later
                with trio.move_on_after(SETTLE_S):
                    await engine.settle()
                stop.way = Stop.IGNORE


def _begun(started: Started, url: str, load_s: float) -> Begun:
    return Begun(
        url=url,
        load_s=load_s,
        max_disk_bytes=disk_bytes(started.disk),
        num_disk_entries=started.found[0],
        num_disk_bytes=started.found[1],
        log_key=started.secrets.sealer.log_key,
    )


def _recorded(prepared: Prepared, info: BackendInfo, run_secrets: Secrets) -> Recorded:
    return Recorded(
        max_context=info.max_context,
        num_places=prepared.config.scheduling.parallel,
        purposes=prepared.purposes,
        log_key=run_secrets.sealer.log_key,
    )


def _core(started: Started, executor: ThreadExecutor[BackendInfo]) -> Core:
    prepared, disk = started.prepared, started.disk
    keys = key_maker(started.secrets.keys, _identity(prepared, executor.info))
    config = core_config(prepared.config, executor.info, disk_bytes(disk))
    core = Core(config, prepared.policy, keys)
    if disk is not None:
        core.fill_disk(disk.heads())
        for fault in disk.discarded.elements():
            started.observer.lost(fault)
    return core


def _identity(prepared: Prepared, info: BackendInfo) -> ServerIdentity:
    return server_identity(prepared.weights, prepared.spec, info, prepared.backend_settings)


async def _load_adapters(prepared: Prepared, loader: AdapterLoader) -> None:
    """Those of the command line; what does not fit ends the start."""
    try:
        for ready in prepared.adapters:
            loader.adapters.check_room(ready.wanted.name, ready.data.num_bytes)
            await loader.put(ready.wanted.name, ready.info, ready.data, ready.wanted.scale)
    except ApiError as error:
        raise ConfigError(f"--lora: {error.message}") from None


async def _serve_http(
    prepared: Prepared, services: Services, *, task_status: trio.TaskStatus[list[str]]
) -> None:
    options = prepared.config.http
    http = HttpSettings(host=options.host, port=options.port, drain_s=options.drain_s)
    app, engine = create_app(services), services.engine
    await collect_in_thread()
    state = prepared.config.state
    if state.slot_save_path is not None or state.cache_disk is not None:
        keep_freed()
    with tuned():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(services.loader.reap, name="adapter reaper")
            nursery.start_soon(collect_garbage, lambda: engine.is_idle, name="garbage")
            await serve_http(app, http, engine, prepared.sockets, task_status=task_status)
            nursery.cancel_scope.cancel()


def _services(
    prepared: Prepared, engine: Engine, run_secrets: Secrets, log: Log, tally: Tally
) -> Services:
    offload = ThreadOffload(OFFLOAD_THREADS)
    loading = LoadingSettings(
        folder=prepared.config.adapters.lora_dir,
        spec=prepared.spec,
        reserved=prepared.served.alias,
        log_key=run_secrets.sealer.log_key,
        emit=log.emit,
    )
    is_recalling, tokenizer = prepared.config.state.recall, prepared.served.tokenizer
    return Services(
        engine=engine,
        model=prepared.served,
        offload=offload,
        settings=_serve_settings(prepared, run_secrets),
        loader=AdapterLoader(Adapters(), loading, engine, offload),
        recall=Recall(tokenizer, AnswerStore(RECALL_BYTES)) if is_recalling else None,
        tally=tally,
        emit=log.emit,
    )


def _with_model(services: Services, prepared: Prepared, info: BackendInfo) -> Services:
    """What is known when the model is loaded."""
    notes = tuple(reuse_notes(info, prepared.config.scheduling.parallel))
    settings = evolve(services.settings, reuse_notes=notes)
    return evolve(services, settings=settings, sessions=_sessions(prepared, info, services))


def _sessions(prepared: Prepared, info: BackendInfo, services: Services) -> Sessions | None:
    if prepared.sessions is None:
        return None
    return Sessions(
        engine=services.engine,
        files=prepared.sessions,
        identity=_identity(prepared, info),
        adapters=services.loader.adapters,
        beside=ThreadOffload(1),
        emit=services.emit,
        sealer=services.settings.sealer,
    )


def _serve_settings(prepared: Prepared, run_secrets: Secrets) -> ServeSettings:
    return ServeSettings(
        n_ctx=prepared.backend_settings.max_context,
        num_places=prepared.config.scheduling.parallel,
        clock=time.time,
        new_id=lambda: "".join(secrets.choice(ID_ALPHABET) for _ in range(32)),
        new_seed=lambda: secrets.randbits(32),
        api_keys=prepared.keys,
        sealer=run_secrets.sealer,
        block_size=prepared.backend_settings.block_size,
        purposes=prepared.purposes,
        max_waiting_s=prepared.config.scheduling.max_waiting_s,
    )


def _stop_line(observer: JsonObserver, uptime_s: float) -> ServerStop:
    return ServerStop(
        uptime_s=uptime_s,
        num_requests=observer.num_requests,
        num_steps=observer.num_steps,
        num_lost_lines=observer.log.num_lost,
    )
