"""The model's text: rendering and encoding within limits."""

from datetime import datetime

import pytest

from worker.api.generate.text import ModelText, opens_a_turn
from worker.api.schema.params import ModelLimits
from worker.api.schema.requests import ChatMessage, TokenizeRequest
from worker.errors import RequestError
from worker.sim import tokenizer as sim
from worker.tokenizer.chat import ChatTemplate

SOURCE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% for d in documents %}({{ d.title }}){% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}{{ mood }}{{ reasoning_effort }}"
)
HELLO = [ChatMessage(role="user", content="hello")]


def side(source: str | None = SOURCE) -> ModelText:
    template = None
    if source is not None:
        template = ChatTemplate(source, bos_token="", eos_token="", now=datetime.now)
    return ModelText(sim.SimTokenizer(), template, ModelLimits(10_000, 2000))


async def test_the_template_sees_documents_and_the_clients_variables() -> None:
    options = TokenizeRequest(
        documents=[{"title": "t"}], chat_template_kwargs={"mood": "!"}, reasoning_effort="low"
    )
    prompt = await side().chat_prompt(HELLO, options)
    assert prompt.text == "[user]hello;(t)>!low"
    assert prompt.opens_turn


async def test_a_model_without_a_template_does_not_chat() -> None:
    with pytest.raises(RequestError, match="/v1/completions"):
        await side(None).chat_prompt(HELLO, TokenizeRequest())


async def test_the_number_of_documents_is_bounded() -> None:
    documents = [{"title": "t"}] * 1025
    await side().chat_prompt(HELLO, TokenizeRequest(documents=documents[1:]))
    with pytest.raises(RequestError) as caught:
        await side().chat_prompt(HELLO, TokenizeRequest(documents=documents))
    assert caught.value.param == "documents"


@pytest.mark.parametrize(
    ("options", "opens"),
    [
        (TokenizeRequest(), True),
        (TokenizeRequest(add_generation_prompt=False), False),
        (TokenizeRequest(continue_final_message=True), False),
        (TokenizeRequest(continue_final_message=True, add_generation_prompt=False), False),
    ],
)
def test_a_prompt_opens_a_turn_unless_the_last_one_continues(
    options: TokenizeRequest, opens: bool
) -> None:
    assert opens_a_turn(options) is opens


async def test_a_long_text_is_encoded_like_a_short_one() -> None:
    text = "foko lasa " * 1000
    ids = await side().encode(text, add_special_tokens=True)
    assert ids == sim.SimTokenizer().encode(text, add_special_tokens=True)
    with pytest.raises(RequestError, match="maximum context length"):
        await side().encode("x" * 160_001, add_special_tokens=True)
