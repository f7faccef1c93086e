"""Adapters from files to data: forms, factors, order of rows, identity."""

from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from model.adapter_builder import (
    PREFIX,
    Pairs,
    config,
    gguf_adapter,
    module_of,
    peft_folder,
    peft_tensors,
    random_pairs,
    tiny_spec,
)

from kvtrio.model.adapters import AdapterData, AdapterKind, load_adapter
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.spec import ModelSpec

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3"]


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return tiny_spec(tmp_path)


def load_gguf(folder: Path, spec: ModelSpec, raw: bytes) -> AdapterData:
    path = folder / "adapter.gguf"
    path.write_bytes(raw)
    return load_adapter(path, spec)


def load_peft(folder: Path, spec: ModelSpec, pairs: Pairs, **settings: object) -> AdapterData:
    path = peft_folder(folder / "peft", peft_tensors(pairs, spec), config(**settings))
    return load_adapter(path, spec)


def assert_same(data: AdapterData, pairs: Pairs) -> None:
    assert list(data.targets) == sorted(pairs)
    for name, (a, b) in pairs.items():
        np.testing.assert_array_equal(data.targets[name].a, a)
        np.testing.assert_array_equal(data.targets[name].b, b)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_forms_of_an_adapter_are_one(tmp_path, architecture):
    """GGUF and PEFT give equal arrays, factors and digests; llama's q and k rows are reordered."""
    spec = tiny_spec(tmp_path, architecture)
    pairs = random_pairs(spec)
    one = load_gguf(tmp_path, spec, gguf_adapter(pairs, architecture))
    other = load_peft(tmp_path, spec, pairs)
    assert (one.kind, other.kind) == (AdapterKind.GGUF, AdapterKind.PEFT)
    assert_same(one, pairs)
    assert_same(other, pairs)
    assert {target.scaling for target in (*one.targets.values(), *other.targets.values())} == {2.0}
    assert one.digest == other.digest
    assert len(one.digest) == 32
    assert one.num_bytes == sum(a.nbytes + b.nbytes for a, b in pairs.values())


def test_shared_adapters_are_the_same_in_both_forms(shared, smollm2):
    """The published example adapters have one digest each, whichever form is loaded."""
    with open_gguf(smollm2) as file:
        spec = read_spec(file)
    folder = shared / "adapters"
    for name in ("smol-lora-a", "smol-lora-b"):
        one = load_adapter(folder / f"{name}.gguf", spec)
        other = load_adapter(folder / f"{name}-peft", spec)
        assert len(one.targets) == 5 * len(spec.layers)
        assert one.digest == other.digest


def test_half_precision_is_widened_exactly(tmp_path, spec):
    """F16 and BF16 values become the float32 numbers that they stand for."""
    values = np.array([[1.5, -0.0078125, 3.0], [256.0, -2.0, 0.125]], np.float32)
    pairs = {"blk.0.attn_v.weight": (np.tile(values, 3)[:, :8], np.tile(values, 2).T[:4])}
    tensors = peft_tensors(pairs, spec)
    upper = {name: (v.view(np.uint32) >> 16).astype(np.uint16) for name, v in tensors.items()}
    half = {name: v.astype(np.float16) for name, v in tensors.items()}
    for i, stored in enumerate((upper, half)):
        folder = peft_folder(tmp_path / f"peft{i}", stored, config())
        assert_same(load_adapter(folder, spec), pairs)


@pytest.mark.parametrize("rank", [4, 16, 64])
@pytest.mark.parametrize("stabilised", [False, True])
@pytest.mark.parametrize("pattern", ["none", "alpha", "rank"])
def test_the_factor_of_each_matrix(tmp_path, spec, rank, stabilised, pattern):
    """alpha / rank or alpha / sqrt(rank), with rank and alpha of the first pattern that matches."""
    special = "blk.1.attn_k.weight"
    special_rank = 3 if pattern == "rank" else rank
    pairs = random_pairs(spec, rank)
    pairs[special] = random_pairs(spec, special_rank)[special]
    settings: dict[str, object] = {"use_rslora": stabilised}
    if pattern == "alpha":
        settings["alpha_pattern"] = {r"layers\.1\.self_attn\.k_proj": 10, "k_proj": 7, "lm_head": 5}
    if pattern == "rank":
        settings["rank_pattern"] = {"model.layers.1.self_attn.k_proj": special_rank}
    data = load_peft(tmp_path, spec, pairs, rank=rank, alpha=8, **settings)
    alphas = {special: 10, "blk.0.attn_k.weight": 7, "output.weight": 5}
    for name, target in data.targets.items():
        alpha = alphas.get(name, 8) if pattern == "alpha" else 8
        own = len(target.a)
        assert target.scaling == pytest.approx(alpha / (sqrt(own) if stabilised else own), rel=1e-7)
    assert len(data.targets[special].a) == special_rank


