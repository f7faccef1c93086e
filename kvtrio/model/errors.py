"""Errors that a user can cause, and how text of unknown origin may appear in them."""

import re

MAX_NAME = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


class ModelFileError(ValueError):
    """A model file is damaged, hostile or unsupported; the message is one clear line."""


class FetchError(ValueError):
    """A model could not be brought here; the message is one clear line."""


def safe_name(text: str) -> str:
    """A name from outside as it may be printed: at most 64 of the characters A-Za-z0-9_.-

    Anything else (control codes, terminal escapes, whole sentences) becomes "?".
    """
    short = _UNSAFE.sub("?", text[:MAX_NAME])
    return short if len(text) <= MAX_NAME else short[: MAX_NAME - 3] + "..."
