"""What counts as a number on the command line: what it says is what is meant.

cyclopts rounds a fraction where a whole number is wanted, so 1.5 MiB would silently be 2; and takes
``inf`` for a number of seconds. Whole numbers stay below 2^53: nothing here counts more, and sums
of them stay what 64 bits hold.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, get_args

from cyclopts import Token, convert

LARGEST = 1 << 53
_WHOLE = re.compile(r"[+-]?[0-9]{1,16}", re.ASCII)


def numeric(type_: Any, tokens: Sequence[Token]) -> Any:
    """cyclopts' own conversion, behind a look at numbers. Raises ValueError."""
    if int in (type_, *get_args(type_)) and not all(_is_whole(token.value) for token in tokens):
        raise ValueError("this must be a whole number.")
    found = convert(type_, tokens)
    if isinstance(found, float) and not math.isfinite(found):
        raise ValueError("this must be a finite number.")
    return found


def _is_whole(text: str) -> bool:
    return _WHOLE.fullmatch(text) is not None and abs(int(text)) <= LARGEST
