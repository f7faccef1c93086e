"""What lies between two steps: python tests/bench/between_steps.py [MODEL]

The real server and routes; in place of the model two threads that work for 2.1 ms and 0.4 ms for
each further row, without the interpreter's lock, as the native backend does. Printed over steps
that only decode: how long the model thread idles between two steps (the median, and what nine of
ten do not exceed), processor time of the model thread between steps and of the event loop per
token, and tokens per second as a share of what the steps alone would allow. Needs a C compiler.
"""

import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.process import command

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "paced"
BASE_S, ROW_S = 0.0017, 0.0004
NUM_TOKENS = {1: 1000, 4: 400, 16: 250}
ROUTES = {
    "/completion": {"prompt": "Hello there", "n_predict": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0},
}


def build() -> dict[str, str]:
    """Compile the work and write the plug-in's entry point; returns environment variables."""
    info = BUILD / "paced-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paced\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvtrio.backends]\npaced = paced_backend:Paced\n")
    library = BUILD / "work.so"
    source = HERE / "paced" / "work.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", library, source], check=True)
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(BUILD), str(HERE / "paced"), *inherited)),
        "PACED_LIBRARY": str(library),
        "PACED_RESULT": str(BUILD / "result.json"),
        "PACED_STEP": f"{BASE_S} {ROW_S}",
    }


def started(model: str, environment: dict[str, str]) -> tuple[subprocess.Popen, int]:
    """The server and its port."""
    flags = ["serve", model, "--backend", "paced", "--port", "0", "-np", "16", "-c", "2048"]
    server = subprocess.Popen(command(*flags), stderr=subprocess.PIPE, env=environment)
    for line in server.stderr:
        event = json.loads(line) if line.startswith(b"{") else {}
        if event.get("event") == "server.start":
            return server, event["port"]
    raise SystemExit("the server did not start")


def stream(port: int, route: str, num_streams: int) -> float:
    """Open the streams and read them to their ends; returns this process's time per token."""
    num_tokens = NUM_TOKENS[num_streams]
    asked = {**ROUTES[route], "stream": True, "ignore_eos": True}
    asked |= {key: num_tokens for key in ("n_predict", "max_tokens") if key in asked}
    body = json.dumps(asked).encode()
    head = f"POST {route} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    poll, open_ones = select.epoll(), {}
    for _ in range(num_streams):
        one = socket.create_connection(("127.0.0.1", port))
        one.sendall(head + body)
        poll.register(one, select.EPOLLIN)
        open_ones[one.fileno()] = one
    while open_ones:
        for fd, _ in poll.poll():
            data = open_ones[fd].recv(65536)
            if not data or data.endswith(b"0\r\n\r\n"):
                poll.unregister(fd)
                open_ones.pop(fd).close()
    return time.process_time() / (num_streams * num_tokens)


def row(model: str, route: str, num_streams: int, environment: dict[str, str]) -> str:
    server, port = started(model, environment)
    stream(port, route, num_streams)
    stream(port, route, num_streams)
    server.send_signal(signal.SIGTERM)
    server.communicate()
    steps = json.loads((BUILD / "result.json").read_text())
    # The second time, when all is warm; without its edges.
    steps = [step for step in steps if step[0] == num_streams]
    steps = steps[len(steps) // 2 + 10 : -10]
    idle, own = ([step[i] * 1e6 for step in steps] for i in (2, 3))
    (_, first_s, *_, first_loop), (_, last_s, *_, last_loop) = steps[0], steps[-1]
    num_tokens = (len(steps) - 1) * num_streams
    rate = num_tokens / (last_s - first_s)
    share = rate * (BASE_S + ROW_S * num_streams) / num_streams
    loop = (last_loop - first_loop) * 1e6 / num_tokens
    return (
        f"{route:<21} {num_streams:>7} {statistics.median(idle):>9.0f} "
        f"{statistics.quantiles(idle, n=10)[-1]:>8.0f} {statistics.median(own):>9.0f} "
        f"{loop:>9.0f} {rate:>9.0f} {share:>7.1%}"
    )


def main() -> None:
    environment, model = build(), (*sys.argv[1:], "smollm2")[0]
    print("                                   idle     idle  model cpu  loop cpu")
    print("route                 streams    p50 us   p90 us  us/step  us/token  tokens/s   share")
    for route in ROUTES:
        for num_streams in NUM_TOKENS:
            print(row(model, route, num_streams, environment), flush=True)


if __name__ == "__main__":
    main()
