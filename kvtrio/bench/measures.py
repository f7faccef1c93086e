"""What is measured, each as one number of one server. Nothing a server says of itself counts."""

from collections.abc import Awaitable, Callable

import trio
from attrs import frozen

from kvtrio.bench.completion import Ask, Timing, complete, per_second, tokenise
from kvtrio.bench.errors import BenchError, NotMeasured
from kvtrio.bench.http import Client
from kvtrio.bench.prompts import text

TOKENS_PER_S = "tokens/s"
SECONDS = "s"
MILLISECONDS = "ms"
MIB = "MiB"
NEW_TOKENS = 30
"""What a returning conversation adds."""
SHORT_PROMPT = 32
Run = Callable[[Client, str], Awaitable[float]]


@frozen
class Measure:
    """``run(client, label)`` gives the value. The label is new in each round and equal for both
    servers, which so get the same texts. Raises ``NotMeasured``, ``BenchError`` or ``OSError``."""

    name: str
    unit: str
    run: Run


@frozen(kw_only=True)
class Sizes:
    """How much is measured, in tokens."""

    prefills: tuple[int, ...] = (128, 512, 2048, 6000)
    answer: int = 128
    context: int = 4096
    context_answer: int = 64
    streams: tuple[int, ...] = (4, 8, 16)
    conversation: int = 3000


QUICK = Sizes(
    prefills=(128, 512),
    answer=32,
    context=1024,
    context_answer=32,
    streams=(4, 16),
    conversation=512,
)


def measures(sizes: Sizes) -> list[Measure]:
    """All measures, in the order of the table."""
    context, turn = sizes.context, sizes.conversation
    return [
        *(Measure(f"prefill {n:,}", TOKENS_PER_S, prefill(n)) for n in sizes.prefills),
        Measure("decode", TOKENS_PER_S, decode(SHORT_PROMPT, sizes.answer)),
        Measure(f"decode at {context:,}", TOKENS_PER_S, decode(context, sizes.context_answer)),
        *(Measure(f"{n} streams", TOKENS_PER_S, streams(n, sizes.answer)) for n in sizes.streams),
        Measure(f"first token after {turn:,} + {NEW_TOKENS}", MILLISECONDS, returning(turn)),
    ]


def prefill(num_tokens: int) -> Run:
    """Tokens of a prompt per second, from sending it to the first token of the answer."""

    async def run(client: Client, label: str) -> float:
        ids = await prompt(client, label, num_tokens)
        timing = await complete(client, Ask(token_ids=ids, num_tokens=1))
        return per_second(num_tokens, timing.wait_s)

    return run


def decode(num_prompt_tokens: int, num_tokens: int) -> Run:
    """Tokens per second of one answer, from its first token to its last."""

    async def run(client: Client, label: str) -> float:
        ids = await prompt(client, label, num_prompt_tokens)
        return (await complete(client, Ask(token_ids=ids, num_tokens=num_tokens))).rate

    return run


def streams(count: int, num_tokens: int) -> Run:
    """Tokens per second of all streams together, after the first of each, from the first token that
    any of them got to the last."""

    async def run(client: Client, label: str) -> float:
        prompts = [await prompt(client, f"{label} {i}", SHORT_PROMPT) for i in range(count)]
        timings = await together(client, prompts, num_tokens)
        last_s, first_s = max(t.last_s for t in timings), min(t.first_s for t in timings)
        return per_second(count * (num_tokens - 1), last_s - first_s)

    return run


def returning(num_tokens: int) -> Run:
    """Milliseconds to the first token of a prompt that begins with the whole one before it."""

    async def run(client: Client, label: str) -> float:
        ids = await prompt(client, label, num_tokens + NEW_TOKENS)
        first = Ask(token_ids=ids[:num_tokens], num_tokens=1, may_reuse=True)
        await complete(client, first)
        again = Ask(token_ids=ids, num_tokens=1, may_reuse=True)
        return 1e3 * (await complete(client, again)).wait_s

    return run


async def prompt(client: Client, label: str, num_tokens: int) -> list[int]:
    """The first tokens of a text; every word is at least one."""
    return (await tokenise(client, text(label, num_tokens)))[:num_tokens]


async def together(client: Client, prompts: list[list[int]], num_tokens: int) -> list[Timing]:
    """All at once. The first failure ends the others, and is raised as itself, not as a group."""
    timings: list[Timing] = []
    failures: list[Exception] = []

    async def one(ids: list[int], nursery: trio.Nursery) -> None:
        try:
            timings.append(await complete(client, Ask(token_ids=ids, num_tokens=num_tokens)))
        except (BenchError, NotMeasured, OSError) as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for ids in prompts:
            nursery.start_soon(one, ids, nursery)
    if failures:
        raise failures[0]
    return timings
