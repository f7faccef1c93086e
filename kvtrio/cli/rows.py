"""Rows of words and numbers, for people and as JSON."""

import json

Rows = dict[str, object]
"""By name, in the order in which they are shown."""


def print_rows(rows: Rows, *, as_json: bool) -> None:
    print(json.dumps(rows, indent=1) if as_json else shown(rows))


def shown(rows: Rows) -> str:
    """One line per row, names padded to one width."""
    width = max(map(len, rows))
    return "\n".join(f"{name.ljust(width)}  {_text(value)}" for name, value in rows.items())


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(number)}" for name, number in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
