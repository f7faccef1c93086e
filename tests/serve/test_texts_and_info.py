"""/tokenize, /detokenize, /apply-template, /props, /slots, /models, /health, /."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from harness.serving import BOS, EOS, VOCAB_SIZE, served_model, serving
from harness.virtual import SimSettings
from harness.virtual_http import Call
from kvtrio.serve.app import ROUTES

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, []),
        ({"content": None}, []),
        ({"content": ""}, []),
        ({"content": "hi"}, [104, 105]),
        ({"content": "hi", "add_special": True}, [BOS, 104, 105]),
        ({"content": "</s>"}, [EOS]),
        ({"content": "</s>", "parse_special": False}, [60, 47, 115, 62]),
        ({"content": ["hi", 5, "a"], "add_special": True}, [BOS, 104, 105, 5, 97]),
        ({"content": [5, "hi"], "add_special": True}, [5, 104, 105]),
        (
            {"content": "é", "with_pieces": True},
            [{"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}],
        ),
        ({"content": "h", "with_pieces": True}, [{"id": 104, "piece": "h"}]),
    ],
)
async def test_tokenize(autojump_clock: Any, body: dict[str, Any], tokens: list[Any]) -> None:
    """Text, ids and both mixed; pieces that are no text are lists of bytes."""
    async with serving() as server:
        assert (await server.post("/tokenize", body)).json == {"tokens": tokens}


@pytest.mark.parametrize("body", [{"content": 5}, {"content": [VOCAB_SIZE]}, {"content": [None]}])
async def test_tokenize_refuses(autojump_clock: Any, body: dict[str, Any]) -> None:
    """Anything else."""
    async with serving() as server:
        assert (await server.post("/tokenize", body)).status == 400


async def test_detokenize_is_the_way_back(autojump_clock: Any) -> None:
    """Special tokens are visible; ids outside the vocabulary are refused."""
    async with serving() as server:
        answer = await server.post("/detokenize", {"tokens": [BOS, 104, 105, EOS]})
        assert answer.json == {"content": "<s>hi</s>"}
        assert (await server.post("/detokenize", {})).json == {"content": ""}
        assert (await server.post("/detokenize", {"tokens": [VOCAB_SIZE]})).status == 400
        assert (await server.post("/detokenize", {"tokens": [-1]})).status == 400


@pytest.mark.parametrize(
    "content", ["hi", [{"type": "text", "text": "hi"}], [{"type": "text", "text": "hi", "x": 1}]]
)
async def test_apply_template(autojump_clock: Any, content: Any) -> None:
    """The prompt that a chat would have; typed parts are text."""
    async with serving() as server:
        body = {"messages": [{"role": "user", "content": content}]}
        prompt = "<|im_start|>user\nhi<|im_end|>\n"
        answer = await server.post("/apply-template", body)
        assert answer.json == {"prompt": prompt + "<|im_start|>assistant\n"}
        body["add_generation_prompt"] = False  # type: ignore[assignment]
        assert (await server.post("/apply-template", body)).json == {"prompt": prompt}


@pytest.mark.parametrize("content", [None, "", "absent", [], [{"type": "text", "text": ""}]])
async def test_empty_answers_in_the_history(autojump_clock: Any, content: Any) -> None:
    """An assistant turn without text is kept, and all ways to write it render alike."""
    turn = {"role": "assistant", "content": content}
    if content == "absent":
        del turn["content"]
    async with serving() as server:
        body = {"messages": [*HI, turn, *HI]}
        empty = {"messages": [*HI, {"role": "assistant", "content": ""}, *HI]}
        answers = [(await server.post("/apply-template", each)).json for each in (body, empty)]
        assert answers[0] == answers[1]


async def test_a_template_that_refuses(autojump_clock: Any) -> None:
    """Its objection is a 400 in words of ours, not in the template's."""
    source = "{{ raise_exception('no ' + messages[0]['content']) }}"
    async with serving(model=served_model(source)) as server:
        answer = await server.post("/apply-template", {"messages": HI})
        assert answer.status == 400
        assert answer.error["kvtrio"]["code"] in ("template_failed", "template_error")
        assert "no hi" not in answer.error["message"]


async def test_variables_reach_the_template(autojump_clock: Any) -> None:
    """chat_template_kwargs and reasoning_effort; "none" turns thinking off."""
    source = "{{ enable_thinking }} {{ reasoning_effort }} {{ mood }}"
    async with serving(model=served_model(source)) as server:
        for more, text in (
            ({"chat_template_kwargs": {"mood": "good"}}, "True  good"),
            ({"reasoning_effort": "high"}, "True high "),
            ({"reasoning_effort": "none"}, "False  "),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "False  "),
        ):
            answer = await server.post("/apply-template", {"messages": HI, **more})
            assert answer.json["prompt"] == text


