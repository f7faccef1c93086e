"""Messages that are made anew in every step, above all those of which it has one per request.

To the type checker they are as frozen as all others. At run time nothing guards their fields:
attrs guards them by setting each one the long way round, and with hundreds of rows that was a
quarter of what a step costs the core.
"""

from functools import partial
from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from attrs import frozen as message
else:
    message = partial(define, unsafe_hash=True)

__all__ = ["message"]
