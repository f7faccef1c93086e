"""Flags that decide what is kept: adapters, RAM, purposes; and what state is known by."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from attrs import evolve
from model.adapter_builder import gguf_adapter, random_pairs, tiny_spec

from harness.serving import served_model
from kvtrio.backends.base import BackendInfo, BackendSettings, DeviceMemory
from kvtrio.cli import exits, main
from kvtrio.cli.adapters import parse_adapter, read_adapters, wanted_adapters
from kvtrio.cli.announce import host_bytes, memory_lines, state_split
from kvtrio.cli.backend import backend_settings, default_cache_ram
from kvtrio.cli.identity import key_maker, server_identity
from kvtrio.cli.prepare import core_config, split_purposes
from kvtrio.cli.reuse_notes import reuse_notes
from kvtrio.cli.saved_sessions import open_sessions
from kvtrio.config import (
    AdapterSettings,
    ConfigError,
    HttpOptions,
    LogSettings,
    ModelSettings,
    SchedulingSettings,
    ServeConfig,
    StateSettings,
)
from kvtrio.core.config import Group, RamBudget
from kvtrio.core.types import StateClass
from kvtrio.model.errors import ModelFileError

MIB = 1 << 20
GROUPS = (Group(StateClass.TOKEN, None, 64),)


def serve_config(**state: object) -> ServeConfig:
    return ServeConfig(
        name=None,
        model=ModelSettings(),
        http=HttpOptions(),
        scheduling=SchedulingSettings(parallel=2),
        state=StateSettings(**state),  # type: ignore[arg-type]
        adapters=AdapterSettings(),
        logs=LogSettings(),
    )


def info(settings: BackendSettings, num_host_blocks: int = 0) -> BackendInfo:
    return BackendInfo(
        name="sim",
        groups=GROUPS,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        num_host_blocks=num_host_blocks,
        vocab_size=10,
        max_context=settings.max_context,
        pool_bytes=0,
        weight_bytes=0,
    )


@pytest.mark.parametrize(
    "flag",
    [
        "--cache-ram",
        "--cache-disk-size",
        "--no-recall",
        "--purposes",
        "--slot-save-path",
        "--lora",
        "--lora-dir",
        "--gpu-memory-fraction",
        "--tensor-split",
        "--no-cuda-graphs",
    ],
)
def test_serve_help_explains_the_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is in the help."""
    assert main(["serve", "--help"]) == 0
    assert flag in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag", ["--cache-disk-size", "--cache-ram", "--ctx-size", "--parallel", "--threads", "--port"]
)
@pytest.mark.parametrize("value", ["1.5", "2.0", "1e3", "0x10", "1_0", "-1", "x", "", "9" * 20])
def test_whole_numbers_are_whole(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is rounded and nothing is read in two ways: one line, and the exit code of misuse."""
    assert main(["serve", f"{flag}={value}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--cache-disk-size", "--cache-ram"])
def test_sizes_fit_into_numbers_of_the_log(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight pebibytes are too many."""
    assert main(["serve", f"{flag}={(1 << 33) + 1}"]) == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--max-gap-ms", "--max-waiting-s", "--drain-s"])
@pytest.mark.parametrize("value", ["inf", "nan", "-1"])
def test_times_are_finite(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit that never comes is none: leaving the flag out says that."""
    assert main(["serve", f"{flag}={value}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_queue_is_bounded_by_default() -> None:
    """Four of the longest requests for each place, and what the user says if it is said."""
    config = serve_config()
    memory = info(backend_settings(config, 1000))
    core = core_config(config, memory)
    assert (core.max_waiting_tokens, core.max_gap_s) == (4 * 2 * 1000, 0.1)
    scheduling = evolve(config.scheduling, max_waiting_tokens=77, max_gap_ms=30.0)
    core = core_config(evolve(config, scheduling=scheduling), memory)
    assert (core.max_waiting_tokens, core.max_gap_s) == (77, 0.03)


@pytest.mark.parametrize(
    ("value", "name", "path", "scale"),
    [
        ("dir/one.gguf", "one", "dir/one.gguf", 1.0),
        ("dir/one.gguf:0.5", "one", "dir/one.gguf", 0.5),
        ("mine=dir/one.gguf", "mine", "dir/one.gguf", 1.0),
        ("mine=dir/one.gguf:-2", "mine", "dir/one.gguf", -2.0),
        ("dir/odd:name", "odd:name", "dir/odd:name", 1.0),
        ("folder", "folder", "folder", 1.0),
    ],
)
def test_what_lora_says(value: str, name: str, path: str, scale: float) -> None:
    """PATH, PATH:SCALE, NAME=PATH, NAME=PATH:SCALE."""
    wanted = parse_adapter(value)
    assert (wanted.name, wanted.path, wanted.scale) == (name, Path(path), scale)


@pytest.mark.parametrize("name", ["a=b.gguf", "a:0.5", "x=y:1"])
def test_a_path_that_exists_is_taken_as_it_stands(tmp_path: Path, name: str) -> None:
    """Whatever signs are in it."""
    (tmp_path / name).write_bytes(b"x")
    wanted = parse_adapter(str(tmp_path / name))
    assert (wanted.path, wanted.scale) == (tmp_path / name, 1.0)


def test_init_without_apply_starts_at_zero() -> None:
    """The scales that were given too: llama-server's fault is that it has no effect."""
    settings = AdapterSettings(lora=("a.gguf", "b.gguf:0.5"), lora_init_without_apply=True)
    assert [each.scale for each in wanted_adapters(settings, "model")] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        (("a.gguf", "x/a.gguf"), "'a' is taken"),
        (("model=a.gguf",), "'model' is taken"),
        (("a.gguf:inf",), "scale"),
        (("a.gguf:1e9",), "scale"),
        (("x" * 129 + "=a.gguf",), "128"),
        (("=a.gguf",), "no name"),
        (("=",), "no name"),
        (("a,b=a.gguf",), "comma"),
        (("a,b.gguf",), "NAME=PATH"),
        (("a\nb=a.gguf",), "printable"),
        (("a\x1b[2J=a.gguf",), "printable"),
        (("a\u202eb=a.gguf",), "printable"),
        (("\udc80.gguf",), "printable"),
        (tuple(f"{number}=a.gguf" for number in range(65)), "at most"),
    ],
)
def test_adapters_that_cannot_be(lora: tuple[str, ...], reason: str) -> None:
    """One clear line for each mistake."""
    with pytest.raises(ConfigError, match=reason) as caught:
        wanted_adapters(AdapterSettings(lora=lora), "model")
    assert str(caught.value).isprintable()


