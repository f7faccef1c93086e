"""Recording: the structure of traffic and nothing else."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from harness.core_fakes import NumberMatcher
from kvtrio.core.batch import Sampled
from kvtrio.core.events import Finished, Submit, TokenOut
from kvtrio.core.explain import CacheReport
from kvtrio.core.identity import AdapterUse, Segment
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import FinishReason, RequestId
from kvtrio.replay.likeness import common, packed
from kvtrio.replay.realise import Realiser
from kvtrio.replay.recorder import Recorder
from kvtrio.replay.scenario import (
    Adapter,
    Beginning,
    Fresh,
    Header,
    Line,
    Origin,
    Part,
    Ref,
    Request,
)
from kvtrio.replay.scenario_file import checked

KEY = b"log key of the tests"


class Source:
    """Requests made by hand."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.recorder = Recorder(self.lines.append, 100.0, KEY)
        self.now = 100.0

    def submit(self, prompt: Sequence[int], **more: Any) -> RequestId:
        number = RequestId(self.recorder.num_requests + 1)
        made = Submit(
            request_id=number,
            token_ids=tuple(prompt),
            max_new_tokens=None,
            sampling=SamplingParams(),
            matcher=NumberMatcher(),
            **more,
        )
        self.recorder.admitted(made, self.now)
        return number

    def finish(
        self, number: RequestId, output: Sequence[int], reason: FinishReason = FinishReason.LENGTH
    ) -> None:
        for index, token in enumerate(output):
            self.recorder.said(TokenOut(number, index, Sampled(token), ""), self.now)
        ended = Finished(
            request_id=number,
            reason=reason,
            text="",
            stopped_by_text=False,
            place=0,
            num_prompt_tokens=10,
            num_cached_tokens=2,
            num_computed_tokens=3,
            num_generated_tokens=len(output),
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
            cache=CacheReport(),
            num_ready_tokens=5 + len(output),
        )
        self.recorder.said(ended, self.now)

    def ask(self, prompt: Sequence[int], output: Sequence[int], **more: Any) -> None:
        self.now += 1
        number = self.submit(prompt, **more)
        self.now += 1
        self.finish(number, output)

    @property
    def requests(self) -> list[Request]:
        return [line for line in self.lines if isinstance(line, Request)]


def test_a_conversation_is_references() -> None:
    """The next turn is the prompt before, the answer before, and what is new."""
    source = Source()
    source.ask(range(1000, 1100), range(10))
    source.ask((*range(1000, 1100), *range(10), 7, 7), [5])
    first, second = source.requests
    assert first.prompt == (Fresh(100),)
    assert second.prompt == (
        Ref(0, Part.PROMPT, 0, 100),
        Ref(0, Part.OUTPUT, 0, 10),
        Fresh(2),
    )
    assert (first.session, first.turn, first.think_s) == (0, 0, None)
    assert (second.session, second.turn, second.think_s) == (0, 1, 1.0)


def test_a_change_inside_a_message_keeps_its_place() -> None:
    """The reference ends at the very token."""
    source = Source()
    source.ask(range(100), [5])
    source.ask((*range(37), 999, *range(38, 100)), [6])
    assert source.requests[1].prompt == (
        Ref(0, Part.PROMPT, 0, 37),
        Fresh(1),
        Ref(0, Part.PROMPT, 38, 62),
    )


def test_lines_come_in_the_order_of_admission() -> None:
    """A request that goes on for long holds those after it back, and none is lost."""
    source = Source()
    slow, quick = source.submit(range(50)), source.submit(range(100, 150))
    source.finish(quick, [1])
    assert source.requests == []
    assert source.recorder.num_open == 2
    source.finish(slow, [2, 3])
    assert [(each.id, each.output_tokens) for each in source.requests] == [(0, 2), (1, 1)]


def test_a_client_that_left() -> None:
    """When it left, and how much of its prompt was there."""
    source = Source()
    number = source.submit(range(50))
    source.now += 3.5
    source.finish(number, [], FinishReason.ABORT)
    (request,) = source.requests
    assert (request.left_s, request.ready_tokens, request.output_tokens) == (3.5, 5, 0)


