"""Where in a conversation a token position lies.

Nothing is kept for it but what a request brought. The search renders the conversation's beginnings,
a few of them, and only when an answer has to explain a divergence.
"""

from collections.abc import Sequence

from attrs import evolve, frozen

from kvtrio.model.template import ChatTemplate, RenderRequest, TemplateError
from kvtrio.obs.words import Section
from kvtrio.serve.served import TextTokenizer

ROLES = {
    "system": Section.SYSTEM,
    "developer": Section.SYSTEM,
    "user": Section.USER,
    "assistant": Section.ASSISTANT,
    "tool": Section.TOOL,
}


@frozen
class Place:
    """A part of a prompt."""

    section: Section
    message_index: int | None = None
    """None: no message."""


@frozen(eq=False)
class Outline:
    """A prompt's text and the messages it was rendered from."""

    text: str
    template: ChatTemplate
    request: RenderRequest

    def place(self, ids: tuple[int, ...], position: int, tokenizer: TextTokenizer) -> Place:
        """The part that holds the token at ``position`` of ``ids``."""
        # From the end, since a start token may stand before the text.
        rest = sum(len(tokenizer.token_bytes(token)) for token in ids[position:])
        raw = self.text.encode("utf-8", "replace")
        start = len(raw[: max(len(raw) - rest, 0)].decode("utf-8", "ignore"))
        messages = self.request.messages
        index = self._first_beyond(start, len(messages))
        if index == len(messages):
            return Place(Section.TAIL)
        return Place(ROLES.get(messages[index]["role"], Section.OTHER), index)

    def _first_beyond(self, start: int, num_messages: int) -> int:
        """The first message whose end lies behind character ``start``, by halving."""
        low, high = 0, num_messages
        while low < high:
            middle = (low + high) // 2
            if self._num_common(middle + 1) > start:
                high = middle
            else:
                low = middle + 1
        return low

    def _num_common(self, num_messages: int) -> int:
        """Characters that the prompt shares with its first messages alone."""
        beginning = evolve(
            self.request,
            messages=self.request.messages[:num_messages],
            add_generation_prompt=False,
        )
        try:
            text = self.template.render(beginning)
        except TemplateError:  # a template may insist on who speaks last
            return 0
        return num_shared(text, self.text)


def num_shared(one: Sequence[object], two: Sequence[object]) -> int:
    """Length of the common beginning, in a few comparisons of long parts."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
