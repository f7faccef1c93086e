"""How a broken rule is told."""


class InvariantError(Exception):
    """The core's state contradicts its rules: a bug of ours."""


def require(holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantError(rule)
