"""Reads changed model files in a process of its own, whose memory and time are bounded.

What may come out of a file: it is read, or one line. Everything else is written down.
"""

import json
import os
import resource
import signal
import sys
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from types import FrameType

from attrs import define, field, frozen

from harness.mutations import CHANGES, GgufBase, gguf_base
from kvtrio.model.adapters import load_adapter
from kvtrio.model.architectures import read_spec
from kvtrio.model.errors import ModelFileError
from kvtrio.model.opening import open_model
from kvtrio.model.spec import ModelSpec
from kvtrio.model.template import TemplateError, check_usable, load_template
from kvtrio.model.tokenizer import load_tokenizer

MOST_CHARS = 400
ROOM = 1.2
"""Of the file's size, for one reading of its head."""
SMALL = 128 << 10
"""Bytes that count for nothing: caches that fill, and a tiny file's own objects."""
ADDRESS_ROOM = 16 << 20
"""Address space that a reading may take besides: what libraries ask for comes in large pieces."""
WHOLE = 12
"""One in so many is read as a start does."""
TRACED = 8
"""One in so many is measured exactly, which takes five times as long."""
MOST_S = 1.0
"""Of processor time."""


class TooSlowError(Exception):
    """A file took longer than ``MOST_S``."""


WARMING = "llama3.gguf"


@define
class Report:
    """What came out."""

    outcomes: Counter[str] = field(factory=Counter)
    faults: list[str] = field(factory=list)


@frozen
class Case:
    """One way to read a changed file."""

    label: str
    num_bytes: int
    read: Callable[[], object]
    is_head: bool


def run(case: Case, report: Report, *, is_traced: bool) -> None:
    """Read once; note how it ended."""
    if is_traced:
        tracemalloc.start()
    try:
        with _limits(case.num_bytes), warnings.catch_warnings():
            warnings.simplefilter("error")
            case.read()
        report.outcomes["read"] += 1
    except (ModelFileError, TemplateError) as error:
        report.outcomes["refused"] += 1
        if not str(error).isprintable() or len(str(error)) > MOST_CHARS:
            report.faults.append(f"{case.label}: not one line: {str(error)[:200]!r}")
    except BaseException as error:
        frames = _frames(error)
        report.faults.append(f"{case.label}: {type(error).__name__} {str(error)[:80]!r} {frames}")
    if is_traced:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if peak > ROOM * case.num_bytes + SMALL:
            report.faults.append(f"{case.label}: {peak} bytes for {case.num_bytes}")


def _frames(error: BaseException) -> str:
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " ".join(found[-4:])


@contextmanager
def _limits(num_bytes: int) -> Iterator[None]:
    """Of processor time, and of what may be asked of the system for memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space() + int(ROOM * num_bytes) + ADDRESS_ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlowError


# --- what is read ---


def read_head(path: Path) -> None:
    with open_model(path) as file:
        read_spec(file)


def read_all(path: Path) -> None:
    """As a start does, up to the weights."""
    with open_model(path) as file:
        read_spec(file)
        tokenizer = load_tokenizer(file.metadata, cutting=file.pre_tokenizer)
        bos, eos = tokenizer.bos_text, tokenizer.eos_text
        check_usable(load_template(file.metadata, None, bos, eos))


# --- bases ---


def gguf_cases(rng: Random, base: GgufBase, spec: ModelSpec | None) -> Iterator[Case]:
    """``spec``: of an adapter's model. The file lies in memory: a disk would take most of the
    time."""
    file = os.memfd_create(base.name)
    path = Path(f"/proc/self/fd/{file}")
    for number in count():
        head, body = base.changed(rng)
        os.ftruncate(file, 0)
        os.pwrite(file, head, 0)
        os.ftruncate(file, len(head) + body)
        yield _case(rng, f"{base.name} {number}", path, len(head) + body, spec)


def folder_cases(rng: Random, folder: Path, spec: ModelSpec | None) -> Iterator[Case]:
    """One file of the folder at a time; put back afterwards."""
    files = [each for each in sorted(folder.iterdir()) if each.suffix in CHANGES]
    total = sum(each.stat().st_size for each in files)
    for number in count():
        path = rng.choice(files)
        whole = path.read_bytes()
        path.write_bytes(CHANGES[path.suffix](rng, whole))
        try:
            yield _case(rng, f"{folder.name}/{path.name} {number}", folder, total, spec)
        finally:
            path.write_bytes(whole)


def _case(rng: Random, label: str, path: Path, num_bytes: int, spec: ModelSpec | None) -> Case:
    """Heads are measured; one in so many goes on to the tokenizer and the template."""
    if spec is not None:
        return Case(label, num_bytes, partial(load_adapter, path, spec), is_head=True)
    is_head = rng.randrange(WHOLE) > 0
    return Case(label, num_bytes, partial(read_head if is_head else read_all, path), is_head)


def main(work: Path, seed: int, num_cases: int) -> Report:
    """``work`` has models/*.gguf, folders/*, and adapters/NAME@MODEL.gguf or adapters/NAME@MODEL/
    for one of the models."""
    report, rng = Report(), Random(seed)
    sources = list(_sources(rng, work))
    signal.signal(signal.SIGPROF, _too_slow)
    for path in (work / "models").iterdir():
        read_head(path)
    for path in (*(work / "folders").iterdir(), work / "models" / WARMING):
        read_all(path)  # all are good, and this fills caches
    for number in range(num_cases):
        case = next(sources[number % len(sources)])
        run(case, report, is_traced=case.is_head and not rng.randrange(TRACED))
    return report


def _sources(rng: Random, work: Path) -> Iterator[Iterator[Case]]:
    for path in sorted((work / "models").iterdir()):
        yield gguf_cases(rng, gguf_base(path), None)
    for path in sorted((work / "adapters").iterdir()):
        with open_model(work / "models" / f"{path.stem.split('@')[1]}.gguf") as file:
            spec = read_spec(file)
        if path.is_dir():
            yield folder_cases(rng, path, spec)
        else:
            yield gguf_cases(rng, gguf_base(path), spec)
    for path in sorted((work / "folders").iterdir()):
        yield folder_cases(rng, path, None)


def _address_space() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()


if __name__ == "__main__":
    made = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"outcomes": made.outcomes, "faults": made.faults}))
