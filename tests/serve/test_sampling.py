"""From fields to sampling parameters."""

from math import inf
from typing import Any

import pytest

from harness.serving import EOS, ByteTokenizer
from kvtrio.core.sampling import SamplingParams
from kvtrio.serve.fields import IGNORED, REFUSED
from kvtrio.serve.sampling import max_new_tokens, num_answers, sampling_params, stop_strings
from kvtrio.serve.schema import ChatBody, NativeBody, TextBody


def params(**fields: Any) -> SamplingParams:
    return sampling_params(NativeBody(**fields), SamplingParams(), ByteTokenizer(), 77)


def test_defaults_are_llama_servers() -> None:
    """A request that says nothing."""
    assert params() == SamplingParams(
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        typical_p=1.0,
        top_n_sigma=-1.0,
        repeat_penalty=1.0,
        repeat_last_n=64,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias=(),
        num_logprobs=None,
        seed=77,
    )


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"temperature": 0.0}, "temperature", 0.0),
        ({"temperature": 1e-30}, "temperature", 0.0),
        ({"temperature": 2.0}, "temperature", 2.0),
        ({"top_k": 0}, "top_k", 0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_p": 0.0}, "top_p", 0.0),
        ({"min_p": 0.0}, "min_p", 0.0),
        ({"typical_p": 0.5}, "typical_p", 0.5),
        ({"top_n_sigma": 2.0}, "top_n_sigma", 2.0),
        ({"repeat_penalty": 1.2}, "repeat_penalty", 1.2),
        ({"repetition_penalty": 1.3}, "repeat_penalty", 1.3),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.3}, "repeat_penalty", 1.2),
        ({"repeat_last_n": 0}, "repeat_last_n", 0),
        ({"presence_penalty": -1.0}, "presence_penalty", -1.0),
        ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ({"seed": 5}, "seed", 5),
        ({"seed": 0}, "seed", 0),
        ({"seed": -1}, "seed", 77),
        ({"seed": 2**32 - 1}, "seed", 77),
        ({"seed": 2**63}, "seed", 2**63),
        ({"seed": -9}, "seed", -9),
        ({"logit_bias": {"97": 1}}, "logit_bias", ((97, 1.0),)),
        ({"logit_bias": {"97": False}}, "logit_bias", ((97, -inf),)),
        ({"logit_bias": [[97, -1.5], ["98", 2]]}, "logit_bias", ((97, -1.5), (98, 2.0))),
        ({"logit_bias": [["ab", False]]}, "logit_bias", ((97, -inf), (98, -inf))),
        ({"logit_bias": [[97, 1], [97, 2]]}, "logit_bias", ((97, 2.0),)),
        ({"logit_bias": {"1.5": 1}}, "logit_bias", ((49, 1.0), (46, 1.0), (53, 1.0))),
        ({"ignore_eos": True}, "logit_bias", ((EOS, -inf),)),
        (
            {"ignore_eos": True, "logit_bias": {"97": 1, str(EOS): 5}},
            "logit_bias",
            ((97, 1.0), (EOS, -inf)),
        ),
    ],
)
def test_fields_become_parameters(fields: dict[str, Any], name: str, value: Any) -> None:
    """One field at a time; where two names exist, llama-server's comes first."""
    assert getattr(params(**fields), name) == value


def test_server_defaults_are_kept() -> None:
    """A setting of the server's own holds until a request overrides it."""
    defaults = SamplingParams(temperature=0.2, top_k=7)
    made = sampling_params(NativeBody(top_k=3), defaults, ByteTokenizer(), 1)
    assert (made.temperature, made.top_k) == (0.2, 3)


@pytest.mark.parametrize(
    ("stop", "expected"), [(None, ()), ("x", ("x",)), (["a", "", "b"], ("a", "b")), ("", ())]
)
def test_stop_is_a_string_or_a_list(stop: Any, expected: tuple[str, ...]) -> None:
    """Empty stop strings stop nothing."""
    assert stop_strings(TextBody(stop=stop)) == expected


def test_counts() -> None:
    """Absent is one answer without a limit; -1 is no limit too."""
    assert max_new_tokens(NativeBody()) is None
    assert max_new_tokens(NativeBody(n_predict=-1, max_tokens=5)) is None
    assert max_new_tokens(ChatBody(max_tokens=0)) == 0
    assert num_answers(ChatBody()) == 1
    assert num_answers(ChatBody(n_cmpl=3)) == 3
    assert num_answers(ChatBody(n=2, best_of=2)) == 2


def test_the_tables_agree_with_the_schemas() -> None:
    """No field is both read and refused or ignored."""
    read = {
        *NativeBody.__struct_fields__,
        *TextBody.__struct_fields__,
        *ChatBody.__struct_fields__,
    }
    assert not read & REFUSED.keys()
    assert not read & IGNORED.keys()
    assert not REFUSED.keys() & IGNORED.keys()
    assert all(IGNORED.values())
