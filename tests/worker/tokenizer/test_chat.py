"""Chat templates render as in Hugging Face's libraries, and cannot leave the sandbox."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from worker.api.dialects.system_turns import takes_system_turns
from worker.errors import ModelError, RequestError
from worker.sim import tokenizer as sim
from worker.tokenizer.chat import ChatTemplate


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(
        source, bos_token="<s>", eos_token="</s>", now=lambda: datetime(2024, 2, 29), **options
    )


USER = [{"role": "user", "content": "<é> & 'x'"}]


def test_lines_with_only_a_tag_leave_no_blanks() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\nend"
    assert template(source).render(USER) == "<s>\n<é> & 'x'\nend"


def test_the_extras_of_hugging_face_work() -> None:
    source = (
        "{{ messages[0] | tojson }} {{ strftime_now('%d %b %Y') }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    expected = '{"role": "user", "content": "<é> & \'x\'"} 29 Feb 202401'
    assert template(source).render(USER) == expected


def test_client_variables_reach_the_template() -> None:
    chat = template("{{ thinking }} {{ tools is none }} {{ documents is none }}")
    assert chat.render(USER, variables={"thinking": True}) == "True True True"


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message",
     "chat_template", "bos_token", "unk_token"],
)  # fmt: skip
def test_a_variable_with_a_reserved_name_is_refused(name: str) -> None:
    chat = template("{{ messages | length }}", special_tokens={"unk_token": "<unk>"})
    with pytest.raises(RequestError, match=name) as caught:
        chat.render(USER, variables={name: []})
    assert caught.value.param == "chat_template_kwargs"


def test_generation_tags_have_no_effect() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}"
    assert template(source).render(USER) == "user"


def test_requests_with_tools_have_their_own_template() -> None:
    chat = template("plain", tool_source="{{ tools[0].function.name }}")
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    assert (chat.render(USER), chat.render(USER, tools=tools)) == ("plain", "look_up")
    assert (chat.source, chat.tool_source) == ("plain", "{{ tools[0].function.name }}")
    assert (chat.shows_tools, template("{{ messages }}").shows_tools) == (True, False)


@pytest.mark.parametrize(
    ("written", "as_objects"),
    [
        ("{{ call.function.arguments | tojson }}", True),
        ("{{ call.function | tojson }}", True),
        ("{{ '(' + call.function.arguments + ')' }}", False),
        ("{{ call.function.arguments }}", False),
        (
            "{{ call.function.arguments if call.function.arguments is string"
            " else call.function.arguments | tojson }}",
            True,
        ),
        ("", True),
        ("{{ raise_exception('no calls') }}", True),
    ],
)
def test_the_form_of_arguments_is_found_by_rendering(written: str, as_objects: bool) -> None:
    source = "{% for m in messages %}{% for call in m.tool_calls or [] %}…{% endfor %}{% endfor %}"
    assert template(source.replace("…", written)).takes_argument_objects is as_objects


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        (TURNS + "<assistant>", True),
        (sim.CHAT_TEMPLATE, True),
        (TURNS, False),
        (
            TURNS.replace("<", "{% if m.role == 'system' %}{% continue %}{% endif %}<", 1) + "<a>",
            False,
        ),
        ("{{ messages | selectattr('role', 'equalto', 'system') | list }}" + TURNS + "<a>", False),
        ("{% if messages[3].role == 'system' %}{{ raise_exception('no') }}{% endif %}<a>", False),
        (TURNS + "{% if messages[-1].role == 'user' %}<assistant>{% endif %}", False),
    ],
    ids=["turns", "sim", "no answer begun", "left out", "moved", "refused", "in the answer"],
)
def test_support_of_system_turns_is_found_by_rendering(source: str, takes: bool) -> None:
    assert takes_system_turns(template(source)) is takes


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) }}",
        "{{ messages | tojson(indent=10000000) }}",
        "{{ 'x'.missing.attribute }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_failing_template_is_the_clients_error(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        template(source).render(USER)
    assert caught.value.param == "messages"


def test_a_broken_template_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="chat template"):
        template("{% if %}")
    with pytest.raises(ModelError, match="chat template"):
        template("fine", tool_source="{% if %}")


@pytest.mark.parametrize(
    ("opening", "closing", "depth"),
    [("{% for a in [1] %}", "{% endfor %}", 25), ("{% if 1 %}", "{% endif %}", 120)],
)
def test_blocks_nested_too_deeply_are_the_models_error(
    opening: str, closing: str, depth: int
) -> None:
    with pytest.raises(ModelError, match="not valid Jinja: too many"):
        template(opening * depth + "x" + closing * depth)


TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
UNTRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (UNTRIMMED, "Once upon ", "<user>a</><assistant>Once upon "),
        (TRIMMING, "Once upon ", "<user>a</><assistant>Once upon"),
        (TRIMMING, " Once", "<user>a</><assistant>Once"),
        (UNTRIMMED, "</>", "<user>a</><assistant></>"),
        (UNTRIMMED, "", "<user>a</><assistant>"),
    ],
)
def test_the_final_message_can_be_left_open(source: str, content: str, expected: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    chat = template(source)
    text = chat.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == expected
    assert messages[-1]["content"] == content


def test_the_last_text_part_of_a_message_can_be_left_open() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}, {"type": "image"}]
    messages = [{"role": "assistant", "content": parts}]
    chat = template(PARTS)
    text = chat.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "a|b "


@pytest.mark.parametrize(
    ("messages", "generate", "reason"),
    [
        ([], False, "needs a final message"),
        ([{"role": "assistant", "content": None}], False, "needs a final message"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], False, "needs a final message"),
        ([{"role": "hidden", "content": "x"}], False, "leaves the final message out"),
        ([{"role": "assistant", "content": "x"}], True, "exclude each other"),
    ],
)
def test_a_message_that_cannot_be_left_open_is_refused(
    messages: list[Any], generate: bool, reason: str
) -> None:
    chat = template("{% for m in messages if m.role != 'hidden' %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match=reason):
        chat.render(messages, add_generation_prompt=generate, continue_final_message=True)


# Templates like those of real models.
FOLDER = Path(__file__).parents[2] / "data/chat_templates"
TEMPLATES = {
    name: (FOLDER / f"{name}.jinja").read_text().removesuffix("\n")
    for name in ("chatml", "llama3", "mistral", "qwen")
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

SYSTEM = {"role": "system", "content": " Be brief. "}
TURN = {"role": "user", "content": "Grüße, \n 你好 🙂  "}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello \n"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "look", "arguments": {"at": ["<a>", 1.5, None]}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": '{"seen": "é"}'}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}},
    }
]
CONVERSATIONS = {
    "one turn": [TURN],
    "with a system turn": [SYSTEM, TURN],
    "several turns": [SYSTEM, TURN, ANSWER, TURN, ANSWER],
}


def reference(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    source = TEMPLATES[name]
    texts, _ = render_jinja_template([messages], chat_template=source, **TOKENS, **options)
    return str(texts[0])


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_render_as_in_transformers(
    name: str, conversation: str, generate: bool
) -> None:
    messages = CONVERSATIONS[conversation]
    expected = reference(name, messages, add_generation_prompt=generate)
    assert template(TEMPLATES[name]).render(messages, add_generation_prompt=generate) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_continued_messages_render_as_in_transformers(name: str) -> None:
    messages = [TURN, {"role": "assistant", "content": "Once upon a "}]
    expected = reference(name, messages, continue_final_message=True)
    text = template(TEMPLATES[name]).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text == expected
    assert text.rstrip().endswith("Once upon a")


@pytest.mark.parametrize("name", ["llama3", "qwen"])
def test_tools_and_their_history_render_as_in_transformers(name: str) -> None:
    messages = [SYSTEM, TURN, CALL, RESULT]
    expected = reference(name, messages, tools=TOOLS, add_generation_prompt=True)
    assert template(TEMPLATES[name]).render(messages, tools=TOOLS) == expected
    assert '"at": ["<a>", 1.5, null]' in expected


def test_client_variables_render_as_in_transformers() -> None:
    expected = reference("qwen", [TURN], add_generation_prompt=True, enable_thinking=False)
    text = template(TEMPLATES["qwen"]).render([TURN], variables={"enable_thinking": False})
    assert text == expected
    assert text.endswith("</think>\n\n")


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        template(TEMPLATES["mistral"]).render([TURN, TURN])
