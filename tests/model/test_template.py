"""Chat templates: choice, variables, limits, and errors that say nothing of the conversation."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from kvtrio.model.builtin_templates import BUILTIN_TEMPLATES
from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.template import (
    RESERVED_NAMES,
    ChatTemplate,
    RenderRequest,
    TemplateError,
    load_template,
)

NOW = datetime(2026, 10, 5, 12, 30)
CANARY = "canary7"
USER = {"role": "user", "content": CANARY}
HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def template(source: str) -> ChatTemplate:
    return load_template({}, source, "<s>", "</s>")


def render(source: str, *messages: dict[str, Any], **more: Any) -> str:
    request = RenderRequest(messages=messages or (HELLO,), now=NOW, **more)
    return template(source).render(request)


# --- choice ---


def test_own_template_counts() -> None:
    """The file's template is used, and called "model"."""
    chosen = load_template({"tokenizer.chat_template": "{{ 'own' }}"}, None, "", "")

    assert (
        chosen.name,
        chosen.render(RenderRequest(messages=[HELLO], now=NOW)),
    ) == ("model", "own")


def test_named_default_counts() -> None:
    """A file with named templates only uses the one called default."""
    chosen = load_template({"tokenizer.chat_template.default": "{{ 'own' }}"}, None, "", "")

    assert chosen.name == "model"


def test_without_template_it_is_plain() -> None:
    """A file without a template gets the plain dialogue, by name."""
    chosen = load_template({}, None, "<s>", "</s>")
    messages = [
        {"role": "system", "content": "Be kind."},
        HELLO,
        {"role": "assistant", "content": "Hi"},
        HELLO,
    ]

    assert chosen.name == "plain"
    assert (
        chosen.render(RenderRequest(messages=messages, now=NOW))
        == "Be kind.\n\nUser: Hello\nAssistant: Hi\nUser: Hello\nAssistant:"
    )


EXPECTED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] S\n\nU [/INST] A</s>[INST] V [/INST]",
    "plain": "S\n\nUser: U\nAssistant: A\nUser: V\nAssistant:",
}


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_builtin(name: str) -> None:
    """Each built-in template writes its format and supports a system text."""
    turns = [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V")]
    chosen = load_template({"tokenizer.chat_template": "{{ 'own' }}"}, name, "<s>", "</s>")
    messages = [{"role": role, "content": content} for role, content in turns]

    assert name == chosen.name
    assert EXPECTED[name] == chosen.render(RenderRequest(messages=messages, now=NOW))
    assert chosen.caps()["supports_system_role"]


def test_given_source_is_custom() -> None:
    """A template's text given by the operator replaces the file's."""
    assert template("{{ 'x' }}").name == "custom"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("chatmel", 'no chat template "chatmel"; there are chatml, gemma'),
        ("{% for %}", "chat template, line 1: "),
        ("\n\n{{ x | nothing }}", "chat template, line 3: No filter named 'nothing'"),
        ("{% include 'x' %}", "uses blocks or other templates"),
        ("{% block a %}{% endblock %}", "uses blocks or other templates"),
        ("{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}", "does not compile"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "does not compile"),
        ("{{ 1 }}" * 50_000, "longer than"),
    ],
)
def test_bad_source_is_one_clear_line(source: str, message: str) -> None:
    """What is no template is refused while loading, with the place where there is one."""
    with pytest.raises(ModelFileError, match=message) as caught:
        template(source)

    assert str(caught.value).isprintable()


def test_template_of_another_type_is_refused() -> None:
    """A template that is no text is a damaged file."""
    with pytest.raises(ModelFileError, match="is not a text"):
        load_template({"tokenizer.chat_template": 5}, None, "", "")


# --- golden ---


def test_smollm2_chat(shared: Path) -> None:
    """SmolLM2's own template, with the default system text, gives the recorded prompt."""
    golden = json.loads((shared / "golden" / "smollm2-135m-f32.json").read_text())["chat"]
    with open_gguf(shared / "tiny" / "models" / "qwen3-fullvocab-q8_0.gguf") as file:
        chosen = load_template(file.metadata, None, "<|im_start|>", "<|im_end|>")

    assert golden["rendered"] == chosen.render(RenderRequest(messages=golden["messages"], now=NOW))


# --- variables ---


def test_variables() -> None:
    """Templates see the token texts, the dates, the switches and the request's own variables."""
    source = (
        "{{ bos_token }}{{ eos_token }} {{ datetime }} {{ date_string }}"
        " {{ strftime_now('%Y-%m-%d') }} {{ enable_thinking }} {{ preserve_thinking }}"
        " {{ clear_thinking }} {{ mine.a }}"
    )

    assert (
        render(source, variables={"enable_thinking": False, "mine": {"a": 1}})
        == "<s></s> Oct 05 2026 05 Oct 2026 2026-10-05 False True False 1"
    )


