"""Adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

Tensors are ``base_model.model.<module>.lora_A.weight`` [rank, in] and ``.lora_B.weight``
[out, rank], under the names and in the row order of the training library; both are turned into the
base file's here.
"""

import re
from collections.abc import Iterator

from kvtrio.model.adapter_config import PeftConfig, read_peft_config
from kvtrio.model.adapter_modules import arranged, splits, target_of
from kvtrio.model.adapter_pairs import (
    UNMATCHED,
    Content,
    Half,
    LowRank,
    Pair,
    Side,
    low_rank,
    pair_up,
    refuse_listed,
)
from kvtrio.model.errors import ModelFileError
from kvtrio.model.paths import OpenPath
from kvtrio.model.safetensors_file import SafetensorsFile, read_safetensors
from kvtrio.model.spec import ModelSpec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20

_TENSOR = re.compile(r"base_model\.model\.([\w.-]+)\.lora_([AB])(?:\.default)?\.weight")
_REFUSED = {
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_embedding_": "adapters of the embedding are not supported",
    ".bias": "biases are not supported",
}


def read_peft_adapter(folder: OpenPath, spec: ModelSpec, max_bytes: int) -> Content:
    """Raises ModelFileError when the folder holds no LoRA adapter for this base."""
    if folder.has(PICKLE) and not folder.has(WEIGHTS):
        raise ModelFileError(f"{PICKLE} is a pickle, which can run code; save it as {WEIGHTS}")
    with folder.child(CONFIG) as child:
        config = read_peft_config(bytes(child.read(MAX_CONFIG_BYTES)))
    with folder.child(WEIGHTS) as child:
        file = read_safetensors(child.read(max_bytes))
        return Content(
            targets=_targets(file, config, spec), invocation_tokens=config.invocation_tokens
        )


def _targets(file: SafetensorsFile, config: PeftConfig, spec: ModelSpec) -> dict[str, LowRank]:
    for part, problem in _REFUSED.items():
        refuse_listed(problem, [name for name in file.tensors if part in name])
    refuse_listed("full modules are not supported", [n for n in file.tensors if ".lora_" not in n])
    found = {name: _TENSOR.fullmatch(name) for name in file.tensors}
    matches = {name: match for name, match in found.items() if match}
    refuse_listed(UNMATCHED, [name for name in found if name not in matches])
    halves = [
        Half(
            name=name,
            target=target_of(spec, match[1]),
            side=Side(match[2].lower()),
            shape=file.tensors[name].shape,
        )
        for name, match in matches.items()
    ]
    modules = {name: match[1] for name, match in matches.items()}
    more = {name: split.shape for name, split in splits(spec).items()}
    return dict(
        each
        for pair in pair_up(halves, spec, more)
        for each in _low_ranks(file, pair, config.scaling(modules[pair.a.name], pair.rank), spec)
    )


def _low_ranks(
    file: SafetensorsFile, pair: Pair, scaling: float, spec: ModelSpec
) -> Iterator[tuple[str, LowRank]]:
    """By the base file's names."""
    a, b = file.values(pair.a.name), file.values(pair.b.name)
    split = splits(spec).get(pair.target)
    if split is None:
        a, b = arranged(spec, pair.target, a, b)
        yield pair.target, low_rank(a, b, scaling, pair)
        return
    for name, rows in split.rows.items():
        yield name, low_rank(a, b[rows], scaling, pair)
