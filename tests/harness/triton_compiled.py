"""Compiles what the kernels' launchers would launch, for a GPU that need not be there.

Run as a program, with ``TRITON_INTERPRET`` unset or 0 and the targets (80 90) as arguments: prints
one JSON line per kernel, shape and target, and before those how often each kernel would be compiled
for launches that differ as steps do, and for one of them. Launchers run over tensors of real shapes
without memory; instead of being launched, each kernel is compiled with the very tiles that its
launcher chose.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
import triton
from attrs import asdict, define, field, frozen
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

OPTIONS = ("num_warps", "num_stages")
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64",
    torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip


@frozen
class Compiled:
    """What ptxas says of one kernel."""

    case: str
    kernel: str
    target: int
    warps: int
    registers: int
    """Per thread."""
    shared: int
    """Bytes."""
    spilled: int
    """Bytes of stores and loads of registers that did not fit."""


@define(eq=False)
class Launches:
    """Kernels that were about to be launched."""

    found: list[tuple[JITFunction[Any], tuple[Any, ...], dict[str, Any]]] = field(factory=list)

    def run(self, kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kw: Any) -> None:
        self.found.append((kernel, args, kw))


def source(
    kernel: JITFunction[Any], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[ASTSource, dict[str, Any]]:
    """As Triton specialises a launch: 1 and None are constants, and who divides by 16 says so."""
    options = {key: named[key] for key in OPTIONS if key in named}
    given = dict(zip(kernel.arg_names, args, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = given[param.name]
        is_one = isinstance(value, int) and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or is_one:
            signature[param.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes), options


def resources(log: str) -> tuple[int, int]:
    """Registers, and bytes spilled, as ptxas counts them with the options that Triton gives it."""
    words = log.replace(",", " ").split()
    registers = int(words[words.index("registers") - 1])
    spilled = sum(int(words[i - 3]) for i, word in enumerate(words) if word == "stores")
    return registers, spilled


def launched(launch: Callable[[], object]) -> Launches:
    """What it would launch."""
    launches, ordinary = Launches(), JITFunction.run
    JITFunction.run = lambda kernel, *args, **kw: launches.run(kernel, *args, **kw)
    try:
        launch()
    finally:
        JITFunction.run = ordinary
    return launches


def variant(kernel: JITFunction[Any], args: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Equal for launches that run the same code."""
    built, options = source(kernel, args, named)
    parts = (built.signature, built.constants, built.attrs, options)
    return f"{kernel.__name__} {parts}"


def num_variants(launches: list[Callable[[], object]]) -> dict[str, int]:
    """Of each kernel, how often it would be compiled for all of these."""
    found = {variant(*each) for launch in launches for each in launched(launch).found}
    return dict(Counter(each.split()[0] for each in found))


def compiled(cases: dict[str, Callable[[], object]], targets: list[int]) -> Iterator[Compiled]:
    """Every kernel of every case, once per target; of several alike the first."""
    done, knobs.nvidia.dump_ptxas_log = set[str](), True
    knobs.compilation.always_compile = True  # what is taken from a cache has no log
    for name, launch in cases.items():
        for kernel, args, named in launched(launch).found:
            own = variant(kernel, args, named)
            if own in done:
                continue
            done.add(own)
            for target in targets:
                built, options = source(kernel, args, named)
                gpu = GPUTarget("cuda", target, 32)
                with redirect_stdout(StringIO()) as log:
                    binary = triton.compile(built, target=gpu, options=options)
                registers, spilled = resources(log.getvalue())
                yield Compiled(
                    case=name,
                    kernel=kernel.__name__,
                    target=target,
                    warps=binary.metadata.num_warps,
                    registers=registers,
                    shared=binary.metadata.shared,
                    spilled=spilled,
                )


def main(targets: list[int]) -> None:
    from harness.triton_cases import ALIKE, CASES

    for name, launches in ALIKE.items():
        counts = [num_variants(each) for each in (launches[:1], launches)]
        print(json.dumps({"alike": name, "one": counts[0], "all": counts[1]}), flush=True)
    for each in compiled(CASES, targets):
        print(json.dumps(asdict(each)), flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [80, 90])