async def test_props(autojump_clock: Any) -> None:
    """What llama.cpp's clients read, and which template stands in."""
    model = evolve(served_model(), template_note="the model has none")
    async with serving(model=model) as server:
        props = (await server.get("/props")).json
        assert props["default_generation_settings"]["n_ctx"] == 256
        assert props["default_generation_settings"]["params"]["temperature"] == 0.8
        assert props["default_generation_settings"]["params"]["seed"] == 2**32 - 1
        assert props["total_slots"] == 4
        assert props["model_path"].endswith(".gguf")
        assert "/" not in props["model_path"]
        assert props["modalities"] == {"vision": False, "video": False, "audio": False}
        assert "im_start" in props["chat_template"]
        memory = props["kvtrio"].pop("memory")
        assert memory["blocks"] == {"device": 4 * (64 + 1), "ram": 32}
        assert memory["window_blocks"] == {"device": 4 * (2 * 5 + 2) + 8 + 32, "ram": 0}
        assert set(map(type, props["chat_template_caps"].values())) == {bool}
        assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
        assert props["build_info"].startswith("b")
        assert props["kvtrio"] == {
            "chat_template_name": "chatml",
            "note": "the model has none",
            "purposes": ["chat", "title", "recap", "probe", "tool"],
            "reuse": {"resumes_at": "kept_windows", "notes": []},
            "disk": {"enabled": False, "limit_bytes": 0, "used_bytes": 0, "entries": 0},
            "sessions": {"enabled": False},
        }


@pytest.mark.parametrize("path", ["/models", "/v1/models"])
async def test_models(autojump_clock: Any, path: str) -> None:
    """OpenAI's list, Ollama's, and the sizes that clients look for."""
    async with serving() as server:
        models = (await server.get(path)).json
        (entry,) = models["data"]
        assert (models["object"], entry["object"]) == ("list", "model")
        assert entry["id"] == models["models"][0]["name"] == "sim-model"
        assert entry["max_model_len"] == entry["meta"]["n_ctx"] == 256
        assert entry["meta"].keys() == {
            "vocab_type",
            "n_vocab",
            "n_ctx",
            "n_ctx_train",
            "n_embd",
            "n_params",
            "size",
            "ftype",
        }


async def test_slots_show_counts_only(autojump_clock: Any) -> None:
    """A fresh slot, a busy one, an idle one again: numbers and settings, never text."""
    sim = SimSettings(num_places=2)
    secret = "quite-private"
    async with serving(sim=sim) as server:
        fresh = (await server.get("/slots")).json
        assert fresh[1] == {"id": 1, "n_ctx": 256, "speculative": False, "is_processing": False}
        body = {"prompt": secret, "n_predict": 20, "id_slot": 0, "stop": [secret], "seed": 3}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.post, "/completion", body)
            await trio.sleep(0.05)
            answer = await server.get("/slots")
            busy = answer.json[0]
        idle = (await server.get("/slots")).json[0]
        assert busy["is_processing"] is True
        assert busy["params"]["seed"] == 3
        assert busy["n_prompt_tokens_processed"] == len(secret) + 1
        assert busy["next_token"][0]["n_decoded"] + busy["next_token"][0]["n_remain"] == 20
        assert idle["is_processing"] is False
        assert idle["next_token"][0]["n_remain"] == -1
        assert idle["next_token"][0]["n_decoded"] == 0
        assert secret not in json.dumps([busy, idle])


async def test_slots_can_fail_when_none_is_free(autojump_clock: Any) -> None:
    """For load balancers: 503 while every place is taken, if asked for."""
    async with serving(sim=SimSettings(num_places=1)) as server:
        assert (await server.get("/slots?fail_on_no_slot=1")).status == 200
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.post, "/completion", {"prompt": "x", "n_predict": 20})
            await trio.sleep(0.05)
            assert (await server.get("/slots?fail_on_no_slot=1")).status == 503
            assert (await server.get("/slots")).status == 200


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.handler)
async def test_every_path_of_every_route_answers(
    autojump_clock: Any, route: Any, lora_dir: Path
) -> None:
    """With and without /v1, each path reaches a handler."""
    body: Any = {"prompt": "x", "messages": HI, "max_tokens": 1}
    body |= {"lora_name": "a", "lora_path": "a.gguf"}
    if route.handler == "set_lora_adapters":
        body = []
    if route.handler == "state.warm":
        del body["prompt"]
    async with serving(lora_dir=lora_dir) as server:
        if route.handler == "unload_lora_adapter":
            await server.add_adapter("a")
        for path in route.paths:
            raw = json.dumps(body).encode() if route.method == "POST" else b""
            target = path.replace("<path:name>", "sim-model").replace("<slot>", "0?action=erase")
            answer = await server.call(Call(target=target, method=route.method, body=raw))
            assert answer.status == 200


async def test_head_is_get_without_a_body(autojump_clock: Any) -> None:
    """For probes that ask so."""
    async with serving() as server:
        stream = server.http.connect()
        await stream.send_all(b"HEAD /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        data = b""
        while chunk := await stream.receive_some(65536):
            data += bytes(chunk)
        assert data.startswith(b"HTTP/1.1 200")
        assert data.endswith(b"\r\n\r\n")
