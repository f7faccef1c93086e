"""How many conversations stay in RAM, with a share for each kind of state and with one budget:
python tests/bench/shared_ram.py

The bookkeeping alone, with the sizes of real models; no model is computed. Conversations of one
length come one after the other, half as many again as fill RAM; then each has a turn, the last one
first. What counts is how many of the old tokens these turns find, and how many find all but 64.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.core_server import Server, words
from kvtrio.backends.base import BackendSettings
from kvtrio.backends.groups import HostSizes, host_sizes, ram_budget
from kvtrio.core.config import Group
from kvtrio.core.types import StateClass

BLOCK, PLACES, CONTEXT, RAM = 16, 1, 8192, 512 << 20
SETTINGS = BackendSettings(
    num_blocks=PLACES * (CONTEXT // BLOCK + 1),
    host_bytes=RAM,
    num_state_slots=2 * PLACES,
    max_context=CONTEXT,
)
FULL, WINDOW, STATE = StateClass.TOKEN, StateClass.WINDOW, StateClass.POINT
MODELS = {
    "Gemma 3 270M": (Group(FULL, None, 3 * 1024), Group(WINDOW, 512, 15 * 1024)),
    "LFM2 1.2B": (Group(FULL, None, 6 * 2048), Group(STATE, None, 0, 10 * 2 * 2048 * 4)),
    "Qwen3.5 0.8B": (
        Group(FULL, None, 6 * 2048),
        Group(STATE, None, 0, 18 * (3 * 6144 + 16 * 128 * 128) * 4),
    ),
}
LENGTHS = (200, 1000, 3000)


def server(groups: tuple[Group, ...], sizes: HostSizes) -> Server:
    has_states = any(group.bytes_per_state for group in groups)
    return Server(
        check=lambda core: None,
        groups=groups,
        block_size=BLOCK,
        num_places=PLACES,
        max_context=CONTEXT,
        max_batch_tokens=512,
        num_host_blocks=sizes.num_blocks,
        num_host_window_blocks=sizes.num_parts,
        num_state_slots=2 * PLACES if has_states else 0,
        num_host_state_slots=sizes.num_slots,
        ram=sizes.ram,
    )


def kept(groups: tuple[Group, ...], sizes: HostSizes, num_tokens: int) -> tuple[float, int]:
    """Share of all old tokens, and conversations."""
    count = max(8, int(1.5 * RAM / (num_tokens * sum(g.bytes_per_token for g in groups[:1]))))
    count = min(count, 400)
    one = server(groups, sizes)
    for number in range(count):
        one.ask(words(number + 1, num_tokens), max_new_tokens=8)
    num_found = num_whole = 0
    for number in reversed(range(count)):
        turn = (*words(number + 1, num_tokens), *(7,) * 8, *words(5000 + number, 20))
        finished = one.ask(turn, max_new_tokens=8)
        num_found += finished.num_cached_tokens
        num_whole += finished.num_computed_tokens <= 20 + 64
    return num_found / (count * (num_tokens + 8)), num_whole


def main() -> None:
    print(f"{RAM >> 20} MiB of RAM: old tokens found (whole conversations)    shares    one budget")
    for name, groups in MODELS.items():
        for num_tokens in LENGTHS:
            line = f"{name:<14} {num_tokens:>5} tokens each"
            for ram in (None, ram_budget(groups, SETTINGS)):
                share, whole = kept(groups, host_sizes(groups, SETTINGS, ram), num_tokens)
                line += f"{share:>15.0%} ({whole:>3})"
            print(line)


if __name__ == "__main__":
    main()
