"""What ends a comparison, or one cell of it."""


class BenchError(Exception):
    """The comparison cannot go on; the message is one clear line."""


class Refused(Exception):
    """A server answered a request with an error; its cell in the table stays empty."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status
