"""A core that answers each request to its end, step by step."""

from harness.core_fakes import answer, make_core, submit
from kvtrio.core import invariants
from kvtrio.core.events import Finished


def words(seed, num_tokens):
    return tuple(1000 * seed + i for i in range(num_tokens))


class Server:
    """A core that answers each request to its end."""

    def __init__(self, *, check=invariants.check, **sizes):
        self.check = check
        self.core = make_core(**{"max_context": 64, "num_places": 1, **sizes})
        self.number = 0
        self.now = 0.0

    def ask(self, token_ids, **changes):
        """Run one request alone; its ``Finished``."""
        (finished,) = self.ask_all([(token_ids, changes)])
        return finished

    def ask_all(self, requests):
        ids = [self.send(token_ids, **changes) for token_ids, changes in requests]
        ended = self.run()
        return [ended[request_id] for request_id in ids]

    def send(self, token_ids, **changes):
        self.number += 1
        event = submit(self.number, token_ids=tuple(token_ids), **{"max_new_tokens": 3, **changes})
        assert self.core.handle(event, self.now) == []
        return event.request_id

    def run(self):
        ended = {}
        while self.core.has_work:
            self.now += 1.0
            batch = self.core.schedule(self.now)
            self.check(self.core)
            for output in self.core.update(batch, answer(batch), self.now):
                if isinstance(output, Finished):
                    ended[output.request_id] = output
            self.check(self.core)
        return ended
