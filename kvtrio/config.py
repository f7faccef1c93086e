"""What a user can set, as frozen values; the flags of ``kvtrio serve`` are made from these classes.

Flag names are llama-server's where it has them.
"""

from pathlib import Path
from typing import Annotated, Literal

from attrs import frozen
from cyclopts import Group, Parameter
from cyclopts.validators import Number

from kvtrio.config_model import ModelSettings as ModelSettings

SERVER = Group("Server", sort_key=2)
SCHEDULING = Group("Scheduling", sort_key=3)
STATE = Group("State", sort_key=4)
ADAPTERS = Group("Adapters", sort_key=5)
LOGS = Group("Logs", sort_key=6)
RECORDING = Group("Recording", sort_key=7)

DEFAULT_CONTEXT = 8192
"""Longest request where neither the user nor the model sets a smaller limit, in tokens."""

Count = Number(gte=1)
MAX_MIB = 1 << 33
"""In bytes no more than all numbers of a log line can be."""
Seconds = Number(gte=0)


class ConfigError(ValueError):
    """What the user asked for cannot be had; the message is one clear line."""


@Parameter(name="*", group=SERVER)
@frozen(kw_only=True)
class HttpOptions:
    """Where the server listens, and to whom."""

    host: Annotated[str, Parameter(name="--host", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int,
        Parameter(name="--port", validator=Number(gte=0, lte=65535), help="0 takes any free port."),
    ] = 8080
    api_key: Annotated[
        tuple[str, ...],
        Parameter(
            name="--api-key",
            env_var="KVTRIO_API_KEY",
            show_default=False,
            negative="",
            help="Key that clients must send; several with commas or by repeating the flag. "
            "Other users of the machine can see flags: prefer the variable or the file.",
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None, Parameter(name="--api-key-file", help="File with one key per line.")
    ] = None
    drain_s: Annotated[
        float,
        Parameter(
            name="--drain-s",
            validator=Seconds,
            help="After SIGTERM or Ctrl-C, how long running answers may take to finish.",
        ),
    ] = 60.0


@Parameter(name="*", group=SCHEDULING)
@frozen(kw_only=True)
class SchedulingSettings:
    """How many requests run, wait and share a step, and how long a step may take."""

    parallel: Annotated[
        int,
        Parameter(
            name=["--parallel", "-np"],
            validator=Count,
            help="Requests that run at once. Each one's longest context is set aside at start.",
        ),
    ] = 4
    max_waiting: Annotated[
        int,
        Parameter(
            name="--max-waiting",
            validator=Number(gte=0),
            help="Requests that may wait; more get status 429. One user alone may fill four "
            "fifths.",
        ),
    ] = 64
    max_waiting_tokens: Annotated[
        int | None,
        Parameter(
            name="--max-waiting-tokens",
            validator=Count,
            help="Prompt tokens of all waiting requests together; more get status 429. One user "
            "alone may fill four fifths. Default: four of the longest requests for each place.",
        ),
    ] = None
    max_waiting_s: Annotated[
        float | None,
        Parameter(
            name="--max-waiting-s",
            validator=Number(gt=0),
            help="Seconds that a request may wait for its start; then, or as soon as it is clear "
            "that it cannot start by then, it gets status 503. Default: no limit.",
        ),
    ] = None
    max_gap_ms: Annotated[
        float,
        Parameter(
            name="--max-gap-ms",
            validator=Number(gt=0),
            help="Longest pause between two tokens of a streamed answer for the sake of others' "
            "prompts, in milliseconds. The scheduler fcfs does not keep it.",
        ),
    ] = 100.0
    batch_size: Annotated[
        int,
        Parameter(
            name=["--batch-size", "-b"],
            validator=Count,
            help="Most tokens computed in one step, whatever the time: a limit on memory. The "
            "size of a step follows --max-gap-ms.",
        ),
    ] = 4096
    scheduler: Annotated[
        str,
        Parameter(
            name="--scheduler",
            help="stall_free (streams go on, short prompts first), fair (users share alike), "
            "priority (classes by kvtrio.priority), fcfs (in order, without regard to time), or "
            "an installed plug-in.",
        ),
    ] = "stall_free"
    block_size: Annotated[
        int, Parameter(name="--block-size", validator=Count, show=False, help="Tokens per block.")
    ] = 16
    paranoid: Annotated[
        bool,
        Parameter(
            name="--paranoid",
            negative="",
            help="Check all bookkeeping after every event; slow, for finding bugs.",
        ),
    ] = False


@Parameter(name="*", group=STATE)
@frozen(kw_only=True)
class StateSettings:
    """What is kept between requests."""

    cache_ram: Annotated[
        int | None,
        Parameter(
            name="--cache-ram",
            validator=Number(gte=0, lte=MAX_MIB),
            help="MiB of RAM for the state of past requests; 0 keeps only what is on the device. "
            "Blocks and the checkpoints of recurrent layers share it. "
            "Default: a quarter of the machine's memory, at most 8192 and at most half of what the "
            "model leaves.",
        ),
    ] = None
    cache_disk: Annotated[
        Path | None,
        Parameter(
            name="--cache-disk",
            help="Folder for state that leaves memory; it is found again after a restart. Only one "
            "server at a time may use it.",
        ),
    ] = None
    cache_disk_size: Annotated[
        int,
        Parameter(
            name="--cache-disk-size",
            validator=Number(gte=1, lte=MAX_MIB),
            help="MiB that the files in --cache-disk may take; the least recently used ones go.",
        ),
    ] = 8192
    slot_save_path: Annotated[
        Path | None,
        Parameter(
            name="--slot-save-path",
            help="Folder for conversations that are saved by POST /slots/ID?action=save or "
            "kvtrio.save_session; without it, none can be.",
        ),
    ] = None
    recall: Annotated[
        bool,
        Parameter(
            name="--recall",
            negative="--no-recall",
            help="An answer that comes back as text keeps the token ids it was generated with.",
        ),
    ] = True
    purposes: Annotated[
        tuple[str, ...],
        Parameter(
            name="--purposes",
            negative="",
            help="Words that requests may give as kvtrio.purpose; several with commas. The log "
            "has their places in this list. title, recap and probe are not kept.",
        ),
    ] = ("chat", "title", "recap", "probe", "tool")


@Parameter(name="*", group=ADAPTERS)
@frozen(kw_only=True)
class AdapterSettings:
    """LoRA adapters."""

    lora: Annotated[
        tuple[str, ...],
        Parameter(
            name=["--lora", "--lora-scaled"],
            negative="",
            show_default=False,
            help="A GGUF adapter or a PEFT folder: PATH, PATH:SCALE or NAME=PATH[:SCALE]; by "
            "repeating the flag, several. Default: the file's name without its ending, scale 1.",
        ),
    ] = ()
    lora_init_without_apply: Annotated[
        bool,
        Parameter(
            name="--lora-init-without-apply",
            negative="",
            help="Start with all global scales at 0: only requests that ask get an adapter.",
        ),
    ] = False
    lora_dir: Annotated[
        Path | None,
        Parameter(
            name="--lora-dir",
            help="Folder from which POST /v1/load_lora_adapter may load; without it, none can.",
        ),
    ] = None


@Parameter(name="*", group=LOGS)
@frozen(kw_only=True)
class LogSettings:
    """Where the log goes. It holds numbers and no text, at every level."""

    log_file: Annotated[
        Path | None,
        Parameter(name="--log-file", help="Append log lines to this file. Default: stderr."),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Parameter(name="--log-level", help="debug adds a line for every step."),
    ] = "info"


@Parameter(name="*", group=RECORDING)
@frozen(kw_only=True)
class RecordSettings:
    """Traffic as a scenario, for ``kvtrio replay`` and ``kvtrio simulate``."""

    record: Annotated[
        Path | None,
        Parameter(
            name="--record",
            help="Record requests into this new file: when they came, how long they are, and which "
            "of their tokens are equal; no text and no token. Default: nothing is recorded.",
        ),
    ] = None
    record_limit: Annotated[
        str,
        Parameter(
            name="--record-limit",
            help="Where a recording ends: a size in MiB, a time in s, m or h, or both.",
        ),
    ] = "256MiB,1h"


@frozen(kw_only=True)
class ServeConfig:
    """Everything that ``kvtrio serve`` was told."""

    name: str | None
    """The MODEL argument."""
    model: ModelSettings
    http: HttpOptions
    scheduling: SchedulingSettings
    state: StateSettings = StateSettings()
    adapters: AdapterSettings = AdapterSettings()
    logs: LogSettings
    record: RecordSettings = RecordSettings()
