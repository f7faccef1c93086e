"""POST /completion: llama-server's own dialect, field by field."""

from typing import Any

import pytest

from harness.serving import EOS, serving, token_ids, word
from harness.virtual import SimSettings

FINAL = {
    "kvtrio",
    "index",
    "content",
    "tokens",
    "id_slot",
    "stop",
    "model",
    "tokens_predicted",
    "tokens_evaluated",
    "generation_settings",
    "prompt",
    "has_new_line",
    "truncated",
    "stop_type",
    "stopping_word",
    "tokens_cached",
    "timings",
}
PART = {
    "index",
    "content",
    "tokens",
    "stop",
    "id_slot",
    "tokens_predicted",
    "tokens_evaluated",
}
TIMINGS = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}
SETTING_NAMES = """
seed temperature dynatemp_range dynatemp_exponent top_k top_p min_p top_n_sigma
xtc_probability xtc_threshold typical_p repeat_last_n repeat_penalty presence_penalty
frequency_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n
dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay
stop max_tokens n_predict n_keep n_discard ignore_eos stream logit_bias n_probs min_keep
grammar grammar_lazy grammar_triggers preserved_tokens chat_format reasoning_format
reasoning_in_content generation_prompt samplers speculative.types timings_per_token
post_sampling_probs backend_sampling lora
"""
SETTINGS = set(SETTING_NAMES.split())


@pytest.mark.parametrize("path", ["/completion", "/completions", "/v1/completion"])
async def test_a_plain_answer_has_every_field(autojump_clock: Any, path: str) -> None:
    """The members are llama-server's, no more and no fewer, on each of the route's names."""
    async with serving() as server:
        answer = (await server.post(path, {"prompt": "hi", "n_predict": 4})).json
        assert set(answer) == FINAL
        assert set(answer["timings"]) == TIMINGS
        assert set(answer["generation_settings"]) == SETTINGS
        assert answer["content"] == "aaaa"
        assert answer["stop"] is True
        assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (3, 4)
        assert answer["tokens_cached"] == 6
        assert answer["prompt"] == "<s>hi"
        assert answer["model"] == "sim-model"
        assert (answer["stop_type"], answer["stopping_word"]) == ("limit", "")
        assert answer["tokens"] == []
        assert answer["truncated"] is False


