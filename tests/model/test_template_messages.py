"""The normaliser: many clients' habits, one form for templates; and the probes behind it."""

from datetime import datetime
from typing import Any

import pytest

from kvtrio.model.messages import MessageRules, TemplateError, normalise, plain_copy, short_id
from kvtrio.model.template import ChatTemplate, RenderRequest, load_template

NOW = datetime(2026, 10, 5)
USER = {"role": "user", "content": "Hello"}


def one(message: dict[str, Any], **rules: Any) -> dict[str, Any]:
    (result,) = normalise([message], MessageRules(**rules))
    return result


def call(arguments: Any, call_id: str = "call_12345678") -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "function": function}]}


def template(source: str) -> ChatTemplate:
    return load_template({}, source, "<s>", "</s>")


def render(chosen: ChatTemplate, *messages: dict[str, Any]) -> str:
    return chosen.render(RenderRequest(messages=messages, now=NOW))


@pytest.mark.parametrize("takes_parts", [False, True])
def test_empty_contents_are_equal(takes_parts: bool) -> None:
    """Null, empty, absent, no parts and an empty part are the same message."""
    contents = ({"content": None}, {"content": ""}, {}, {"content": []}, {
        "content": [{"type": "text", "text": ""}]
    })  # fmt: skip
    results = [one({"role": "assistant", **each}, takes_parts=takes_parts) for each in contents]

    assert results == [{"role": "assistant", "content": ""}] * 5


def test_nulls_vanish() -> None:
    """A key whose value is null is as good as absent."""
    assert one({"role": "user", "content": "a", "name": None}) == {"role": "user", "content": "a"}


def test_developer_is_system() -> None:
    """The newer role name means the older one."""
    assert one({"role": "developer", "content": "x"})["role"] == "system"


def test_parts_become_what_the_template_takes() -> None:
    """Text parts are joined by newlines unless the template prints parts, or nothing else."""
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    typed = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}

    assert one(message)["content"] == "a\nb"
    assert typed == one(message, takes_parts=True)["content"]
    assert one(USER, takes_text=False)["content"] == [{"type": "text", "text": "Hello"}]


def test_arguments_become_objects() -> None:
    """Arguments as JSON text become objects; broken ones stay, since a model wrote them."""
    cases = [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("{broken", "{broken"), ("[1]", "[1]")]
    for given, expected in cases:
        assert expected == one(call(given))["tool_calls"][0]["function"]["arguments"]
    kept = one(call({"a": 1}), takes_objects=False)["tool_calls"][0]["function"]["arguments"]

    assert kept == '{"a": 1}'


def test_short_ids_stay_matched() -> None:
    """Where ids must be nine characters, a call and its answer get the same new one."""
    messages = [call("{}"), {"role": "tool", "tool_call_id": "call_12345678", "content": "x"}]
    first, second = normalise(messages, MessageRules(needs_short_ids=True))

    assert first["tool_calls"][0]["id"] == second["tool_call_id"]
    assert len(second["tool_call_id"]) == 9
    assert second["tool_call_id"].isalnum()
    assert short_id("abcDEF123") == "abcDEF123"


def test_reasoning_has_one_source() -> None:
    """Past reasoning is found under any of its names and given under the template's."""
    for name in ("reasoning_content", "thinking", "reasoning"):
        message = {"role": "assistant", "content": "", name: "hm"}

        assert one(message)["reasoning_content"] == "hm"
        assert one(message, reasoning_names=("thinking",))["thinking"] == "hm"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("hello", "must be an object"),
        ({}, "needs a role"),
        ({"role": 5, "content": ""}, "needs a role"),
        ({"role": "user", "content": 5}, "content must be a text or a list"),
        ({"role": "user", "content": {"a": 1}}, "content must be a text or a list"),
        ({"role": "user", "content": ["a"]}, "only text parts"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "only text parts"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "only text parts"),
        ({"role": "assistant", "tool_calls": "x"}, "list of objects"),
        ({"role": "assistant", "tool_calls": ["x"]}, "list of objects"),
        ({"role": "user", "content": "", 5: "x"}, "only JSON data"),
        ({"role": "user", "content": "", "x": {1, 2}}, "only JSON data"),
    ],
)
def test_what_is_no_message_is_refused(message: Any, text: str) -> None:
    """A message of the wrong shape is named by its place."""
    with pytest.raises(TemplateError, match=text) as caught:
        normalise([USER, message], MessageRules())

    assert caught.value.message_index == 1


