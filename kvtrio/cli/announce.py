"""What a person at a terminal is told when the server is ready."""

import ipaddress
import sys
from urllib.parse import urlsplit

from kvtrio.backends.base import BackendInfo
from kvtrio.cli.prepare import Prepared
from kvtrio.cli.reuse_notes import reuse_notes
from kvtrio.core.config import widest_window

EXAMPLE = """\
kvtrio: {name} is ready at {url} (Ctrl-C stops it). Try:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
    -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'"""
OPEN_TO_ALL = (
    "kvtrio: everybody who can reach this address may use the model; --api-key asks for a key"
)
SHORT = "kvtrio: memory is short: past requests get {mib} MiB of RAM (--cache-ram asks for more)"
STATES = (
    "kvtrio: this model's layers keep a state, so requests resume from checkpoints: {device} of"
    " {mib:.1f} MiB where it runs, {host} more in RAM"
)
STATES_SHARED = (
    "kvtrio: this model's layers keep a state, so requests resume from checkpoints: {device} of"
    " {mib:.1f} MiB where it runs; in RAM they share {shared} MiB with blocks"
)
WINDOWS_SHARED = (
    "kvtrio: some of this model's layers see {window} tokens, and keep what requests see now or may"
    " see again: {device} of {all_device} blocks where it runs; in RAM they share {shared} MiB"
    " with the others"
)
WINDOWS = (
    "kvtrio: some of this model's layers see {window} tokens, and keep what requests see now or may"
    " see again: {device} of {all_device} blocks where it runs, {host} of {all_host} in RAM"
)
MEMORY = (
    "kvtrio: {name}: of {allowed} MiB weights and others take {taken}, a step {step}, state {pools}"
    " ({blocks} blocks); {adapters} are left for adapters"
)
MIB = 1 << 20


def announce(prepared: Prepared, info: BackendInfo, url: str) -> None:
    """Print on stderr, if a person reads it, the address and an example; to all, what keeps state
    from being reused."""
    num_places = prepared.config.scheduling.parallel
    for note in reuse_notes(info, num_places):
        print(f"kvtrio: {note}", file=sys.stderr)
    if not sys.stderr.isatty():
        return
    if prepared.served.template_note:
        print(f"kvtrio: {prepared.served.template_note}", file=sys.stderr)
    if info.host_is_short:
        print(SHORT.format(mib=host_bytes(info) // MIB), file=sys.stderr)
    for line in memory_lines(info):
        print(line, file=sys.stderr)
    if split := state_split(info, num_places):
        print(split, file=sys.stderr)
    key = " -H 'Authorization: Bearer YOUR_KEY'" if prepared.keys else ""
    print(EXAMPLE.format(name=prepared.served.alias, url=url, key=key), file=sys.stderr)
    if not prepared.keys and not is_local(urlsplit(url).hostname or ""):
        print(OPEN_TO_ALL, file=sys.stderr)


def memory_lines(info: BackendInfo) -> list[str]:
    """Where the memory of each device goes that was measured."""
    return [
        MEMORY.format(
            name=each.name,
            allowed=each.allowed_bytes // MIB,
            taken=each.taken_bytes // MIB,
            step=each.step_bytes // MIB,
            pools=each.pool_bytes // MIB,
            blocks=info.num_blocks,
            adapters=each.adapter_bytes // MIB,
        )
        for each in info.memory
    ]


def state_split(info: BackendInfo, num_places: int) -> str | None:
    """How memory is split for a model with recurrent layers or sliding windows."""
    bytes_per_state = sum(group.bytes_per_state for group in info.groups)
    if not bytes_per_state:
        return window_split(info)
    device, host = info.num_state_slots - num_places, info.num_host_state_slots
    if info.ram is not None:
        shared = info.ram.num_bytes // MIB
        return STATES_SHARED.format(device=device, mib=bytes_per_state / MIB, shared=shared)
    return STATES.format(device=device, mib=bytes_per_state / MIB, host=host)


def window_split(info: BackendInfo) -> str | None:
    """The same where windows are shorter than requests, and there are no recurrent layers."""
    window = widest_window(info.groups)
    if not window:
        return None
    device = {
        "window": window,
        "device": info.num_window_blocks,
        "all_device": info.num_blocks,
    }
    if info.ram is not None:
        return WINDOWS_SHARED.format(shared=info.ram.num_bytes // MIB, **device)
    return WINDOWS.format(host=info.num_host_window_blocks, all_host=info.num_host_blocks, **device)


def host_bytes(info: BackendInfo) -> int:
    """RAM that the state of past requests may take."""
    if info.ram is not None:
        return info.ram.num_bytes
    return sum(
        info.places(i)[1] * (group.bytes_per_token * info.block_size + group.bytes_per_state)
        for i, group in enumerate(info.groups)
    )


def is_local(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