async def test_a_stream_says_the_same_in_pieces(autojump_clock: Any) -> None:
    """Parts add up to the plain answer; the final object has no content; there is no [DONE]."""
    body = {"prompt": "hi", "n_predict": 4, "return_tokens": True}
    async with serving(token_ids("hello", " world"), then=ord("!")) as server:
        plain = (await server.post("/completion", body)).json
        stream = await server.post("/completion", {**body, "stream": True})
        *parts, final = stream.events
        assert all(set(part) == PART and part["stop"] is False for part in parts)
        assert "".join(part["content"] for part in parts) == plain["content"] == "hello world!!"
        assert [each for part in parts for each in part["tokens"]] == plain["tokens"]
        assert [part["tokens_predicted"] for part in parts] == [1, 2, 3, 4]
        assert set(final) == FINAL
        assert final["content"] == ""
        assert final["tokens"] == []
        assert b"[DONE]" not in stream.raw.body
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["x-accel-buffering"] == "no"
        assert stream.headers["cache-control"] == "no-cache"
        different = {"timings", "content", "tokens", "generation_settings", "kvtrio"}
        assert all(final[name] == plain[name] for name in FINAL - different)


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "stop_type", "word_"),
    [
        ((*token_ids("hello"), EOS), [], "hello", "eos", ""),
        (
            token_ids("al", "pha be", "ta ga", "mma!"),
            ["beta gamma"],
            "alpha ",
            "word",
            "beta gamma",
        ),
        (token_ids("al", "pha be", "ta ga", "mma!"), "zzz", "alpha beta gamma!aaaa", "limit", ""),
        (token_ids("hello"), ["", "lo"], "hel", "word", "lo"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_ends(
    autojump_clock: Any,
    tokens: tuple[int, ...],
    stop: Any,
    text: str,
    stop_type: str,
    word_: str,
    stream: bool,
) -> None:
    """End token, stop string over several tokens, limit: text, type and word, in both forms."""
    body = {"prompt": "x", "n_predict": 8, "stop": stop, "stream": stream}
    async with serving(tokens) as server:
        answer = await server.post("/completion", body)
        events = answer.events if stream else [answer.json]
        assert "".join(event["content"] for event in events) == text
        assert events[-1]["stop_type"] == stop_type
        assert events[-1]["stopping_word"] == word_


async def test_text_that_was_held_back_is_not_lost_at_the_limit(autojump_clock: Any) -> None:
    """A tail that might have become a stop string arrives before the final object."""
    body = {"prompt": "x", "n_predict": 2, "stop": ["aaaa"], "stream": True}
    async with serving() as server:
        events = (await server.post("/completion", body)).events
        assert [event["content"] for event in events] == ["", "", "aa", ""]
        assert events[-2]["tokens"] == []


@pytest.mark.parametrize(
    ("n_predict", "predicted", "stop_type"),
    [(0, 0, "limit"), (1, 1, "limit"), (3, 3, "limit"), (-1, 253, "limit"), (10**12, 253, "limit")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_limits(
    autojump_clock: Any, n_predict: int, predicted: int, stop_type: str, stream: bool
) -> None:
    """Exactly as many tokens as asked, zero included; without a limit the context is one."""
    body = {"prompt": "hi", "n_predict": n_predict, "stream": stream}
    async with serving() as server:
        answer = await server.post("/completion", body)
        final = answer.events[-1] if stream else answer.json
        assert final["tokens_predicted"] == predicted == final["timings"]["predicted_n"]
        assert final["stop_type"] == stop_type
        assert final["truncated"] is (predicted == 253)
        assert final["tokens_cached"] == 3 + max(predicted - 1, 0)


@pytest.mark.parametrize(
    ("names", "predicted"),
    [
        ({"max_tokens": 2}, 2),
        ({"max_completion_tokens": 3, "max_tokens": 2}, 3),
        ({"n_predict": 1, "max_completion_tokens": 3}, 1),
        ({"n_predict": None, "max_tokens": 2}, 2),
    ],
)
async def test_every_name_of_the_limit(
    autojump_clock: Any, names: dict[str, Any], predicted: int
) -> None:
    """llama-server's order of names; null is absent."""
    async with serving() as server:
        answer = (await server.post("/completion", {"prompt": "hi", **names})).json
        assert answer["tokens_predicted"] == predicted


async def test_timings_add_up(autojump_clock: Any) -> None:
    """Times are the engine's: first step is the prompt's, and n tokens are n - 1 steps more."""
    async with serving() as server:
        timings = (await server.post("/completion", {"prompt": "hi", "n_predict": 5})).json[
            "timings"
        ]
        assert timings["cache_n"] + timings["prompt_n"] == 3
        assert timings["prompt_ms"] == pytest.approx(5 + 3 * 0.2 + 0.5)
        assert timings["predicted_ms"] == pytest.approx(4 * 5.7)
        assert timings["predicted_per_token_ms"] == pytest.approx(5.7)
        assert timings["predicted_per_second"] == pytest.approx(1000 / 5.7)
        assert timings["prompt_per_second"] == pytest.approx(3000 / 6.1)


async def test_one_token_has_no_rate(autojump_clock: Any) -> None:
    """The first token is free; no division by zero, no null."""
    async with serving() as server:
        timings = (await server.post("/completion", {"prompt": "hi", "n_predict": 1})).json[
            "timings"
        ]
        assert timings["predicted_per_second"] == timings["predicted_per_token_ms"] == 0.0


async def test_progress_goes_from_cached_to_total(autojump_clock: Any) -> None:
    """With return_progress: one event before anything is computed, then one per chunk."""
    body = {"prompt": "x" * 99, "n_predict": 1, "stream": True, "return_progress": True}
    async with serving() as server:
        events = (await server.post("/completion", body)).events
        reports = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert [each["processed"] for each in reports] == [0, 32, 64, 96, 100]
        assert {(each["total"], each["cache"]) for each in reports} == {(100, 0)}
        assert reports[0]["time_ms"] == 0
        assert reports[-1]["time_ms"] == pytest.approx(3 * 11.9 + 6.3)
        assert all(event["content"] == "" for event in events if "prompt_progress" in event)
        # The last report comes together with the first token, and before it.
        predicted = [event["tokens_predicted"] for event in events]
        assert predicted == [0] * len(reports) + [1] * (len(events) - len(reports))


async def test_timings_per_token(autojump_clock: Any) -> None:
    """Every part has timings that grow towards the final ones."""
    body = {"prompt": "hi", "n_predict": 3, "stream": True, "timings_per_token": True}
    async with serving() as server:
        *parts, final = (await server.post("/completion", body)).events
        assert [part["timings"]["predicted_n"] for part in parts] == [1, 2, 3]
        last = {name: pytest.approx(value) for name, value in final["timings"].items()}
        assert parts[-1]["timings"] == last


@pytest.mark.parametrize("name", ["n_probs", "logprobs"])
async def test_probabilities(autojump_clock: Any, name: str) -> None:
    """One entry per token, plain and streamed, with as many alternatives as asked."""
    body = {"prompt": "hi", "n_predict": 3, name: 5}
    async with serving(token_ids("hello")) as server:
        plain = (await server.post("/completion", body)).json["completion_probabilities"]
        events = (await server.post("/completion", {**body, "stream": True})).events
        streamed = [each for event in events[:-1] for each in event["completion_probabilities"]]
        assert streamed == plain
        assert len(plain) == 3
        first = plain[0]
        assert set(first) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert (first["id"], first["token"]) == (word("hello"), "hello")
        assert bytes(first["bytes"]) == b"hello"
        assert first["logprob"] <= 0
        assert len(first["top_logprobs"]) == 5
        assert set(first["top_logprobs"][0]) == {"id", "token", "bytes", "logprob"}


async def test_the_end_token_has_no_probability(autojump_clock: Any) -> None:
    """The entries' tokens joined are the text."""
    body = {"prompt": "hi", "n_predict": 9, "n_probs": 1}
    async with serving((*token_ids("hello"), EOS)) as server:
        answer = (await server.post("/completion", body)).json
        tokens = [each["token"] for each in answer["completion_probabilities"]]
        assert "".join(tokens) == answer["content"] == "hello"
        assert answer["tokens_predicted"] == 2


async def test_response_fields_pick_and_flatten(autojump_clock: Any) -> None:
    """Only what was asked comes back; a path names a member of a member."""
    fields = ["content", "timings/prompt_n", "generation_settings/n_predict", "none/such"]
    body = {"prompt": "hi", "n_predict": 2, "response_fields": fields}
    async with serving() as server:
        answer = (await server.post("/completion", body)).json
        assert answer == {
            "content": "aa",
            "timings/prompt_n": 3,
            "generation_settings/n_predict": 2,
        }


async def test_a_batch_is_an_array(autojump_clock: Any) -> None:
    """Several prompts or several answers: one object each, indexed through."""
    async with serving() as server:
        body = {"prompt": ["hi", [104, 105, 106], {"prompt_string": "abcd"}], "n_predict": 2}
        answers = (await server.post("/completion", body)).json
        assert [each["index"] for each in answers] == [0, 1, 2]
        assert [each["tokens_evaluated"] for each in answers] == [3, 3, 5]
        assert [each["prompt"] for each in answers] == ["<s>hi", "hij", "<s>abcd"]
        twice = (await server.post("/completion", {"prompt": "hi", "n_predict": 2, "n": 2})).json
        assert [each["index"] for each in twice] == [0, 1]


async def test_a_batch_streams_interleaved(autojump_clock: Any) -> None:
    """Every choice has its own final object, and none waits for another's end."""
    body = {"prompt": ["hi", "ho"], "n_predict": 3, "stream": True}
    async with serving() as server:
        events = (await server.post("/completion", body)).events
        finals = [event for event in events if event["stop"]]
        assert sorted(event["index"] for event in finals) == [0, 1]
        indices = [event["index"] for event in events]
        assert indices != sorted(indices)


async def test_ignore_eos_bans_the_end(autojump_clock: Any) -> None:
    """All end tokens get a bias of minus infinity, shown as null, and end nothing."""
    sim = SimSettings(num_places=1)
    body = {"prompt": "hi", "n_predict": 3, "ignore_eos": True}
    async with serving((EOS, EOS), sim=sim) as server:
        settings = (await server.post("/completion", body)).json
        assert settings["generation_settings"]["logit_bias"] == [{"bias": None, "token": EOS}]
        assert settings["stop_type"] == "limit"
        assert settings["tokens_predicted"] == 3
        body["ignore_eos"] = False
        plain = (await server.post("/completion", body)).json
        assert plain["generation_settings"]["logit_bias"] == []
        assert plain["stop_type"] == "eos"


@pytest.mark.parametrize(("slot", "place"), [(2, 2), (0, 0), (-1, None), (None, None)])
async def test_id_slot_chooses_the_place(
    autojump_clock: Any, slot: int | None, place: int | None
) -> None:
    """A request runs where it asked to; -1 and null are any."""
    async with serving() as server:
        answer = await server.post("/completion", {"prompt": "x", "n_predict": 1, "id_slot": slot})
        assert place is None or answer.json["id_slot"] == place


async def test_requests_for_one_slot_take_turns(autojump_clock: Any) -> None:
    """Two answers pinned to one place: both come."""
    body = {"prompt": "x", "n_predict": 2, "n": 2, "id_slot": 1}
    async with serving() as server:
        answers = (await server.post("/completion", body)).json
        assert [each["id_slot"] for each in answers] == [1, 1]


async def test_split_characters_arrive_whole(autojump_clock: Any) -> None:
    """An emoji in four tokens: streamed text equals plain text, with nothing broken in between."""
    tokens = (*"👍é".encode(), 0xFF, *b"ok")
    body = {"prompt": "x", "n_predict": len(tokens)}
    async with serving(tokens) as server:
        plain = (await server.post("/completion", body)).json["content"]
        events = (await server.post("/completion", {**body, "stream": True})).events
        assert plain == "👍é\N{REPLACEMENT CHARACTER}ok"
        assert [event["content"] for event in events[:4]] == ["", "", "", "👍"]
        assert "".join(event["content"] for event in events) == plain


async def test_an_unfinished_character_is_flushed(autojump_clock: Any) -> None:
    """The limit in the middle of a character: U+FFFD, in stream and plain alike."""
    body = {"prompt": "x", "n_predict": 2}
    async with serving(tuple("👍".encode())) as server:
        plain = (await server.post("/completion", body)).json["content"]
        events = (await server.post("/completion", {**body, "stream": True})).events
        assert "".join(event["content"] for event in events) == plain == "\N{REPLACEMENT CHARACTER}"