@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        ("q_proj", ["0.self_attn.q_proj", "1.self_attn.q_proj"]),
        ("layers.1.self_attn.q_proj", ["1.self_attn.q_proj"]),
        (r"^model\.layers\.0\..*_proj", ["0.self_attn.q_proj", "0.mlp.up_proj"]),
        (r".*layers\.[0-9]+\.mlp\.up_proj", ["0.mlp.up_proj", "1.mlp.up_proj"]),
        (r"(self_attn\.q|mlp\.up)_proj", ["0.self_attn.q_proj", "1.self_attn.q_proj",
          "0.mlp.up_proj", "1.mlp.up_proj"]),
        ("_proj", []),
        ("layers.1", []),
    ],
)  # fmt: skip
def test_patterns_cover_the_end_of_a_path_from_a_dot_on(tmp_path, spec, pattern, modules):
    """As in PEFT: a regular expression for whole parts of the path, up to its end."""
    names = ["blk.0.attn_q.weight", "blk.1.attn_q.weight", "blk.0.ffn_up.weight"]
    names += ["blk.1.ffn_up.weight"]
    pairs = {name: random_pairs(spec)[name] for name in names}
    data = load_peft(tmp_path, spec, pairs, alpha_pattern={pattern: 100})
    special = [name for name in names if data.targets[name].scaling == 50.0]
    assert sorted(map(module_of, special)) == sorted(f"model.layers.{name}" for name in modules)


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_a_file_without_alpha_has_factor_one(tmp_path, spec, alpha):
    """Then the request's scale is all there is, as in llama.cpp."""
    data = load_gguf(tmp_path, spec, gguf_adapter(random_pairs(spec), alpha=alpha))
    assert {target.scaling for target in data.targets.values()} == {1.0}


def test_the_digest_is_of_what_is_computed(tmp_path, spec):
    """A value, a factor or a target makes another adapter; names and order make none."""
    pairs = random_pairs(spec)
    first = load_gguf(tmp_path, spec, gguf_adapter(pairs)).digest
    backwards = dict(reversed(pairs.items()))
    assert load_gguf(tmp_path, spec, gguf_adapter(backwards)).digest == first
    named = gguf_adapter(pairs, general__name="other", adapter__lora__task_name="t")
    assert load_gguf(tmp_path, spec, named).digest == first
    changed = {name: (a.copy(), b) for name, (a, b) in pairs.items()}
    changed["blk.1.ffn_up.weight"][0][0, 0] += 1e-6
    fewer = dict(list(pairs.items())[1:])
    swapped = dict(pairs)
    one, other = "blk.0.attn_q.weight", "blk.1.attn_q.weight"
    swapped[one], swapped[other] = swapped[other], swapped[one]
    others = [gguf_adapter(p) for p in (changed, fewer, swapped)] + [gguf_adapter(pairs, alpha=4.5)]
    digests = [load_gguf(tmp_path, spec, raw).digest for raw in others]
    assert len({first, *digests}) == 5


def test_rewriting_a_file_changes_its_digest_and_back(tmp_path, spec):
    """Identity comes from the bytes that were read, not from the path (a reload under one name)."""
    old, new = (gguf_adapter(random_pairs(spec, seed=seed)) for seed in (0, 1))
    digests = [load_gguf(tmp_path, spec, raw).digest for raw in (old, new, old)]
    assert digests[0] == digests[2] != digests[1]


def test_activated_adapters_say_their_tokens(tmp_path, spec):
    """Both forms carry the invocation tokens; they are no part of the digest."""
    pairs = random_pairs(spec)
    plain = load_peft(tmp_path, spec, pairs)
    peft = load_peft(tmp_path, spec, pairs, alora_invocation_tokens=[3, 0, 4])
    tokens = np.array([3, 0, 4], np.uint32)
    raw = gguf_adapter(pairs, adapter__alora__invocation_tokens=tokens)
    gguf = load_gguf(tmp_path, spec, raw)
    assert gguf.invocation_tokens == peft.invocation_tokens == (3, 0, 4)
    assert plain.invocation_tokens == ()
    assert gguf.digest == peft.digest == plain.digest


def test_texts_of_a_gguf_adapter_survive(tmp_path, spec):
    """Task name and prompt prefix are kept, bytes that are no UTF-8 replaced."""
    raw = gguf_adapter(random_pairs(spec), adapter__lora__task_name="sum up",
                       adapter__lora__prompt_prefix="a\udcffb")  # fmt: skip
    data = load_gguf(tmp_path, spec, raw)
    assert data.task_name == "sum up"
    assert data.prompt_prefix == "a?b"


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.", ""])
def test_other_places_of_the_text_model(tmp_path, spec, prefix):
    """The text part of a multimodal model is the same model under a longer path."""
    target = "blk.1.ffn_up.weight"
    a, b = random_pairs(spec)[target]
    names = [f"{PREFIX}{prefix}layers.1.mlp.up_proj.lora_{side}.weight" for side in "AB"]
    folder = peft_folder(tmp_path / "peft", dict(zip(names, (a, b), strict=True)), config())
    assert_same(load_adapter(folder, spec), {target: (a, b)})


def test_keys_with_the_adapters_name_are_read(tmp_path, spec):
    """State dicts saved with the adapter's name in their keys load the same."""
    tensors = peft_tensors(random_pairs(spec), spec)
    named = {name.replace(".weight", ".default.weight"): v for name, v in tensors.items()}
    one = load_adapter(peft_folder(tmp_path / "one", tensors, config()), spec)
    other = load_adapter(peft_folder(tmp_path / "two", named, config()), spec)
    assert one.digest == other.digest
