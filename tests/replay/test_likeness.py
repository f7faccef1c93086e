"""Finding what a text has in common with earlier ones, to the token."""

from random import Random

import pytest

from kvtrio.replay.likeness import GRAM, MIN_RUN, Likeness, Span


def texts(rng: Random, number: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Texts that go on from each other, part anywhere, and quote each other."""
    made: list[tuple[int, ...]] = [()]
    for _ in range(number):
        base, other = rng.choice(made), rng.choice(made)
        new = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 60))]
        at = rng.randrange(len(other) + 1)
        made.append((*base[: rng.randrange(len(base) + 1)], *new, *other[at : at + 100]))
    return made[1:]


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )


@pytest.mark.parametrize("vocabulary", [2, 50, 30_000])
def test_spans_are_the_text(vocabulary: int) -> None:
    """Every span that names a text is equal to it, and together they have no gap."""
    rng = Random(vocabulary)
    likeness, known = Likeness(10**6, 1000), dict[int, tuple[int, ...]]()
    for number, text in enumerate(texts(rng, 150, vocabulary)):
        position = 0
        for span in likeness.spans(text):
            if span.key is not None:
                source = known[span.key][span.start : span.start + span.length]
                assert source == text[position : position + span.length]
            position += span.length
        assert position == len(text)
        known[number] = text
        likeness.add(number, text)


@pytest.mark.parametrize("vocabulary", [2, 50])
def test_the_common_beginning_is_exact(vocabulary: int) -> None:
    """It is as long as with any text that is known, however short, and what follows is new."""
    rng, likeness = Random(vocabulary), Likeness(10**6, 1000)
    known: list[tuple[int, ...]] = []
    for number, text in enumerate(texts(rng, 150, vocabulary)):
        longest = max((common(text, other) for other in known), default=0)
        first, *rest = likeness.spans(text)
        found = 0 if first.key is None else first.length
        assert found == longest
        if found < len(text):
            assert ([first, *rest][1 if found else 0]).key is None
        known.append(text)
        likeness.add(number, text)


def test_a_moved_passage_is_found_whole() -> None:
    """Not only its indexed parts: it is widened to both sides."""
    rng, likeness = Random(3), Likeness(10**6, 1000)
    old = tuple(rng.randrange(30_000) for _ in range(300))
    likeness.add(0, old)
    new = (1, 2, 3, *old[101:181], 4, 5)
    assert likeness.spans(new) == [Span(None, 0, 3), Span(0, 101, 80), Span(None, 0, 2)]
    assert GRAM < MIN_RUN < 80


def test_memory_is_bounded() -> None:
    """What was not used for longest goes, with all that was noted of it."""
    likeness = Likeness(1000, 100)
    for number in range(50):
        likeness.add(number, [number * 100 + each for each in range(100)])
        likeness.spans(range(100))  # the first one is in use
    assert likeness.num_tokens <= 1000
    assert likeness.spans(range(100)) == [Span(0, 0, 100)]
    assert likeness.spans(range(1000, 1100)) == [Span(None, 0, 100)]
    assert len(likeness._grams) <= 1000 / GRAM


def test_a_text_that_went_on_is_kept_once() -> None:
    """A conversation takes the memory of its last turn."""
    likeness = Likeness(10**6, 100)
    for turn in range(1, 20):
        likeness.add(turn, range(turn * 50))
    assert likeness.num_tokens == 19 * 50
    assert likeness.spans(range(60)) == [Span(19, 0, 60)]


def test_a_text_in_too_many_pieces_ends_as_new() -> None:
    """There is a limit to the pieces of a prompt."""
    likeness = Likeness(10**6, 6)
    likeness.add(0, range(1000))
    parts = [part for start in range(0, 1000, 100) for part in (*range(start, start + 40), 7777)]
    spans = likeness.spans((9999, *parts))
    assert len(spans) <= 6
    assert sum(span.length for span in spans) == 1 + len(parts)
