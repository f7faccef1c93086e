"""Adapters from their files, through the forward pass, against recordings and merged weights."""

import json
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import define, evolve, field
from model.adapter_builder import (
    config,
    module_of,
    peft_folder,
    peft_tensors,
    random_pairs,
    tiny_spec,
)

from harness.cpu_models import load_cpu
from harness.torch_adapters import Loaded, Mix, loaded, random_adapter
from harness.torch_models import Driver, RandomFile, load, settings
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.model.adapter_pairs import HEAD
from kvtrio.model.adapters import AdapterData, load_adapter
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import open_gguf

CLEAR = 1e-3
"""Recorded lead of the best token below which another best token is no error."""


@define
class Run:
    """One recorded request on its way along the recorded tokens."""

    prompt: list[int]
    greedy: list[int]
    top10: list[list[tuple[int, float]]]
    mix: Mix
    worst: float = field(init=False, default=0.0)

    def piece(self, step: int) -> tuple[int, list[int]]:
        if step == 0:
            return 0, self.prompt
        return len(self.prompt) + step - 1, self.greedy[step - 1 : step]

    def check(self, step: int, row: torch.Tensor) -> None:
        top = self.top10[step]
        assert len(top) == 10
        assert int(row.argmax()) == top[0][0] or top[0][1] - top[1][1] < CLEAR
        self.worst = max(self.worst, *(abs(float(row[token]) - value) for token, value in top))


def run_of(case: dict[str, list], mix: Mix) -> Run:
    return Run(case["prompt_tokens"], case["greedy_tokens"], case["top10"], mix)


def worst_difference(on: Loaded, runs: list[Run]) -> float:
    """All runs side by side, step by step, whatever adapters each has."""
    driver = Driver(on.backend)
    for step in range(max(len(run.greedy) for run in runs)):
        active = [(i, run) for i, run in enumerate(runs) if step < len(run.greedy)]
        chunks = [on.chunk(driver, i, run.piece(step), run.mix) for i, run in active]
        for (_, run), row in zip(active, driver.logprobs(*chunks), strict=True):
            run.check(step, row)
    return max(run.worst for run in runs)


def read_adapters(base: Path, *paths: Path) -> list[AdapterData]:
    with open_gguf(base) as file:
        spec = read_spec(file)
    return [load_adapter(path, spec) for path in paths]


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("form", [".gguf", "-peft"])
def test_smollm2_with_adapters_matches_its_recordings(shared, smollm2, form):
    """Base, a, b and both, all in one batch, compute what was recorded for each alone."""
    golden = json.loads((shared / "golden" / "smollm2-135m-f32.json").read_text("utf-8"))
    folder = shared / "adapters"
    adapters = read_adapters(smollm2, *(folder / f"smol-lora-{name}{form}" for name in "ab"))
    runs = [run_of(case, ()) for case in golden["cases"][:3]]
    for key, cases in golden["lora"].items():
        mix = [(adapters[use["id"]], use["scale"]) for use in golden["lora_scales"][key]]
        runs += [run_of(case, mix) for case in cases]
    assert len(runs) == 12
    assert worst_difference(loaded(load(smollm2), *adapters), runs) < 3e-3


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.5, 1.0])
@pytest.mark.parametrize("name", ["llama3", "qwen35"])
@pytest.mark.parametrize("loader", [load, load_cpu])
def test_tiny_models_with_adapters_match_their_recordings(shared, loader, name, scale):
    """All matrices of each layer have a change here, those of recurrent layers too."""
    models = shared / "tiny" / "models"
    golden = json.loads(
        (shared / "tiny" / "golden" / f"{name}-lora-{scale}.json").read_text("utf-8")
    )
    base = models / f"{name}.gguf"
    (adapter,) = read_adapters(base, models / f"lora-{name}.gguf")
    runs = [run_of(case, [(adapter, scale)]) for case in [*golden["cases"], golden["long"]]]
    assert worst_difference(loaded(loader(base), adapter), runs) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3next", "lfm2", "mamba2", "granitehybrid"])
