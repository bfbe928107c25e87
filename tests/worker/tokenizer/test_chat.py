"""Chat templates render as Hugging Face renders them, and cannot reach out of the sandbox."""

from __future__ import annotations

from datetime import datetime

import pytest

from worker.errors import ModelError, RequestError
from worker.tokenizer.chat import ChatTemplate


def template(source: str) -> ChatTemplate:
    """A template on a fixed day."""
    return ChatTemplate(
        source, bos_token="<s>", eos_token="</s>", now=lambda: datetime(2024, 2, 29)
    )


USER = [{"role": "user", "content": "<é> & 'x'"}]


def test_block_lines_leave_no_blanks() -> None:
    """Lines with only a tag vanish, as with trim_blocks and lstrip_blocks."""
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\nend"
    assert template(source).render(USER) == "<s>\n<é> & 'x'\nend"


def test_the_extras_of_hugging_face_are_there() -> None:
    """`tojson` escapes nothing for HTML; `strftime_now` is the given clock; loops can break."""
    source = (
        "{{ messages[0] | tojson }} {{ strftime_now('%d %b %Y') }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    expected = '{"role": "user", "content": "<é> & \'x\'"} 29 Feb 202401'
    assert template(source).render(USER) == expected


def test_variables_cannot_replace_the_messages() -> None:
    """A client's own variables are seen, but never instead of the conversation."""
    chat = template("{{ messages | length }} {{ thinking }} {{ add_generation_prompt }}")
    variables = {"messages": [], "thinking": True, "add_generation_prompt": "x"}
    assert chat.render(USER, variables=variables) == "1 True True"


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
    ],
)
def test_what_a_template_refuses_is_the_clients_error(source: str) -> None:
    """A template that raises, fails, or leaves the sandbox answers 400."""
    with pytest.raises(RequestError) as caught:
        template(source).render(USER)
    assert caught.value.param == "messages"


def test_a_broken_template_is_the_models_error() -> None:
    """A template that does not compile is found at start-up."""
    with pytest.raises(ModelError, match="chat template"):
        template("{% if %}")