def test_names_of_adapters_may_be_long_and_foreign() -> None:
    """All that can be printed, but for commas."""
    names = ("x" * 128, "m\u00fcller's fox; 2", "\u4f60\u597d")
    settings = AdapterSettings(lora=tuple(f"{name}=a.gguf" for name in names))
    assert tuple(each.name for each in wanted_adapters(settings, "model")) == names


def test_adapters_are_read_in_order(tmp_path: Path) -> None:
    """With what is shown of them; a bad one ends the start."""
    spec = tiny_spec(tmp_path)
    (tmp_path / "a.gguf").write_bytes(gguf_adapter(random_pairs(spec)))
    settings = AdapterSettings(lora=(str(tmp_path / "a.gguf"), f"b={tmp_path}/a.gguf:0.5"))
    first, second = read_adapters(wanted_adapters(settings, "model"), spec)
    assert (first.wanted.name, first.info.path_name) == ("a", "a.gguf")
    assert (second.wanted.name, second.wanted.scale) == ("b", 0.5)
    assert first.info.digest == second.info.digest
    with pytest.raises(ModelFileError):
        read_adapters([parse_adapter(str(tmp_path / "none.gguf"))], spec)


def test_core_and_backend_agree_on_sizes() -> None:
    """One block more for each place, to copy from, and the RAM that was asked for."""
    config = serve_config(cache_ram=3)
    settings = backend_settings(config, 100)
    assert settings.num_blocks == 2 * (7 + 1)
    assert settings.host_bytes == 3 * MIB
    core = core_config(config, info(settings, 5))
    assert (core.num_blocks, core.num_host_blocks) == (16, 5)
    assert backend_settings(serve_config(cache_ram=0), 100).host_bytes == 0


