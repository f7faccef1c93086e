"""What steps cost on a machine: shipped, or measured by a server and read from its log.

Seconds are a sum over what a step does, as the server's own cost model has it (``core.cost``).
"""

import json
from collections.abc import Iterable
from pathlib import Path

import attrs
import msgspec
from attrs import frozen

from kvtrio.core.cost import NAMES, CostModel, Load

SCHEMA = "kvtrio.machine/1"
MAX_FILE_BYTES = 1 << 20
LEAST_S = 1e-9
"""Time goes on, whatever a file says."""


class MachineError(ValueError):
    """A file describes no machine; the message is one clear line."""


@frozen(kw_only=True)
class StepSeconds:
    """Seconds per unit of each thing that a step does."""

    base: float
    prefill_token: float
    prefill_context: float
    """Per token of prefill and position that it attends to."""
    decode_row: float
    decode_context: float
    """Per row and position that it attends to."""
    adapter: float
    prefill_chunk: float
    """Per request whose prompt is read, beside its tokens."""

    @property
    def coefficients(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in NAMES)

    def seconds(self, load: Load) -> float:
        """What a step takes."""
        return (
            self.base
            + self.prefill_token * load.num_prefill_tokens
            + self.prefill_context * load.prefill_context
            + self.decode_row * load.num_decode_rows
            + self.decode_context * load.decode_context
            + self.adapter * load.num_adapters
            + self.prefill_chunk * load.num_prefill_chunks
            + LEAST_S
        )


# Of a model of 135M parameters on two Zen 5 cores, as `kvtrio calibrate` read it from a log; and,
# estimated and not measured, of one of 8B on an accelerator with 3.3 TB/s and 800 TFLOP/s at three
# quarters of either: 4.8 GB of weights and 130 kB of state a token.
SHIPPED = {
    "two-cores": StepSeconds(
        base=0.0021,
        prefill_token=0.00027,
        prefill_context=4.5e-8,
        decode_row=0.00032,
        decode_context=6.5e-7,
        adapter=0.0005,
        prefill_chunk=0.0005,
    ),
    "h100-like": StepSeconds(
        base=0.006,
        prefill_token=0.00003,
        prefill_context=2e-10,
        decode_row=0.00002,
        decode_context=5e-8,
        adapter=0.0003,
        prefill_chunk=0.0001,
    ),
}


class KnownCost(CostModel):
    """The cost model of a server that has run on its machine for long: it knows and does not learn.

    Learning takes longer than all else in a simulated step.
    """

    def __init__(self, machine: StepSeconds) -> None:
        super().__init__(prior=machine.coefficients)
        self._machine = machine

    def observe(self, load: Load, seconds: float) -> None:
        """What policies ask for beside the cost."""
        self.num_observed += 1
        self.most_rows = max(self.most_rows, load.num_decode_rows)
        self.most_adapters = max(self.most_adapters, min(load.num_adapters, load.num_decode_rows))

    def expect(self, load: Load) -> float:
        return self._machine.seconds(load)


def named(name: str) -> StepSeconds:
    """One of ``SHIPPED``, or from a file. Raises ``MachineError``."""
    if name in SHIPPED:
        return SHIPPED[name]
    try:
        data = Path(name).read_bytes()[: MAX_FILE_BYTES + 1]
    except OSError:
        shipped = ", ".join(SHIPPED)
        raise MachineError(f"{name} is neither a file nor one of {shipped}") from None
    return parse(data, name)


def parse(data: bytes, name: str) -> StepSeconds:
    """What ``describe`` wrote. Raises ``MachineError``."""
    try:
        numbers = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise MachineError(f"{name}: not a {SCHEMA} file") from None
    machine = StepSeconds(**{each: getattr(numbers, each) for each in NAMES})
    if not 0.0 <= min(machine.coefficients) <= max(machine.coefficients) < 1e6:
        raise MachineError(f"{name}: a cost is negative or not finite")
    return machine


class _File(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    base: float
    prefill_token: float
    prefill_context: float
    decode_row: float
    decode_context: float
    adapter: float
    prefill_chunk: float
    num_observed: int = 0

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError("another schema")


def describe(machine: StepSeconds, num_observed: int) -> bytes:
    """A file for ``parse``."""
    data = {"schema": SCHEMA, **attrs.asdict(machine), "num_observed": num_observed}
    return json.dumps(data, indent=1).encode() + b"\n"


@frozen(kw_only=True)
class Calibration:
    """What logs say about their machine."""

    machine: StepSeconds
    num_observed: int
    """Steps it was fitted to."""
    num_compared: int
    """Steps of the log whose time it was compared with."""
    error: float
    """Median of how far off, of what was measured."""


class _Line(msgspec.Struct):
    event: str = ""
    num_observed: int = 0
    margin: float = 1.0
    base_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_context_s: float = 0.0
    decode_row_s: float = 0.0
    decode_context_s: float = 0.0
    adapter_s: float = 0.0
    prefill_chunk_s: float = 0.0
    duration_s: float = 0.0
    predicted_s: float = 0.0


def calibrate(lines: Iterable[bytes]) -> Calibration:
    """From the lines of a server's log: the last ``sched.cost``, and how far off its predictions of
    the steps in the log were. Raises ``MachineError`` if there is no such line."""
    decode = msgspec.json.Decoder(_Line).decode
    last: _Line | None = None
    off: list[float] = []
    for raw in lines:
        if b'"sched.' not in raw:
            continue
        try:
            line = decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if line.event == "sched.cost":
            last = line
        elif line.event == "sched.step" and line.duration_s > 0.0 and last is not None:
            off.append(abs(line.predicted_s / last.margin - line.duration_s) / line.duration_s)
    if last is None:
        raise MachineError("no sched.cost line: the log of a server that computed 1,000 steps has")
    machine = StepSeconds(**{name: max(0.0, getattr(last, f"{name}_s")) for name in NAMES})
    return Calibration(
        machine=machine,
        num_observed=last.num_observed,
        num_compared=len(off),
        error=sorted(off)[len(off) // 2] if off else 0.0,
    )