def test_names_become_numbers() -> None:
    """Tenants, namespaces and sessions in the order of appearance; everybody's is 0."""
    source = Source()
    for name in (b"", b"x" * 32, b"y" * 32, b"x" * 32):
        source.ask([1, 2], [3], tenant=name, namespace=name, session=name[:8] or None)
    assert [each.tenant for each in source.requests] == [0, 1, 2, 1]
    assert [each.namespace for each in source.requests] == [0, 1, 2, 1]
    assert [each.is_named for each in source.requests] == [False, True, True, True]
    assert source.requests[1].session == source.requests[3].session


def test_adapters_are_introduced_once() -> None:
    """With the digest under which the log and GET /lora-adapters know them."""
    source = Source()
    a, b = (AdapterUse(number, bytes([number]) * 32, 0.5) for number in (1, 2))
    source.ask(range(20), [1], segments=(Segment(0, (a,)),))
    source.ask(range(20), [1], segments=(Segment(0), Segment(7, (a, b))))
    assert [each.alias for each in source.lines if isinstance(each, Adapter)] == ["a0", "a1"]
    uses = source.requests[1].adapters
    assert [(use.alias, use.scale, use.start) for use in uses] == [("a0", 0.5, 7), ("a1", 0.5, 7)]


def test_answers_that_were_alike_are_known_as_such() -> None:
    """One begins with the other; and what is merely like another's beginning is not."""
    source = Source()
    for output in ([1, 2, 3], [1, 2], [1, 4], [1, 2, 3, 4]):
        source.ask(range(30), output)
    assert [each.same_as for each in source.requests] == [None, 0, None, 0]


def test_answers_that_end_in_another_order_are_alike_with_earlier_requests() -> None:
    """A line names no request that comes after it, whoever ends first."""
    source = Source()
    numbers = [source.submit(range(30)) for _ in range(3)]
    for number, output in ((2, [1, 5]), (1, [1, 2]), (0, [1, 2, 3])):
        source.finish(numbers[number], output)
    assert [each.same_as for each in source.requests] == [None, 0, None]
    assert [each.begins_as for each in source.requests] == [None, None, Beginning(0, 1)]
    header = Header(origin=Origin.RECORDED, max_context=64)
    assert list(checked([header, *source.lines])) == [header, *source.lines]


def test_how_far_an_answer_is_like_another() -> None:
    """Where both went on and parted, the one that parted last is named."""
    source = Source()
    for output in ([1, 2, 3, 4], [1, 2, 7], [1, 2, 3, 8], [1, 2], [5]):
        source.ask(range(30), output)
    assert [each.begins_as for each in source.requests] == [
        None,
        Beginning(0, 2),
        Beginning(0, 3),
        None,
        None,
    ]


@pytest.mark.parametrize("vocabulary", [40, 300])
def test_what_was_shared_is_shared_again_and_no_more(vocabulary: int) -> None:
    """Any two texts have as many tokens in common from their beginning on as they had: the
    recording has lost nothing that a cache of prefixes could see."""
    rng, source = Random(vocabulary), Source()
    texts = _traffic(rng, source, vocabulary=9000)
    realiser = Realiser(source.requests, np.arange(vocabulary), seed=5)
    again: list[bytes] = []
    for request, text in zip(source.requests, texts, strict=True):
        prompt = realiser.prompt(request.id).tolist()
        # Answers to one prompt that were not alike differ from their first token on.
        output = [(request.id if request.same_as is None else request.same_as) % 7 + 9000]
        output += [rng.randrange(vocabulary) for _ in range(request.output_tokens - 1)]
        realiser.answered(request.id, np.array(output, dtype=np.int64))
        again.append(packed([*prompt, *output]))
        assert len(again[-1]) == len(text)
    for one, text in enumerate(texts):
        for other in range(one):
            assert common(again[one], again[other]) == common(text, texts[other])


def _traffic(rng: Random, source: Source, vocabulary: int) -> list[bytes]:
    """Conversations that go on, turn back, and part from each other within their prompts."""
    texts: list[tuple[list[int], list[int]]] = []
    for number in range(60):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 30))]
        if texts and rng.random() < 0.8:
            before, answer = rng.choice(texts)
            kept = before + answer if rng.random() < 0.6 else before[: rng.randrange(len(before))]
            prompt = [*kept, vocabulary + number, *prompt]
        output = [vocabulary + 1000 + number, *(rng.randrange(vocabulary) for _ in range(8))]
        source.ask(prompt, output)
        texts.append((prompt, output))
    return [packed([*prompt, *output]) for prompt, output in texts]
