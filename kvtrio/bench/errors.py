"""What ends a comparison, or one cell of it."""


class BenchError(Exception):
    """The comparison cannot go on; the message is one clear line."""


class NotMeasured(Exception):
    """A server did not do what one measure needs; its cell in the table stays empty."""