def test_the_default_is_a_quarter_of_memory() -> None:
    """At most 8 GiB."""
    assert 0 < default_cache_ram() <= 8192
    settings = backend_settings(serve_config(), 100)
    assert (settings.host_bytes, settings.host_may_shrink) == (default_cache_ram() * MIB, True)
    assert not backend_settings(serve_config(cache_ram=1), 100).host_may_shrink


def test_the_split_of_memory_is_announced_for_recurrent_layers() -> None:
    """How many checkpoints there are, where it runs and in RAM; else nothing."""
    plain = info(backend_settings(serve_config(), 100))
    assert state_split(plain, 2) is None
    note = state_split(recurrent(50), 2)
    assert note is not None
    assert "2 of 3.0 MiB" in note
    assert "50 more in RAM" in note


def test_a_shared_budget_is_announced_instead() -> None:
    """What all kinds share in RAM, in MiB, and no number of any kind there."""
    ram = RamBudget(num_bytes=70 * MIB, block_bytes=1024, state_bytes=3 * MIB)
    shared = evolve(recurrent(50), ram=ram)
    note = state_split(shared, 2)
    assert note is not None
    assert "in RAM they share 70 MiB" in note
    assert "50" not in note
    windows = evolve(
        info(backend_settings(serve_config(), 100)),
        groups=(Group(StateClass.WINDOW, 16, 64), *GROUPS),
        num_window_blocks=9,
        ram=ram,
    )
    note = state_split(windows, 2)
    assert note is not None
    assert "they share 70 MiB" in note
    assert host_bytes(shared) == host_bytes(windows) == 70 * MIB


def recurrent(num_slots: int) -> BackendInfo:
    """Two places, and so many checkpoints in RAM."""
    plain = info(backend_settings(serve_config(), 100), num_host_blocks=10)
    groups = (Group(StateClass.POINT, None, 0, 3 * MIB), *GROUPS)
    return evolve(plain, groups=groups, num_state_slots=4, num_host_state_slots=num_slots)


def test_what_keeps_state_from_being_reused_is_said() -> None:
    """Too few checkpoints, blocks too large to resume within, no RAM; mostly nothing."""
    plain = info(backend_settings(serve_config(), 100), num_host_blocks=10)
    assert reuse_notes(plain, 2) == []
    assert reuse_notes(evolve(plain, block_size=1024), 2) == []
    assert reuse_notes(recurrent(50), 2) == []
    (note,) = reuse_notes(recurrent(5), 2)
    assert "7 checkpoints are few for 2 places" in note
    (note,) = reuse_notes(evolve(recurrent(50), block_size=1024), 2)
    assert "multiples of 1024 tokens" in note
    (note,) = reuse_notes(evolve(plain, num_host_blocks=0), 2)
    assert "no RAM" in note


def test_memory_of_windows_is_announced() -> None:
    """How many blocks layers with a window have, of those that the others have."""
    groups = (Group(StateClass.WINDOW, 64, 1), Group(StateClass.TOKEN, None, 1))
    facts = evolve(
        info(backend_settings(serve_config(), 100), 90),
        groups=groups,
        num_window_blocks=12,
        num_host_window_blocks=30,
    )
    note = state_split(facts, 2)
    assert note is not None
    assert "see 64 tokens" in note
    assert f"12 of {facts.num_blocks} blocks where it runs, 30 of 90 in RAM" in note


def test_slots_follow_places() -> None:
    """The running state and a checkpoint for each; the core gets what the backend has."""
    config = serve_config()
    settings = backend_settings(config, 100)
    assert settings.num_state_slots == 4
    memory = evolve(info(settings), num_state_slots=4, num_host_state_slots=9)
    core = core_config(config, memory)
    assert (core.num_state_slots, core.num_host_state_slots) == (4, 9)


