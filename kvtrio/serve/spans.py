"""Where the answers of a conversation stand in its prompt.

The conversation is rendered once more with marks in place of its answers. Between the marks both
renderings must be the same, and in place of each mark there must be just the answer, as it came or
as templates trim it. From where that ends to be so, nothing is taken for an answer.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import evolve, frozen

from kvtrio.model.template import TemplateError
from kvtrio.serve.outline import Outline

FIRST_MARK, LAST_MARK = 0xE000, 0xF8FF
"""Code points without a meaning; a mark is made of one that does not occur."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
END_OF_THOUGHT = "</think>"
Span = tuple[int, int]


@frozen
class _Answer:
    """A text that a mark stands for."""

    message_index: int
    text: str

    def forms(self) -> Iterator[str]:
        """How templates write it: whole, trimmed, without its thoughts."""
        for text in (self.text, self.text.rpartition(END_OF_THOUGHT)[2]):
            yield text
            yield text.strip()
            yield text.lstrip()
            yield text.rstrip()


def answer_spans(outline: Outline) -> list[Span]:
    """Parts of ``outline.text``, in characters and ascending, each within one answer, together with
    the white space before it: some models begin with a space that the template brings, too."""
    used = set(outline.text)
    mark = next((c for c in map(chr, range(FIRST_MARK, LAST_MARK)) if c not in used), None)
    if mark is None:
        return []
    answers: list[_Answer] = []
    messages = [
        _marked(message, index, mark, answers) if message["role"] == "assistant" else message
        for index, message in enumerate(outline.request.messages)
    ]
    try:
        marked = outline.template.render(evolve(outline.request, messages=messages))
    except TemplateError:
        return []
    return _aligned(outline.text, re.split(f"{mark}([0-9]+){mark}", marked), answers)


def _marked(
    message: dict[str, Any], index: int, mark: str, answers: list[_Answer]
) -> dict[str, Any]:
    """A copy of the message with marks for its texts, which are added to ``answers``."""

    def put(text: Any) -> Any:
        if not isinstance(text, str) or not text.strip():
            return text
        answers.append(_Answer(index, text))
        return f"{mark}{len(answers) - 1}{mark}"

    content = message.get("content")
    if isinstance(content, list):
        marked: Any = [{**part, "text": put(part.get("text"))} for part in content]
    else:
        marked = put(content)
    thoughts = {name: put(message[name]) for name in THOUGHTS if name in message}
    return {**message, "content": marked, **thoughts}


def _aligned(text: str, parts: Sequence[str], answers: Sequence[_Answer]) -> list[Span]:
    """``parts``: what stands between marks, and their numbers, by turns."""
    if not text.startswith(parts[0]):
        return []
    at, last_message = len(parts[0]), None
    spans: list[Span] = []
    for number, following in zip(parts[1::2], parts[2::2], strict=True):
        answer = answers[int(number)]
        end = _end_of(answer, text, at, following)
        if end is None:
            return spans
        if answer.message_index == last_message:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((_with_space(text, at, spans), end))
        at, last_message = end + len(following), answer.message_index
    if at < len(text):  # the beginning of an answer that the caller wants to be continued
        spans.append((_with_space(text, at, spans), len(text)))
    return spans


def _end_of(answer: _Answer, text: str, at: int, following: str) -> int | None:
    for form in answer.forms():
        end = at + len(form)
        if text.startswith(form, at) and text.startswith(following, end):
            return end
    return None


def _with_space(text: str, at: int, spans: Sequence[Span]) -> int:
    first = spans[-1][1] if spans else 0
    while at > first and text[at - 1].isspace():
        at -= 1
    return at
