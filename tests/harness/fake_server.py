"""A server in a process of its own that answers like llama-server, a thousand tokens a second:
python fake_server.py PORT [crash | stubborn | child | refuse | silent | die]

crash: says why and ends at once. stubborn: ignores SIGTERM. child: starts another process in a
process group of its own. refuse: no prompt over 100 tokens. silent: never healthy. die: ends in the
middle of the first answer of more than one token.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOW = sys.argv[2] if len(sys.argv) > 2 else ""
LONGEST_TAKEN = 100
TOKEN_S = 0.001


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/props":
            self.answer(200, {"build_info": "fake 1"})
        else:
            self.answer(503 if HOW == "silent" else 200, {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self.answer(200, {"tokens": list(range(len(body["content"].split())))})
        elif HOW == "refuse" and len(body["prompt"]) > LONGEST_TAKEN:
            self.answer(400, {"error": {}})
        else:
            self.generate(body["n_predict"])

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def generate(self, num_tokens: int) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(num_tokens):
            time.sleep(TOKEN_S)
            self.wfile.write(b'data: {"content":"a","stop":false}\n\n')
            if HOW == "die" and num_tokens > 1:
                os._exit(3)
        final = {"stop": True, "tokens_predicted": num_tokens}
        self.wfile.write(b"data: " + json.dumps(final).encode() + b"\n\n")

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    if HOW == "crash":
        sys.exit("no such model")
    if HOW == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if HOW == "child":
        sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
        subprocess.Popen(sleeper, process_group=0)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
