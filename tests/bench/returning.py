"""Time to first token of a conversation of 3,000 tokens that comes back:
python tests/bench/returning.py [MODEL.gguf]

Cold, from the device, and from RAM (another conversation took the device meanwhile), without HTTP.
On the CPU device and RAM are one memory: a restore relabels blocks and copies at most one. With
--two-arenas they are two, as on a GPU, and blocks are copied.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.core_fakes import NumberMatcher
from kvtrio.backends.base import BackendSettings
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.core.config import CoreConfig
from kvtrio.core.events import Finished, Submit, TokenOut
from kvtrio.core.identity import KeyMaker
from kvtrio.core.machine import Core
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import RequestId
from kvtrio.model.architectures import read_spec
from kvtrio.model.fetch import default_cache_dir, fetch
from kvtrio.model.gguf_file import open_gguf
from kvtrio.schedulers.fcfs import FCFS

LENGTH, CONTEXT, BLOCK, NEW, ROUNDS = 3000, 3072, 16, 12, 3


def make(path: Path, is_unified: bool) -> tuple[Core, TorchBackend]:
    with open_gguf(path) as file:
        settings = BackendSettings(
            block_size=BLOCK,
            num_blocks=-(-CONTEXT // BLOCK) + 1,
            host_bytes=1 << 30,
            is_unified=is_unified,
            max_context=CONTEXT,
            num_threads=2,
        )
        backend = TorchBackend.load(file, read_spec(file), settings)
    config = CoreConfig(
        groups=backend.info.groups,
        block_size=BLOCK,
        num_places=1,
        max_context=CONTEXT,
        max_waiting=0,
        max_batch_tokens=512,
        num_host_blocks=backend.info.num_host_blocks,
        is_unified=is_unified,
    )
    return Core(config, FCFS(), KeyMaker(b"benchmark's secret", b"root")), backend


def first_token(core: Core, backend: TorchBackend, prompt: list[int]) -> tuple[float, Finished]:
    """Seconds to the first token, and the account."""
    submit = Submit(
        request_id=RequestId(time.perf_counter_ns()),
        token_ids=tuple(prompt),
        max_new_tokens=1,
        sampling=SamplingParams(temperature=0.0),
        matcher=NumberMatcher(),
    )
    begin = time.perf_counter()
    core.handle(submit, begin)
    first_s = 0.0
    while core.has_work:
        batch = core.schedule(begin)
        assert batch is not None
        for output in core.update(batch, backend.step(batch), begin):
            if isinstance(output, TokenOut):
                first_s = time.perf_counter() - begin
            elif isinstance(output, Finished):
                finished = output
    return first_s, finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--two-arenas", action="store_true")
    args = parser.parse_args()
    path = args.model or fetch("smollm2", default_cache_dir(), progress=True)
    core, backend = make(path, not args.two_arenas)
    rng, rows = Random(1), {"cold": [], "device": [], "ram": []}
    for _ in range(ROUNDS):
        chat, other = ([rng.randrange(1000, 40_000) for _ in range(LENGTH)] for _ in "ab")
        rows["cold"].append(first_token(core, backend, chat))
        chat += [rng.randrange(1000, 40_000) for _ in range(NEW)]
        rows["device"].append(first_token(core, backend, chat))
        first_token(core, backend, other)
        chat += [rng.randrange(1000, 40_000) for _ in range(NEW)]
        rows["ram"].append(first_token(core, backend, chat))
    print("from     first token ms   computed   device      ram   of cold")
    cold = statistics.median(seconds for seconds, _ in rows["cold"])
    for name, answers in rows.items():
        seconds, last = statistics.median(a for a, _ in answers), answers[-1][1]
        report = last.cache
        print(
            f"{name:<8} {seconds * 1e3:>14.1f} {last.num_computed_tokens:>10}"
            f" {report.num_device_tokens:>8} {report.num_host_tokens:>8} {seconds / cold:>9.2%}"
        )


if __name__ == "__main__":
    main()
