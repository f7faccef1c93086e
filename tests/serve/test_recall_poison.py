"""Nobody decides how the ordinary prompts of others are tokenised."""

from typing import Any

import pytest

from harness.serving import EOS, Serving, served_model, serving, token_ids
from harness.virtual import SimSettings
from kvtrio.model.builtin_templates import BUILTIN_TEMPLATES
from kvtrio.serve.chat import chat_outline
from kvtrio.serve.outline import Outline
from kvtrio.serve.schema import ChatBody
from kvtrio.serve.spans import answer_spans

NATIVE, TEXT, CHAT = "/completion", "/v1/completions", "/v1/chat/completions"
LARGE = SimSettings(max_context=512)
Message = dict[str, Any]


def turns(*contents: str) -> list[Message]:
    """User and assistant by turns."""
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


async def num_recalled(server: Serving, path: str, **fields: Any) -> int:
    reply = await server.post(path, {"max_tokens": 4, **fields})
    assert reply.status == 200, reply.json
    number: int = reply.json["kvtrio"]["cache"]["recalled"]
    return number


# --- who may write what ---


@pytest.mark.parametrize("path", [NATIVE, TEXT])
async def test_raw_text_decides_nothing_about_chats(autojump_clock: Any, path: str) -> None:
    """A system message that somebody had generated behind a chat's head stays ordinary text."""
    tokens = (*token_ids("hello", " world"), EOS)
    system = {"role": "system", "content": "hello world"}
    chat = {"messages": [system, *turns("Hi")]}
    async with serving(tokens, sim=LARGE) as server:
        await num_recalled(server, path, prompt="<|im_start|>system\n")
        assert await num_recalled(server, path, prompt="<|im_start|>system\nhello world!") == 2
        assert await num_recalled(server, CHAT, **chat) == 0


async def test_chats_decide_nothing_about_raw_text(autojump_clock: Any) -> None:
    """Nor the other way round."""
    async with serving((*token_ids("hello"), EOS), sim=LARGE) as server:
        await num_recalled(server, CHAT, messages=turns("Hi"))
        rendered = (await server.post("/apply-template", {"messages": turns("Hi")})).json["prompt"]
        assert await num_recalled(server, NATIVE, prompt=f"{rendered}hello!") == 0
        assert await num_recalled(server, CHAT, messages=turns("Hi", "hello", "and?")) == 1


@pytest.mark.parametrize("bias", [{"104": 100}, [[104, 100]], {"hello": 100.0}])
async def test_forced_tokens_are_not_remembered(autojump_clock: Any, bias: Any) -> None:
    """An answer whose tokens its caller chose serves nobody; one without such choices does."""
    async with serving((*token_ids("hello"), EOS), sim=LARGE) as server:
        raw, chat = {"prompt": "Qhello?"}, {"messages": turns("Q", "hello", "?")}
        await num_recalled(server, NATIVE, prompt="Q", logit_bias=bias)
        await num_recalled(server, CHAT, messages=turns("Q"), logit_bias=bias)
        assert await num_recalled(server, NATIVE, **raw) == 0
        assert await num_recalled(server, CHAT, **chat) == 0
        await num_recalled(server, NATIVE, prompt="Q", logit_bias=[], ignore_eos=False)
        await num_recalled(server, CHAT, messages=turns("Q"), logit_bias={})
        assert await num_recalled(server, NATIVE, **raw) == 1
        assert await num_recalled(server, CHAT, **chat) == 1


async def test_an_answer_that_plays_the_user_does_not_write_for_them(autojump_clock: Any) -> None:
    """What a model generated beyond its own turn is ordinary text where users say it."""
    tokens = (*token_ids(" ", "hello", "\n", "User: ", "al", "pha be"), EOS)
    async with serving(tokens, sim=LARGE, model=served_model("plain")) as server:
        await num_recalled(server, CHAT, messages=turns("Hi"), max_tokens=20)
        said = turns("Hi", "hello", "alpha be!")
        assert await num_recalled(server, CHAT, messages=said) == len([" ", "hello"])


# --- where answers stand ---


def outline(template: str, *messages: Message, **more: Any) -> Outline:
    body = ChatBody(messages=list(messages), **more)
    return chat_outline(body, served_model(template), 1_790_000_000.0)


def shown(found: Outline) -> list[str]:
    return [found.text[start:end].strip() for start, end in answer_spans(found)]


@pytest.mark.parametrize("template", sorted(BUILTIN_TEMPLATES))
def test_answers_are_found(template: str) -> None:
    """In each built-in template, whatever the answers hold; and the text that is continued."""
    texts = (
        "One?",
        "first",
        "Two?",
        " two\nAssistant: 0 \ue0000\ue000",
        "Three?",
        "a[/INST]b ",
        "!",
    )
    answers = [text.strip() for text in texts[1::2]]
    assert shown(outline(template, *turns(*texts))) == answers
    assert shown(outline(template, *turns(*texts[:-1]))) == answers
    assert shown(outline(template, *turns("nothing yet"))) == []
    assert shown(outline(template, *turns("One?", "", "Two?", "2", "?"))) == ["2"]


def test_answers_in_parts_are_found() -> None:
    """Several parts are one answer."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    said = [*turns("Count"), {"role": "assistant", "content": parts}, *turns("on")]
    assert shown(outline("chatml", *said)) == ["one\ntwo"]


THINKING = """\
{%- for m in messages -%}
<{{ m.role }}>
{%- if m.role == 'assistant' and loop.index > messages|length - 2 and m.reasoning_content -%}
<think>{{ m.reasoning_content }}</think>
{%- endif -%}
{{ m.content.split('</think>')[-1].lstrip() }}</{{ m.role }}>
{%- endfor -%}
"""


def test_thoughts_may_be_left_out() -> None:
    """Thoughts that the template drops, or shows as a field of their own, mislead nobody."""
    dropped = turns("One?", "<think>hm</think>\n\nfirst", "Two?", "second", "!")
    assert shown(outline(THINKING, *dropped)) == ["first", "second"]
    own = [*dropped[:3], {**dropped[3], "reasoning_content": "well"}, *dropped[4:]]
    assert shown(outline(THINKING, *own)) == ["first", "well</think>second"]


MUTTERING = """\
{%- for m in messages -%}
<{{ m.role }}>{{ m.content | upper if m.content | length > 6 else m.content }}</>
{%- endfor -%}
"""


def test_what_cannot_be_found_ends_the_search() -> None:
    """A template that rewrites an answer: the answers before it count, none after it."""
    said = turns("One?", "first", "Two?", "rewritten", "Three?", "third", "!")
    assert shown(outline(MUTTERING, *said)) == ["first"]


def test_a_conversation_of_marks_has_no_answers() -> None:
    """If every mark occurs in the text, no answer is looked for."""
    every = "".join(map(chr, range(0xE000, 0xF900)))
    assert shown(outline("chatml", *turns(every, "fine", "?"))) == []


def test_a_template_that_refuses_marks_finds_none() -> None:
    """Rendering with marks may fail where rendering did not."""
    template = (
        "{%- for m in messages -%}{%- if '0' in m.content -%}{{ raise_exception('no') }}"
        "{%- endif -%}{{ m.content }}{%- endfor -%}"
    )
    assert shown(outline(template, *turns("One?", "first", "!"))) == []
