"""A backend whose steps are work of a fixed amount, without the interpreter's lock; it measures
what happens between them. Loaded by ``between_steps.py`` as a plug-in."""

import ctypes
import json
import os
import threading
import time
from pathlib import Path

from kvtrio.backends.sim import SimBackend
from kvtrio.core.batch import Sampled, StepResult

FIRST_TOKEN, NUM_TOKENS = 500, 997
"""Ordinary words in every vocabulary."""


class Paced:
    """``Backend``; settings come from the environment, the measurements go to a file at the end."""

    def __init__(self, info):
        self.info = info
        self.work = ctypes.CDLL(os.environ["PACED_LIBRARY"]).work
        self.work.argtypes = [ctypes.c_long]
        self.per_s = self._calibrated()
        self.base_s, self.row_s = map(float, os.environ["PACED_STEP"].split())
        self.rows = []
        self.loop_clock = time.pthread_getcpuclockid(threading.main_thread().ident)
        self.number = 0
        self.ended = None

    @classmethod
    def load(cls, file, spec, settings):
        return cls(SimBackend.load(file, spec, settings).info)

    def _calibrated(self):
        """Multiplications per second, at the best of half a second: others may be busy."""
        best = 1e9
        for _ in range(100):
            began = time.perf_counter()
            self.work(50_000)
            best = min(best, time.perf_counter() - began)
            time.sleep(0.005)
        return 50_000 / best

    def step(self, batch):
        began = time.perf_counter()
        num_rows = len(batch.chunks)
        is_decode = all(len(chunk.token_ids) == 1 for chunk in batch.chunks)
        if self.ended is not None and is_decode:
            idle, own = began - self.ended[0], time.thread_time() - self.ended[1]
            loop = time.clock_gettime(self.loop_clock)
            self.rows.append((num_rows, began, idle, own, loop))
        self.work(int((self.base_s + self.row_s * num_rows) * self.per_s))
        sampled = tuple(map(self._sampled, batch.chunks))
        self.ended = time.perf_counter(), time.thread_time()
        return StepResult(sampled)

    def _sampled(self, chunk):
        if chunk.sample is None:
            return None
        self.number += 1
        return Sampled(FIRST_TOKEN + self.number % NUM_TOKENS)

    def load_adapter(self, data):
        return 1

    def unload_adapter(self, adapter_id):
        pass

    def close(self):
        Path(os.environ["PACED_RESULT"]).write_text(json.dumps(self.rows))
