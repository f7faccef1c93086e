"""``--lora``: what it says, and the adapters themselves, read before the server starts."""

import math
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, frozen

from kvtrio.config import AdapterSettings, ConfigError
from kvtrio.model.adapters import AdapterData, load_adapter
from kvtrio.model.spec import ModelSpec
from kvtrio.serve.adapters import MAX_ADAPTERS, AdapterInfo, is_name
from kvtrio.serve.schema import MAX_ADAPTER_NAME_CHARS, MAX_SCALE


@frozen(kw_only=True)
class WantedAdapter:
    """One ``--lora``."""

    name: str
    path: Path
    scale: float


@frozen(kw_only=True, eq=False)
class ReadyAdapter:
    """Read and checked; not in the model yet."""

    wanted: WantedAdapter
    info: AdapterInfo
    data: AdapterData


def wanted_adapters(settings: AdapterSettings, reserved: str) -> tuple[WantedAdapter, ...]:
    """All adapters of the command line, in order. Raises ``ConfigError``."""
    wanted = [parse_adapter(value) for value in settings.lora]
    names = [each.name for each in wanted]
    for name in names:
        _check_name(name)
        if names.count(name) > 1 or name == reserved:
            raise ConfigError(f"--lora: the name {name!r} is taken; give another: NAME=PATH")
    if len(wanted) > MAX_ADAPTERS:
        raise ConfigError(f"--lora: at most {MAX_ADAPTERS} adapters")
    if settings.lora_init_without_apply:
        wanted = [evolve(each, scale=0.0) for each in wanted]
    return tuple(wanted)


def _check_name(name: str) -> None:
    if len(name) > MAX_ADAPTER_NAME_CHARS or not is_name(name):
        raise ConfigError(
            f"--lora: a name has 1 to {MAX_ADAPTER_NAME_CHARS} printable characters and no comma;"
            " give another: NAME=PATH"
        )


def parse_adapter(value: str) -> WantedAdapter:
    """PATH, PATH:SCALE or NAME=PATH[:SCALE]; a path that exists is taken as it stands."""
    if Path(value).expanduser().exists():
        return _wanted("", value, 1.0)
    name, has_name, rest = value.partition("=")
    if has_name and not name:
        raise ConfigError("--lora: there is no name before the '='")
    if not has_name:
        name, rest = "", value
    path, has_scale, number = rest.rpartition(":")
    scale = _scale(number) if has_scale and not Path(rest).expanduser().exists() else None
    return _wanted(name, rest, 1.0) if scale is None else _wanted(name, path, scale)


def _wanted(name: str, path: str, scale: float) -> WantedAdapter:
    found = Path(path).expanduser()
    return WantedAdapter(name=name or found.stem, path=found, scale=scale)


def _scale(text: str) -> float | None:
    try:
        scale = float(text)
    except ValueError:
        return None  # a path with a colon in it
    if not math.isfinite(scale) or abs(scale) > MAX_SCALE:
        raise ConfigError(f"--lora: a scale lies in -{MAX_SCALE:g} .. {MAX_SCALE:g}")
    return scale


def read_adapters(wanted: Sequence[WantedAdapter], spec: ModelSpec) -> tuple[ReadyAdapter, ...]:
    """Raises ``ModelFileError``."""
    ready = []
    for each in wanted:
        data = load_adapter(each.path, spec)
        info = AdapterInfo.of(each.path.name, data)
        ready.append(ReadyAdapter(wanted=each, info=info, data=data))
    return tuple(ready)
