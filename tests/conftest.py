"""Rules and fixtures for the whole suite."""

import logging
import os
from collections.abc import Generator
from pathlib import Path

import pytest

# For tests that load torch before kvtrio.backends, which does the same and says why.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Triton reads it when it is imported: its kernels run in Python, on any machine. Tests that need a
# GPU are run with it set to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[1]
IN_CI = os.environ.get("CI") == "true"
GPU = "gpu"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skipped test is a failed one, unless it needs a GPU: nothing goes untested unseen."""
    report = yield
    is_skip = report.skipped and not hasattr(report, "wasxfail")
    if IN_CI and is_skip and item.get_closest_marker(GPU) is None:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    if call.when == "teardown" and (left := left_handlers(item)):
        report.outcome = "failed"
        report.longrepr = f"log handlers left behind: {left}"
    return report


HANDLERS = pytest.StashKey[list[logging.Handler]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Remember who listens to the log, outside the phases, in which pytest does."""
    item.stash[HANDLERS] = list(logging.getLogger().handlers)
    return (yield)


def left_handlers(item: pytest.Item) -> list[logging.Handler]:
    """Handlers that the test has left: they would write to files of the past in later tests."""
    return [each for each in logging.getLogger().handlers if each not in item.stash[HANDLERS]]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for modules that skip themselves while they are collected."""
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def shared() -> Path:
    """Golden data beside the repository; not part of it, so its tests skip where it is absent."""
    path = Path(os.environ.get("KVTRIO_SHARED", ROOT / ".." / "shared")).resolve()
    if not (path / "golden").is_dir():
        pytest.skip("no golden data: set KVTRIO_SHARED to its folder")
    return path


def fetched(name: str) -> Path:
    from kvtrio.model.fetch import CATALOGUE, default_cache_dir

    path = default_cache_dir() / CATALOGUE[name].file_name
    if not path.is_file():
        pytest.skip(f"model not fetched: run `kvtrio fetch {name}`")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct, fetched before the tests."""
    return fetched("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The real Gemma 3 270M, fetched before the tests."""
    return fetched("gemma3-270m")