def test_absent_variables_are_undefined() -> None:
    """Tools and the generation prompt exist only where there are some."""
    source = "{{ tools is defined }} {{ add_generation_prompt is defined }}"

    assert render(source, tools=[], add_generation_prompt=False) == "False False"
    assert render(source, tools=[TOOL]) == "True True"


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_reserved_variables_are_refused(name: str) -> None:
    """A request cannot replace what the server itself gives to a template."""
    with pytest.raises(TemplateError, match=f"cannot set the variable {name}"):
        render("{{ 1 }}", variables={name: CANARY})


def test_request_stays_as_it_is() -> None:
    """A template changes its own copies only."""
    request = RenderRequest(messages=[{"role": "user", "content": "a", "list": [1]}], now=NOW)
    chosen = template("{% set _ = messages[0].list.append(2) %}{{ messages[0].list }}")

    assert [chosen.render(request)] * 2 == ["[1, 2]", chosen.render(request)]
    assert request.messages[0]["list"] == [1]


def test_variables_must_be_json() -> None:
    """Only plain data reaches a template."""
    with pytest.raises(TemplateError, match="only JSON data"):
        render("{{ x }}", variables={"x": object()})


def test_deep_variables_are_refused() -> None:
    """Nesting without end is an error of the request, not of the server."""
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]

    with pytest.raises(TemplateError, match="nested too deeply"):
        render("{{ 1 }}", variables={"x": deep})
    with pytest.raises(TemplateError, match="nested too deeply") as caught:
        render("{{ 1 }}", HELLO, {"role": "user", "content": "", "extra": deep})
    assert caught.value.message_index == 1


# --- language ---


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{%- for m in messages %}\n  {{ m.role }}\n{%- endfor %}", "  user"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ ('{\"a\": [1]}' | from_json).a[0] + ('2' | fromjson) }}", "3"),
        ("{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}{{ 'in' }}{% endgeneration %}", "in"),
        ("{{ 'a' ~ 1 ~ none ~ [2] }}", "a1None[2]"),
        ("{{ [3, 1] | sort | join('-') }}", "1-3"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'ab' | replace('b', 'c') }}", "a\n  b|ac"),
        ("{{ '%s-%d' | format('x', 3) }} {{ '{} {a}'.format(1, a=2) }}", "x-3 1 2"),
        ("{{ '%s' % 'x' }} {{ 'ab' * 2 }} {{ 2 ** 5 }} {{ 7 // 2 }}", "x abab 32 3"),
        ("{% macro f(a, b=2) %}{{ a + b }}{% endmacro %}{{ f(1) }}{{ f(1, b=5) }}", "36"),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}"
         "{{ ns.n }}", "3"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}", "a1True"),
        ("{{ messages[::-1][0].content }} {{ messages[0]['content'][1:3] }}", "Hello el"),
        ("{{ 'x' in ['x'] and 1 < 2 < 3 and 'a' is string }}", "True"),
        ("{{ [1, 2] | map('string') | tojson }}", '["1", "2"]'),
        ("{{ 3.14159 | round(2) }} {{ none is none }} {{ '5' | int + 1 }}", "3.14 True 6"),
    ],
)  # fmt: skip
def test_language(source: str, expected: str) -> None:
    """The language is jinja2 with Hugging Face's settings; metering changes no result."""
    assert expected == render(source)


# --- limits ---

TWINS = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [u, u] | map('default', ns.x) | list %}"
    "{% set ns.y = [u, u] | map('default', ns.y) | list %}{% endfor %}"
)
"""Two equal values of sixty levels: small to hold, endless to walk."""
DOUBLING = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}"
)

