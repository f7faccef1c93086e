"""What steps cost: files, logs, and the model that knows."""

import io
import json
from random import Random

import pytest

from kvtrio.core.cost import NAMES, Load
from kvtrio.obs.events import SchedCost
from kvtrio.obs.logging import Clock, Log
from kvtrio.replay.machines import (
    SHIPPED,
    KnownCost,
    MachineError,
    calibrate,
    describe,
    named,
    parse,
)

MACHINE = SHIPPED["two-cores"]


def a_log(num_lines: int, noise: float = 0.0) -> list[bytes]:
    """Cost lines of a server on ``MACHINE``, and steps that took as long as predicted, or not."""
    file = io.BytesIO()
    log = Log(file, Clock(monotonic_ns=lambda: 0, wall_s=lambda: 0.0))
    per_unit = dict(zip((f"{name}_s" for name in NAMES), MACHINE.coefficients, strict=True))
    for number in range(num_lines):
        doubled = {
            name: value * (2 if number < num_lines - 1 else 1) for name, value in per_unit.items()
        }
        log.emit(SchedCost(num_observed=1000 * (number + 1), margin=1.25, **doubled))
    step = {"event": "sched.step", "predicted_s": 0.125, "duration_s": 0.1 * (1 + noise)}
    return [*file.getvalue().splitlines(), json.dumps(step, separators=(",", ":")).encode()]


def test_a_log_says_what_steps_cost():
    """The last cost line counts; steps behind it tell how far off it is."""
    found = calibrate([b"no json", *a_log(3)])
    assert found.machine.coefficients == pytest.approx(MACHINE.coefficients)
    assert (found.num_observed, found.num_compared, found.error) == (3000, 1, pytest.approx(0.0))
    assert calibrate(a_log(1, noise=1.0)).error == pytest.approx(0.5)


def test_a_log_of_a_server_that_did_little_says_nothing():
    """One line says what is missing."""
    with pytest.raises(MachineError, match=r"no sched\.cost line"):
        calibrate([b'{"event":"server.start"}'])


def test_what_is_written_is_read(tmp_path):
    """A calibration's file is a machine, by its path."""
    path = tmp_path / "machine.json"
    path.write_bytes(describe(MACHINE, 7))
    assert named(str(path)) == MACHINE
    assert named("two-cores") is MACHINE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        describe(MACHINE, 1).replace(b"/1", b"/2"),
        describe(MACHINE, 1).replace(b"0.0021", b"-1"),
        describe(MACHINE, 1).replace(b"0.0021", b"1e9"),
    ],
)
def test_other_files_are_refused(data):
    """One line with the file's name."""
    with pytest.raises(MachineError, match=r"^file: "):
        parse(data, "file")


def test_an_unknown_machine_is_refused():
    """The line lists those there are."""
    with pytest.raises(MachineError, match="one of two-cores, h100-like"):
        named("/no/such/machine")


def test_a_known_machine_is_predicted_as_it_is():
    """Without margin, and without learning from what it sees."""
    cost, rng = KnownCost(MACHINE), Random(1)
    for _ in range(20):
        rows = rng.randrange(5)
        load = Load(num_decode_rows=rows, decode_context=100.0 * rows).plus_chunk(0, 30)
        cost.observe(load, 9.0)
        assert cost.predict(load) == MACHINE.seconds(load)
    assert (cost.num_observed, cost.margin) == (20, 1.0)
    expected = sum(c * f for c, f in zip(MACHINE.coefficients, load.features(), strict=True))
    assert MACHINE.seconds(load) == pytest.approx(expected)
