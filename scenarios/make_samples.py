"""Writes the two sample traces of this folder: made-up traffic in the formats of public traces.

Nothing of the public traces is in them. Run it in this folder: `python make_samples.py`.
"""

import json
import math
from datetime import datetime, timedelta
from pathlib import Path
from random import Random

BLOCK = 512
NUM_REQUESTS = 300
MOONCAKE = "mooncake-sample.jsonl"
AZURE = "azure-sample.csv"


def spread(random: Random, median: float, sigma: float) -> int:
    """A log-normal length (Box and Muller)."""
    radius = math.sqrt(-2 * math.log(1 - random.random()))
    normal = radius * math.cos(2 * math.pi * random.random())
    return max(1, round(median * math.exp(sigma * normal)))


def mooncake(seed: int = 1) -> str:
    """Conversations that grow by turns; two system prompts of two blocks each."""
    random, next_id, lines = Random(seed), 4, []
    conversations: list[tuple[list[int], int]] = []
    at_ms = 0
    for _ in range(NUM_REQUESTS):
        at_ms += round(-math.log(1 - random.random()) * 1500)
        if conversations and random.random() < 0.6:
            blocks, length = conversations.pop(int(random.random() * len(conversations)))
        else:
            system = int(random.random() * 2)
            blocks, length = [2 * system, 2 * system + 1], 2 * BLOCK
        length = min(length + spread(random, 1500, 1.0), 60_000)
        added = range(next_id, next_id + -(-length // BLOCK) - len(blocks))
        next_id += len(added)
        ids, output = [*blocks, *added], spread(random, 250, 0.8)
        line = {"timestamp": at_ms, "input_length": length, "output_length": output}
        lines.append(json.dumps(line | {"hash_ids": ids}))
        # The last block is not full: with other tokens behind these it has another id.
        conversations.append((ids[: length // BLOCK], length + output))
    return "\n".join(lines) + "\n"


def azure(seed: int = 2) -> str:
    random, lines = Random(seed), ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    at = datetime(2026, 1, 5, 9, 0, 0)
    for _ in range(NUM_REQUESTS):
        at += timedelta(seconds=-math.log(1 - random.random()) * 2)
        context = min(spread(random, 1000, 0.9), 14_000)
        lines.append(f"{at:%Y-%m-%d %H:%M:%S.%f}0,{context},{spread(random, 130, 0.9)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(MOONCAKE).write_text(mooncake(), encoding="utf-8")
    Path(AZURE).write_text(azure(), encoding="utf-8")