def test_copies_are_deep() -> None:
    """Nothing of the given data is shared."""
    data = {"a": [{"b": 1}]}
    copy = plain_copy(data)
    copy["a"][0]["b"] = 2

    assert data == {"a": [{"b": 1}]}


# --- probes ---

FLAT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};"
    "{% endfor %}"
)
USERS_ONLY = (
    "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}"
    "{{ tools | tojson if tools else '' }}{{ reasoning_effort | default('') }}"
)
CALLS_AS_TEXT = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name + c.function.arguments }}>{% endfor %}{% endfor %}"
)


def supported(chosen: ChatTemplate) -> set[str]:
    caps = chosen.caps()
    assert len(caps) == 9
    return {name.removeprefix("supports_") for name, value in caps.items() if value}


def test_flat_template_gets_joined_text() -> None:
    """A template that prints contents gets them as one text."""
    chosen = template(FLAT)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert supported(chosen) == {"string_content", "system_role"}
    assert render(chosen, {"role": "user", "content": parts}) == "user:a\nb;"


def test_parts_template_gets_parts() -> None:
    """A template that walks over parts gets parts, also for plain text."""
    chosen = template(PARTS)

    assert supported(chosen) == {"typed_content", "system_role"}
    assert render(chosen, USER) == "user:Hello;"


def test_system_text_leads_where_there_is_no_system_role() -> None:
    """A system text that the template would drop is put before the next message."""
    chosen = template(USERS_ONLY)
    system = {"role": "system", "content": "S"}

    assert supported(chosen) == {"string_content"}
    assert render(chosen, system, USER) == "user:S\nHello;"
    assert render(chosen, system) == "user:S;"


def test_error_index_counts_the_moved_system_text() -> None:
    """The index in an error is that of the request's own list."""
    chosen = template(
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
        "{{ raise_exception('Unknown role') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(TemplateError) as caught:
        render(chosen, {"role": "system", "content": "S"}, USER, {"role": "odd", "content": ""})

    assert caught.value.message_index == 2


def test_calls_and_short_ids_are_found() -> None:
    """Tools, calls, parallel calls, effort and the demand for short ids show in probes."""
    chosen = template(CALLS)

    assert {
        *("tools", "tool_calls", "parallel_tool_calls", "object_arguments"),
        *("reasoning_effort", "string_content", "system_role"),
    } == supported(chosen)
    assert render(chosen, call('{"a": 1}')) == '<look {"a": 1}>'


def test_calls_with_text_arguments_are_found() -> None:
    """A template that adds arguments to text gets JSON text."""
    chosen = template(CALLS_AS_TEXT)

    assert "tool_calls" in supported(chosen)
    assert "object_arguments" not in supported(chosen)
    assert render(chosen, call({"a": 1})) == '<look{"a": 1}>'


def test_kept_reasoning_is_found() -> None:
    """A template that prints past reasoning is known by it."""
    chosen = template(
        "{% for m in messages %}{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    answer = {"role": "assistant", "content": "Hi", "reasoning": "hm"}

    assert "preserve_reasoning" in supported(chosen)
    assert render(chosen, USER, answer) == "Hello(hm)Hi"


def test_probing_never_fails() -> None:
    """A template that refuses everything loads; it just supports nothing."""
    assert supported(template("{{ raise_exception('no') }}")) == set()
