"""All checks of the cuda backend that want a GPU, and its speed, in one table:

    TRITON_INTERPRET=0 python tests/bench/gpu.py
    TRITON_INTERPRET=1 python tests/bench/gpu.py

The second form runs the same code at toy sizes in Triton's interpreter, for who changes this
script: its speeds say nothing. Needs torch, Triton and pure Python packages; kvtrio may lie in a
folder on PYTHONPATH. Ends with 1 when something is wrong. It has not been run on a GPU yet.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    import torch

    from harness.cuda_models import EVERY_KIND, random_cuda, same_torch
    from harness.gpu_checks import Check, Where, checked
    from harness.gpu_layers import layer_speeds
    from harness.gpu_memory import memory_checks
    from harness.gpu_model import model_speeds
    from harness.gpu_sizes import EIGHT_B, TOY, fitting
    from harness.gpu_speed import kernel_speeds
    from harness.torch_models import PLAIN, Driver, greedy
    from kvtrio.kernels.triton_common import is_interpreted
except ModuleNotFoundError as error:
    print(f"{error.name} is not installed")
    sys.exit(2)


def parity() -> Iterator[Check]:
    """A tiny model's ids and logits beside the reference's."""
    ours, reference = Driver(random_cuda(PLAIN)), Driver(same_torch(PLAIN))
    prompt = list(range(3, 20))
    logits = [each.logprobs(each.chunk(1, 0, prompt)).cpu() for each in (ours, reference)]
    yield Check("tiny model, logits", float((logits[0] - logits[1]).abs().max()), 1e-3)
    ids = [greedy(each, 2, prompt, 4) for each in (ours, reference)]
    yield Check("tiny model, ids", float(ids[0] != ids[1]), 0.0)
    # On a GPU decoding steps of the first are captured ones, unless it is told otherwise.
    captured, launched = (Driver(random_cuda(EVERY_KIND, graphs=each)) for each in (True, False))
    reference = Driver(same_torch(EVERY_KIND))
    drivers = (captured, launched, reference)
    for each in drivers:
        each.logprobs(*(each.chunk(i, 0, prompt[: 4 + i]) for i in range(3)))
    rows = [each.logprobs(*(each.chunk(i, 4 + i, [7]) for i in range(3))).cpu() for each in drivers]
    yield Check("every kind of layer, logits", float((rows[1] - rows[2]).abs().max()), 1e-3)
    yield Check("the same, captured", float((rows[0] - rows[1]).abs().max()), 1e-4)


def main() -> int:
    interpreted = is_interpreted()
    if not interpreted and not torch.cuda.is_available():
        print("no GPU, and TRITON_INTERPRET is not set")
        return 2
    sizes = TOY if interpreted else fitting(EIGHT_B, torch.cuda.mem_get_info()[0])
    seed = int(os.environ.get("SEED", secrets.randbelow(1 << 30)))
    where = "interpreter" if interpreted else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, SEED={seed}")
    failed = 0
    place = Where(sizes.device, seed)
    for checks in (checked(place), parity(), memory_checks(place)):
        for check in checks:
            # numpy's products, in the interpreter, depend on a row's place in a tile.
            limit = max(check.limit, 1e-2 if interpreted else 0.0)
            is_wrong = not check.error <= limit
            failed += is_wrong
            print(
                f"{check.name:40}{check.error:12.2e}  {'WRONG' if is_wrong else 'ok'}", flush=True
            )
    for speeds in (kernel_speeds(sizes), layer_speeds(sizes), model_speeds(sizes)):
        for speed in speeds:
            part = "" if speed.part is None else f"{100 * speed.part:8.0f} %"
            print(f"{speed.name:40}{speed.value:12.4g} {speed.unit:10}{part}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
