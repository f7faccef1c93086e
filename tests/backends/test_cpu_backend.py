"""The cpu backend against the reference on small random models: facts, copies, errors, bits."""

import gc
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from attrs import evolve

from harness.cpu_models import load_cpu, random_cpu
from harness.native import isas
from harness.torch_adapters import random_adapter
from harness.torch_models import (
    GREEDY,
    MODELS,
    PLAIN,
    SPECS,
    WINDOWED,
    Driver,
    greedy,
    random_backend,
    random_file,
    random_prompt,
)
from kvtrio.backends.base import BackendError
from kvtrio.core.sampling import SamplingParams
from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import open_gguf

CLOSE = {"rtol": 0.0, "atol": 1e-4}
SAME = {"rtol": 0.0, "atol": 0.0}
PROMPT = random_prompt(Random(1), 90)


def chunked(driver: Driver, request: int, prompt: list[int], size: int) -> torch.Tensor:
    """Log-probabilities behind a prompt that was computed ``size`` tokens at a time."""
    for start in range(0, len(prompt), size):
        out = driver.logprobs(driver.chunk(request, start, prompt[start : start + size]))
    driver.leave(request)
    return out


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", MODELS)
def test_the_forward_pass_equals_the_reference(name, isa):
    """With weights and cache in float32, every model's log-probabilities and tokens agree."""
    model = MODELS[name]
    reference, mine = random_backend(model), random_cpu(model, isa)
    expected = chunked(Driver(reference), 0, PROMPT, 31)
    out = chunked(Driver(mine, Random(2)), 0, PROMPT, 31)
    torch.testing.assert_close(out, expected, **CLOSE)
    assert greedy(Driver(mine), 0, PROMPT, 12) == greedy(Driver(reference), 0, PROMPT, 12)


@pytest.mark.slow
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f16"), ("q8_0", "q4_0")], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_chunks_and_places_change_no_bit(name, types, isa):
    """A prompt in pieces of 1, 7, 64 and as a whole, in blocks anywhere: the very same bits."""
    prompt = random_prompt(Random(3), 300)
    key_type, value_type = types
    backend = random_cpu(SPECS[name], isa, key_type=key_type, value_type=value_type)
    whole = chunked(Driver(backend), 0, prompt, 300)
    for size in (1, 7, 64):
        out = chunked(Driver(backend, Random(size)), size, prompt, size)
        torch.testing.assert_close(out, whole, **SAME)


@pytest.mark.slow
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", SPECS)
def test_company_changes_no_bit(name, isa):
    """Decode rows and prefill chunks of many in one step get the bits that each gets alone."""
    rng = Random(4)
    backend = random_cpu(SPECS[name], isa, key_type="f16", value_type="f16")
    driver = Driver(backend, rng)
    prompts = [random_prompt(rng, length) for length in (1, 2, 40, 41, 120, 17, 64, 33) * 3]
    cuts = [0, 1, 39, 10, 119, 0, 32, 32] * 3
    alone = [chunked(driver, 100 + i, prompt, 300)[0] for i, prompt in enumerate(prompts)]
    for i, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True)):
        if cut:
            driver.logprobs(driver.chunk(i, 0, prompt[:cut]))
    pieces = [driver.chunk(i, cut, prompts[i][cut:]) for i, cut in enumerate(cuts)]
    torch.testing.assert_close(driver.logprobs(*pieces), torch.stack(alone), **SAME)


@pytest.mark.parametrize(("kind", "tolerance"), [("f16", 0.05), ("q8_0", 0.1), ("q4_0", 1.5)])
@pytest.mark.parametrize("name", SPECS)
def test_narrow_caches_stay_close(name, kind, tolerance):
    """Log-probabilities with a narrower KV cache are as close as its type allows."""
    expected = chunked(Driver(random_cpu(SPECS[name])), 0, PROMPT, 31)
    backend = random_cpu(SPECS[name], key_type=kind, value_type=kind)
    out = chunked(Driver(backend), 0, PROMPT, 31)
    assert 0 < (out - expected).abs().max() < tolerance


def test_blocks_of_another_size():
    """32 tokens a block give what 16 give; what is no multiple of 16 is refused."""
    expected = chunked(Driver(random_cpu(WINDOWED)), 0, PROMPT, 31)
    backend = random_cpu(WINDOWED, block_size=32)
    torch.testing.assert_close(chunked(Driver(backend), 0, PROMPT, 31), expected, **SAME)
    with pytest.raises(BackendError, match="multiple of 16"):
        random_cpu(WINDOWED, block_size=24)