def test_purposes() -> None:
    """With commas or by repeating the flag; each once; none is fine."""
    assert split_purposes(["a, b,,a", "c"]) == ("a", "b", "c")
    assert split_purposes([""]) == ()
    with pytest.raises(ConfigError, match="64"):
        split_purposes(["x" * 65])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cache-ram", "-1"], ">= 0"),
        (["--cache-ram", "much"], "--cache-ram"),
        (["--purposes", "x" * 65], "--purposes"),
        (["--lora-dir", "/no/such/folder"], "no such folder"),
        (["--lora", "a.gguf", "--lora", "b/a.gguf"], "taken"),
        (["--lora", "/no/such/adapter.gguf"], "no such file"),
    ],
)
def test_mistakes_are_one_clear_line(
    arguments: Sequence[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Exit code 2, before anything is allocated."""
    tiny_spec(tmp_path)
    model = str(tmp_path / "llama.gguf")
    assert main(["serve", model, "--port", "0", *arguments]) == exits.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvtrio: ")
    assert reason in line


def test_state_is_known_by_all_that_it_depends_on() -> None:
    """Weights, architecture, type, device, block size, backend: any of them makes another root, and
    the first two another model."""
    spec = served_model().spec
    settings = BackendSettings(num_blocks=4, max_context=32)
    facts = info(settings)
    one = server_identity(b"weights", spec, facts, settings)
    models = [
        server_identity(b"other weights", spec, facts, settings),
        server_identity(b"weights", evolve(spec, norm_eps=1e-6), facts, settings),
    ]
    formats = [
        server_identity(b"weights", spec, evolve(facts, name="torch"), settings),
        server_identity(b"weights", spec, facts, evolve(settings, dtype="f32")),
        server_identity(b"weights", spec, facts, evolve(settings, device="cuda")),
        server_identity(b"weights", spec, facts, evolve(settings, block_size=32)),
        server_identity(b"weights", spec, facts, evolve(settings, key_type="q8_0")),
        server_identity(b"weights", spec, facts, evolve(settings, value_type="q8_0")),
        server_identity(b"weights", spec, evolve(facts, numerics="avx2"), settings),
    ]
    assert one == server_identity(b"weights", evolve(spec, name="moved"), facts, settings)
    assert one.model not in {each.model for each in models}
    assert {each.model for each in formats} == {one.model}
    every = (one, *models, *formats)
    assert len({key_maker(bytes(32), each).root for each in every}) == 10
    secret = key_maker(bytes(31) + b"\1", one)
    assert secret.root_key() != key_maker(bytes(32), one).root_key()


def test_a_folder_for_sessions_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    """One line that names the flag; a folder that is there is opened."""
    with ExitStack() as stack:
        assert open_sessions(None, stack) is None
        assert open_sessions(tmp_path, stack) is not None
        (tmp_path / "file").write_bytes(b"x")
        for path in (tmp_path / "none", tmp_path / "file"):
            with pytest.raises(ConfigError, match=r"--slot-save-path .*no such folder"):
                open_sessions(path, stack)


def test_spare_memory_of_a_device_reaches_the_core_and_is_announced() -> None:
    """What a GPU has beyond the longest contexts is the core's; where all of it goes is told."""
    settings = backend_settings(serve_config(), 100)
    tight = info(settings)
    gpu = DeviceMemory(
        name="cuda:0",
        allowed_bytes=100 << 20,
        taken_bytes=50 << 20,
        step_bytes=10 << 20,
        pool_bytes=30 << 20,
        adapter_bytes=10 << 20,
    )
    roomy = evolve(tight, num_blocks=tight.num_blocks + 40, memory=(gpu,))
    assert core_config(serve_config(), tight).num_spare_blocks == 0
    assert core_config(serve_config(), roomy).num_blocks == roomy.num_blocks
    assert memory_lines(tight) == []
    (line,) = memory_lines(roomy)
    assert "cuda:0: of 100 MiB weights and others take 50, a step 10, state 30" in line
    assert f"({roomy.num_blocks} blocks); 10 are left for adapters" in line
