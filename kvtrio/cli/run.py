"""Composition: settings to a running server, and every way it can end to an exit code.

The only ``trio.run`` and the only ``except*``. Three nested owners: engine, HTTP, requests.
"""

import secrets
import string
import time
from contextlib import ExitStack
from functools import partial

import trio

from kvtrio.backends.base import BackendError
from kvtrio.cli import exits
from kvtrio.cli.announce import announce
from kvtrio.cli.logs import open_log, server_start
from kvtrio.cli.prepare import Prepared, core_config, prepare
from kvtrio.config import ConfigError, ServeConfig
from kvtrio.core.machine import Core
from kvtrio.engine.executor import open_thread_executor
from kvtrio.engine.offload import ThreadOffload
from kvtrio.engine.open import Engine, open_engine
from kvtrio.model.errors import FetchError, ModelFileError
from kvtrio.model.template import TemplateError
from kvtrio.obs.events import ServerCrash, ServerStop
from kvtrio.obs.instrument import StallWatch
from kvtrio.obs.observer import JsonObserver
from kvtrio.plugins import PluginError
from kvtrio.serve.app import create_app
from kvtrio.serve.run import BindError, HttpSettings, serve_http
from kvtrio.serve.services import ServeSettings, Services

OFFLOAD_THREADS = 2
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


def run_server(config: ServeConfig) -> int:
    """Serve until told to stop; return the exit code."""
    with ExitStack() as stack:
        return _run(config, stack)


def _run(config: ServeConfig, stack: ExitStack) -> int:
    began_s = time.perf_counter()
    code, log = exits.OK, None
    try:
        log = open_log(config.logs, stack)
        observer = JsonObserver(log)
        prepared = prepare(config, stack)
        trio.run(_serve, prepared, observer, instruments=[StallWatch(log, time.perf_counter)])
        log.emit(_stop_line(observer, time.perf_counter() - began_s))
    except* USER_ERRORS as group:
        exits.complain(exits.first_leaf(group))
        code = exits.USAGE
    except* KeyboardInterrupt:
        code = exits.INTERRUPTED
    except* Exception as group:
        exits.report_bug(group)
        if log is not None:
            error = type(exits.first_leaf(group))
            log.emit(ServerCrash(error=error, uptime_s=time.perf_counter() - began_s))
        code = exits.BUG
    return code


async def _serve(prepared: Prepared, observer: JsonObserver) -> None:
    """Load the weights on the model's own thread, then run engine and HTTP until a signal."""
    began_s = time.perf_counter()
    build = partial(prepared.backend.load, prepared.file, prepared.spec, prepared.backend_settings)
    async with open_thread_executor(build) as executor:
        load_s = time.perf_counter() - began_s
        prepared.file.close()
        core = Core(core_config(prepared.config, executor.info), prepared.policy)
        is_paranoid = prepared.config.scheduling.paranoid
        async with (
            open_engine(core, executor, observer, paranoid=is_paranoid) as engine,
            trio.open_nursery() as nursery,
        ):
            urls = await nursery.start(_serve_http, prepared, engine, name="http")
            observer.log.emit(server_start(prepared, executor.info, urls[0], load_s))
            announce(prepared, urls[0])


async def _serve_http(
    prepared: Prepared, engine: Engine, *, task_status: trio.TaskStatus[list[str]]
) -> None:
    options = prepared.config.http
    http = HttpSettings(host=options.host, port=options.port, drain_s=options.drain_s)
    app = create_app(_services(prepared, engine))
    await serve_http(app, http, engine, prepared.sockets, task_status=task_status)


def _services(prepared: Prepared, engine: Engine) -> Services:
    settings = ServeSettings(
        n_ctx=prepared.backend_settings.max_context,
        num_places=prepared.config.scheduling.parallel,
        clock=time.time,
        new_id=lambda: "".join(secrets.choice(ID_ALPHABET) for _ in range(32)),
        new_seed=lambda: secrets.randbits(32),
        api_keys=prepared.keys,
    )
    return Services(
        engine=engine,
        model=prepared.served,
        offload=ThreadOffload(OFFLOAD_THREADS),
        settings=settings,
    )


def _stop_line(observer: JsonObserver, uptime_s: float) -> ServerStop:
    return ServerStop(
        uptime_s=uptime_s,
        num_requests=observer.num_requests,
        num_steps=observer.num_steps,
        num_lost_lines=observer.log.num_lost,
    )
