"""State of latent attention: one row per token, and nothing beside it."""

from random import Random

import torch

from harness.torch_models import LATENT, Driver, random_backend, random_prompt
from kvtrio.core.types import BlockId, StateClass, Tier


@torch.inference_mode()
def test_blocks_are_keys_alone():
    """Their size is that of the rows, and they come back from bytes as they were."""
    backend = random_backend(LATENT)
    (group,) = backend.info.groups
    assert group.state_class is StateClass.TOKEN
    assert group.bytes_per_token == 2 * 16 * 4
    prompt, driver = random_prompt(Random(1), 20), Driver(backend)
    driver.logprobs(driver.chunk(0, 0, prompt[:16]))
    expected = driver.logprobs(driver.chunk(0, 16, prompt[16:]))
    (block,) = driver.tables[0][0][:1]
    stored = backend.read(0, block, Tier.DEVICE, 16)
    assert len(stored) == 16 * group.bytes_per_token
    backend.write(0, block, Tier.DEVICE, bytes(len(stored)))
    assert not torch.equal(driver.logprobs(driver.chunk(0, 16, prompt[16:])), expected)
    backend.write(0, BlockId(200), Tier.DEVICE, stored)
    driver.tables[0][0][0] = BlockId(200)
    assert torch.equal(driver.logprobs(driver.chunk(0, 16, prompt[16:])), expected)