def test_changes_of_recurrent_layers_act_as_merged_weights(shared, name):
    """Of every matrix that an adapter may change, on both backends, over a prompt and on."""
    path = shared / "tiny" / "models" / f"{name}.gguf"
    with open_gguf(path) as file:
        spec = read_spec(file)
        arrays = {tensor: file.dequantise(tensor) for tensor in file.tensors}
    adapter = random_adapter(spec, 3)
    arrays.setdefault(HEAD, arrays["token_embd.weight"])
    for tensor, target in adapter.targets.items():
        arrays[tensor] = arrays[tensor] + 0.1 * target.scaling * (target.b @ target.a)
    whole = evolve(spec, tied_output=False)
    merged = Driver(TorchBackend.load(RandomFile(arrays), whole, settings()))
    prompt = [(37 * i) % 200 + 3 for i in range(70)]
    expected = [merged.logprobs(merged.chunk(0, *piece)) for piece in ((0, prompt), (70, [5]))]
    for loader in (load, load_cpu):
        on = loaded(loader(path), adapter)
        driver = Driver(on.backend)
        for piece, wanted in zip(((0, prompt), (70, [5])), expected, strict=True):
            out = driver.logprobs(on.chunk(driver, 0, piece, [(adapter, 0.1)]))
            torch.testing.assert_close(out, wanted, rtol=0.0, atol=2e-3)


PATTERNS = {
    "plain": ({}, {}),
    "alpha": ({}, {"k_proj": 3, r"layers\.1\.mlp\..*": 20}),
    "rank": ({"q_proj": 3, "model.layers.0.mlp.down_proj": 5}, {}),
    "both": ({"q_proj": 3}, {"q_proj": 9}),
}


def naive(entries: dict[str, int], module: str, default: int) -> int:
    """What the patterns above mean, spelled out."""
    for pattern, value in entries.items():
        if pattern == r"layers\.1\.mlp\..*":
            if "layers.1.mlp." in module:
                return value
        elif module == pattern or module.endswith("." + pattern):
            return value
    return default


@pytest.mark.parametrize("rank", [4, 16, 64])
@pytest.mark.parametrize("stabilised", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_peft_folder_acts_as_its_config_says(tmp_path, architecture, pattern, stabilised, rank):
    """Ranks, factors and patterns of the folder, against weights merged by hand."""
    ranks, alphas = PATTERNS[pattern]
    spec = tiny_spec(tmp_path, architecture)
    with open_gguf(tmp_path / f"{architecture}.gguf") as file:
        arrays = {name: file.dequantise(name) for name in file.tensors}
        base = TorchBackend.load(file, spec, settings())
    pairs = {}
    # The head is tied in these files: merging there would change the embedding.
    for name in random_pairs(spec).keys() - {"output.weight"}:
        own = naive(ranks, module_of(name), rank)
        pairs[name] = random_pairs(spec, own, seed=own)[name]
        a, b = pairs[name]
        factor = naive(alphas, module_of(name), 6) / (sqrt(own) if stabilised else own)
        arrays[name] += 0.1 * factor * (b.astype(np.float64) @ a).astype(np.float32)
    settings_of = config(rank, 6, use_rslora=stabilised, rank_pattern=ranks, alpha_pattern=alphas)
    folder = peft_folder(tmp_path / "peft", peft_tensors(pairs, spec), settings_of)
    adapter = load_adapter(folder, spec)
    on, prompt = loaded(base, adapter), [0, 4, 2, 1, 3, 3, 1]
    driver = Driver(base)
    out = driver.logprobs(on.chunk(driver, 0, (0, prompt), [(adapter, 0.1)]))
    merged = Driver(TorchBackend.load(RandomFile(arrays), spec, settings()))
    expected = merged.logprobs(merged.chunk(0, 0, prompt))
    torch.testing.assert_close(out, expected, rtol=0.0, atol=1e-4)
    plain = driver.logprobs(driver.chunk(1, 0, prompt))
    assert (plain - expected).abs().max() > 0.01
