"""How late a token is at its client: python tests/bench/streams.py [STREAMS] [WAITING]

The whole server on the sim backend in real time, its clients in a process of their own. Each
stream gets ten tokens a second; streams are staggered over steps of 10 ms. Printed: from the end
of the step that made a token to its arrival at the client. Then WAITING more streams are opened,
most of which wait for a place, and all must end whole.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import trio
from attrs import define, field

from harness.real_http import running
from harness.serving import serving
from harness.virtual import SimSettings
from kvtrio.core.batch import Batch
from kvtrio.core.policy import Plan, Share, View

NUM_TOKENS, STEP_S, NUM_GROUPS = 60, 0.01, 10


@define
class Staggered:
    """Each step decodes one group of the streams, in turn."""

    turn: int = 0

    def plan(self, view: View) -> Plan:
        self.turn += 1
        mine = self.turn % NUM_GROUPS
        decoding = [r for r in view.decoding if r.request_id % NUM_GROUPS == mine]
        # Not by a budget, which takes it that all who decode do in each step, and lets few start.
        reading = (*view.reading, *view.waiting[: view.num_free_places])
        return Plan([Share(r.request_id, r.num_missing) for r in (*decoding, *reading)])


@define
class StepCost:
    """Constant; remembers when each request's tokens were made."""

    made_s: dict[int, list[float]] = field(factory=dict)
    clock: Callable[[], float] = time.monotonic

    def __call__(self, batch: Batch) -> float:
        end_s = self.clock() + STEP_S
        for chunk in batch.chunks:
            if chunk.sample is not None:
                self.made_s.setdefault(chunk.request_id, []).append(end_s)
        return STEP_S


CLIENT = """
import json, sys, time, trio
port, streams, tokens = map(int, sys.argv[1:])
asked = {"prompt": "Hi", "max_tokens": tokens, "stream": True, "ignore_eos": True}
body = json.dumps(asked).encode()
head = b"POST /v1/completions HTTP/1.1\\r\\nhost: a\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body)
arrivals, whole = {}, 0

async def one(number, stream):
    global whole
    mine = arrivals.setdefault(number, [])
    tail = b""
    while data := await stream.receive_some(65536):
        now = time.monotonic()
        mine += [now] * data.count(b'"finish_reason":null')
        tail = (tail + data)[-200:]
        if b"[DONE]" in tail:
            whole += 1
            break
    await trio.aclose_forcefully(stream)

async def main():
    async with trio.open_nursery() as nursery:
        for number in range(streams):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(head + body)
            nursery.start_soon(one, number, stream)
            await trio.sleep(0.005)
    print(json.dumps({"arrivals": list(arrivals.values()), "whole": whole}))

trio.run(main)
"""


async def play(port: int, num_streams: int) -> dict:
    command = [sys.executable, "-c", CLIENT, str(port), str(num_streams), str(NUM_TOKENS)]
    result = await trio.run_process(command, capture_stdout=True, stderr=subprocess.DEVNULL)
    return json.loads(result.stdout)


def lateness(made: list[list[float]], arrived: list[list[float]]) -> list[float]:
    """Milliseconds between the end of a token's step and its arrival, all tokens."""
    pairs = zip(made, arrived, strict=True)
    late = [b - a for one, other in pairs for a, b in zip(one, other, strict=False)]
    return sorted(1e3 * seconds for seconds in late)


async def main() -> None:
    num_streams, num_waiting = (*map(int, sys.argv[1:]), *(200, 1000)[len(sys.argv) - 1 :])
    cost = StepCost()
    sim = SimSettings(
        num_places=num_streams,
        max_waiting=2 * num_waiting,  # one tenant may not fill it
        max_batch_tokens=4096,
        policy=Staggered(),
        cost=cost,
        is_virtual=False,
    )
    async with serving(sim=sim) as server, running(server.app) as http:
        told = await play(http.port, num_streams)
        late = lateness(list(cost.made_s.values()), told["arrivals"])
        cuts = [late[int(share * (len(late) - 1))] for share in (0.5, 0.9, 0.99, 1.0)]
        print("streams  tokens   p50 ms   p90 ms   p99 ms   max ms   whole")
        cells = "".join(f"{cut:>9.1f}" for cut in cuts)
        print(f"{num_streams:>7} {len(late):>7}{cells} {told['whole']:>7}")
        told = await play(http.port, num_streams + num_waiting)
        total = num_streams + num_waiting
        print(f"{total} streams, {num_waiting} at first waiting: {told['whole']} whole")
        server.nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