def test_info_counts_what_is_allocated():
    """Groups, blocks and bytes are those of the tables and caches."""
    info = random_cpu(PLAIN, num_blocks=10, key_type="f16", value_type="f16").info
    (group,) = info.groups
    assert info.pool_bytes == group.bytes_per_token * 16 * 10
    assert (info.name, info.vocab_size, info.max_context) == ("cpu", PLAIN.vocab_size, 2048)
    assert info.numerics in isas()
    assert info.weight_bytes >= sum(array.nbytes for array in random_file(PLAIN).arrays.values())
    assert info.num_converted == 0


def test_a_type_that_is_not_computed_with_is_kept_in_another(shared):
    """All matrices of such a file are converted, and the info says how many."""
    folder = shared / "tiny" / "models"
    assert load_cpu(folder / "llama256-iq2_xs.gguf").info.num_converted == 15
    assert load_cpu(folder / "llama256-q4_k.gguf").info.num_converted == 0


def test_a_weight_too_large_for_the_type_it_becomes_is_refused(shared, tmp_path):
    """IQ2_XS reaches further than Q8_0: by name, and not by an infinite scale in memory."""
    content = (shared / "tiny" / "models" / "llama256-iq2_xs.gguf").read_bytes()
    path, largest = tmp_path / "model.gguf", np.float16(65504).tobytes()
    with open_gguf(shared / "tiny" / "models" / "llama256-iq2_xs.gguf") as file:
        start = content.index(file.raw("blk.1.ffn_up.weight").tobytes())
    path.write_bytes(content[:start] + largest + b"\xff" * 72 + content[start + 74 :])
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight .* not a finite"):
        load_cpu(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cuda"}, "cuda"),
        ({"key_type": "q5_1"}, "known are f32, f16, q4_0, q8_0"),
        ({"num_threads": 1 << 20}, "threads cannot be had: 1024 is the most"),
        ({"num_threads": (1 << 32) + 1}, "threads cannot be had: 1024 is the most"),
    ],
)
def test_what_cannot_be_had_is_refused(change, reason):
    """One clear line, before anything large is allocated."""
    with pytest.raises(BackendError, match=reason):
        random_cpu(PLAIN, **change)


def test_requests_sample_as_on_the_reference():
    """Drawn with many settings side by side, both backends choose the same tokens."""
    rng = Random(8)
    backends = [random_backend(ODD := SPECS["odd"]), random_cpu(ODD)]
    drivers = [Driver(backend) for backend in backends]
    for step in range(20):
        rows = [
            evolve(
                GREEDY,
                params=SamplingParams(
                    temperature=rng.choice([0.0, 0.5, 2.0]),
                    top_k=rng.choice([0, 1, 5, 40]),
                    repeat_penalty=rng.choice([1.0, 1.5]),
                ),
                draw=rng.random(),
                recent=(1, 2, 3),
            )
            for _ in range(4)
        ]
        prompt = random_prompt(rng, 5)
        answers = [
            driver.tokens(
                *(driver.chunk(4 * step + i, 0, prompt, row) for i, row in enumerate(rows))
            )
            for driver in drivers
        ]
        assert answers[0] == answers[1]


def test_more_than_a_step_may_have_is_refused():
    """Tokens and sampled requests have the limits that the settings say; nothing is written."""
    driver = Driver(random_cpu(PLAIN, max_rows=8, max_sampled=2))
    with pytest.raises(ValueError, match="more tokens"):
        driver.tokens(driver.chunk(1, 0, PROMPT[:9]))
    with pytest.raises(ValueError, match="more requests"):
        driver.tokens(*(driver.chunk(i, 0, [1]) for i in range(2, 5)))
    assert driver.tokens(driver.chunk(9, 0, PROMPT[:8])) != [None]


def test_a_table_that_does_not_cover_its_chunk_is_a_bug():
    """The native side says so and computes nothing."""
    driver = Driver(random_cpu(PLAIN))
    chunk = driver.chunk(1, 0, PROMPT[:20])
    with pytest.raises(RuntimeError, match="does not cover"):
        driver.tokens(evolve(chunk, block_tables=((chunk.block_tables[0][0],),)))


def test_an_adapter_without_room_is_refused(monkeypatch: pytest.MonkeyPatch):
    """With its size and what there is, and nothing changed."""
    backend = random_cpu(PLAIN)
    monkeypatch.setattr("kvtrio.backends.cpu_backend.ram_available", lambda: 1000)
    with pytest.raises(BackendError, match="not enough memory for an adapter"):
        backend.load_adapter(random_adapter(PLAIN, 1, 64))


def test_a_dropped_backend_gives_its_threads_back():
    """Who forgets to close one keeps neither its threads nor, with them, its memory."""

    def num_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    gc.collect()
    before = num_threads()
    backend = random_cpu(PLAIN, num_threads=3)
    backend.close()
    backend = random_cpu(PLAIN, num_threads=3)
    assert num_threads() >= before + 2
    del backend
    gc.collect()
    assert num_threads() == before
