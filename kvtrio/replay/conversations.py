"""Which requests are one conversation: by its name, or because a prompt goes on from another."""

from array import array

from attrs import define, field, frozen

from kvtrio.replay.likeness import Span

MIN_COMMON = 16
"""Tokens in common that make two prompts one conversation."""


@frozen
class Turn:
    """A request's place in its conversation."""

    session: int
    number: int
    think_s: float | None
    """Since the end of the turn before; None: there was none, or it still runs."""


@define(eq=False)
class _Account:
    num_turns: int = 0
    num_running: int = 0
    ended_s: float | None = None


@define(eq=False)
class Conversations:
    """Sessions by number; requests are numbered in the order of ``begin``."""

    _accounts: list[_Account] = field(init=False, factory=list)
    _named: dict[bytes, int] = field(init=False, factory=dict)
    _session_of: "array[int]" = field(init=False, factory=lambda: array("I"))
    _num_prompt: "array[int]" = field(init=False, factory=lambda: array("I"))
    """By request, as ``_session_of``."""

    def num_prompt_tokens(self, request: int) -> int:
        return self._num_prompt[request]

    def begin(self, name: bytes | None, spans: list[Span], now_s: float) -> Turn:
        """The next request's turn. ``spans``: what its prompt is made of."""
        num_tokens = sum(span.length for span in spans)
        session = self._named_session(name) if name is not None else self._found(spans, num_tokens)
        account = self._accounts[session]
        is_next = account.ended_s is not None and not account.num_running
        think_s = max(now_s - (account.ended_s or 0.0), 0.0) if is_next else None
        turn = Turn(session, account.num_turns, think_s)
        account.num_turns += 1
        account.num_running += 1
        self._session_of.append(session)
        self._num_prompt.append(num_tokens)
        return turn

    def end(self, session: int, now_s: float) -> None:
        """One of its requests has ended."""
        self._accounts[session].num_running -= 1
        self._accounts[session].ended_s = now_s

    def _named_session(self, name: bytes) -> int:
        if name not in self._named:
            self._named[name] = self._new()
        return self._named[name]

    def _found(self, spans: list[Span], num_tokens: int) -> int:
        """That of the request whose whole prompt the new one begins with, or which is begun anew:
        an answer is asked for again, or turns were taken away."""
        first = spans[0]
        if first.key is None or first.length < MIN_COMMON:
            return self._new()
        if first.length == num_tokens or first.length >= self._num_prompt[first.key]:
            return self._session_of[first.key]
        return self._new()

    def _new(self) -> int:
        self._accounts.append(_Account())
        return len(self._accounts) - 1