ENDLESS = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) if range(100000) | list and false %}{% endfor %}",
    "{% for a in range(9999) %}" + "{% set x = 1 %}" * 4_000 + "{% endfor %}",
    "{% for a in range(100000) %}{{ 'a' * 10000 }}{% endfor %}",
    "{% for a in range(100000) %}" + "a" * 10_000 + "{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 * [0] }}",
    DOUBLING % ("'a'", "ns.x ~ ns.x"),
    DOUBLING % ("'a'", "ns.x + ns.x"),
    DOUBLING % ("[1]", "ns.x + ns.x"),
    DOUBLING % ("[1]", "[ns.x, ns.x]"),
    DOUBLING % ("(1,)", "(ns.x, ns.x)"),
    DOUBLING % ("{}", "{'a': ns.x, 'b': ns.x}"),
    DOUBLING % ("{}", "dict(a=ns.x, b=ns.x)"),
    TWINS + "{{ ns.x == ns.y }}",
    TWINS + "{{ ns.x is eq(ns.y) }}",
    TWINS + "{{ ns.x in [ns.y] }}",
    TWINS + "{{ [ns.x].index(ns.y) }}",
    TWINS + "{{ [ns.x] | select('equalto', ns.y) | list }}",
    TWINS + "{% for a in [ns.x, ns.y] %}{{ loop.changed(a) }}{% endfor %}",
    TWINS + "{{ ns.x }}",
    TWINS + "{{ ns.x | tojson }}",
    TWINS + "{{ ns.x | string }}",
    TWINS + "{{ '%s' % [ns.x] }}",
    TWINS + "{{ '{}'.format(ns.x) }}",
    "{{ ('{0}' * 10000).format('x' * 100000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000) | replace('', 'b' * 100000) }}",
    "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "{{ (['a'] * 50000) | join('b' * 100000) }}",
    "{{ ('a\n' * 100000) | indent('b' * 100000) }}",
    "{% set x = [] %}{% set _ = x.append(x) %}{{ x }}",
    "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{% set y = 'b' in x %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x.upper() %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{% set l = [] %}{% for i in range(99999) %}"
    "{% set _ = l.append(x[1:]) %}{% endfor %}",
]


@pytest.mark.slow
@pytest.mark.parametrize("source", ENDLESS)
def test_endless_work_is_stopped(source: str) -> None:
    """A template that would run or grow without end is stopped, while loading and in use."""
    with pytest.raises(TemplateError, match="too much work"):
        render(source, USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10 ** 9) }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ 1 | round(10 ** 9) }}",
        "{{ 10 ** 10000 }}",
        "{{ strftime_now('%Y' * 1000) }}",
        "{{ range(10 ** 9) }}",
        "{{ ('[' * 100000) | from_json }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set l = [1] %}{{ l.extend(l) }}",
        "{{ lipsum() }}",
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages['__class__'] }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ dict.__subclasses__() }}",
        "{{ namespace.__init__ }}",
        "{{ [''] | map(attribute='__class__') | list }}",
        "{{ self.__init__ }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_forbidden_and_failing_is_an_error(source: str) -> None:
    """What is too large, not allowed or wrong is a template error that shows nothing."""
    with pytest.raises(TemplateError, match="cannot handle") as caught:
        render(source, USER)

    assert caught.value.text == "the chat template cannot handle this conversation"


def test_work_may_grow_with_the_request() -> None:
    """A long conversation gets a budget in proportion."""
    source = "{% for m in messages %}{{ m.role ~ m.content | trim | upper }}{% endfor %}"
    many = [{"role": "user", "content": "word " * 50} for _ in range(3_000)]

    assert len(render(source, *many)) == 3_000 * (4 + 249)


def test_threads_do_not_disturb_each_other() -> None:
    """One template renders in several threads at once."""
    chosen = template("{% for i in range(50) %}{{ messages[0].content }}{% endfor %}")

    def once(number: int) -> str:
        message = {"role": "user", "content": str(number)}
        return chosen.render(RenderRequest(messages=[message], now=NOW))

    with ThreadPoolExecutor(4) as pool:
        assert [str(i) * 50 for i in range(20)] == list(pool.map(once, range(20)))


# --- errors ---

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


def test_refusal_names_the_message_and_the_reason() -> None:
    """The template's own fixed words and the message it was at reach the user."""
    answer = {"role": "assistant", "content": "Hi"}
    with pytest.raises(TemplateError) as caught:
        render(ALTERNATING, USER, answer, USER, USER)

    assert (caught.value.message_index, caught.value.text) == (3, "Roles must alternate")
    assert str(caught.value) == "Roles must alternate (message 3)"


def test_refusal_does_not_echo() -> None:
    """A reason that the template puts together from the conversation is not shown."""
    source = "{{ raise_exception('Unknown role ' + messages[1].role) }}"
    with pytest.raises(TemplateError) as caught:
        render(source, USER, {"role": CANARY, "content": CANARY})

    assert CANARY not in str(caught.value)
    assert caught.value.message_index == 1


def test_failure_names_the_message() -> None:
    """An error inside the template is laid at the message that was read last."""
    source = "{% for m in messages %}{{ m.name + m.content }}{% endfor %}"
    with pytest.raises(TemplateError) as caught:
        render(source, USER | {"name": "a"}, USER)

    assert caught.value.message_index == 1
    assert CANARY not in str(caught.value)


def test_refusal_before_any_message_names_none() -> None:
    """Where no message was read, none is to blame."""
    with pytest.raises(TemplateError) as caught:
        render("{{ raise_exception('never') }}", USER)

    assert (caught.value.message_index, caught.value.text) == (None, "never")
