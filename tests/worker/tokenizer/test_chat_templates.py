"""Templates like those of real models render as in transformers."""

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from worker.errors import RequestError
from worker.tokenizer.chat import ChatTemplate

CHATML = """{% for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helper.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have these functions:\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("only one tool call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
  {%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- for message in rest %}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
  {%- endif %}
  {%- if message['role'] == 'user' %}
    {{- ' [INST] ' + (system + '\\n\\n' if loop.first and system is defined else '')
        + message['content'] + ' [/INST]' }}
  {%- elif message['role'] == 'assistant' %}
    {% generation %}{{- ' ' + message['content'] + eos_token }}{% endgeneration %}
  {%- endif %}
{%- endfor %}"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.last_query < 0 and message.role == "user" %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- if '</think>' in content and loop.index0 < ns.last_query %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen": QWEN}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": "Grüße, \n 你好 🙂  "}
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
    "one turn": [USER],
    "with a system turn": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, USER, ANSWER],
}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], **TOKENS, now=datetime.now)


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
    assert template(name).render(messages, add_generation_prompt=generate) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_continued_messages_render_as_in_transformers(name: str) -> None:
    messages = [USER, {"role": "assistant", "content": "Once upon a "}]
    expected = reference(name, messages, continue_final_message=True)
    text = template(name).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == expected
    assert text.rstrip().endswith("Once upon a")


@pytest.mark.parametrize("name", ["llama3", "qwen"])
def test_tools_and_their_history_render_as_in_transformers(name: str) -> None:
    messages = [SYSTEM, USER, CALL, RESULT]
    expected = reference(name, messages, tools=TOOLS, add_generation_prompt=True)
    assert template(name).render(messages, tools=TOOLS) == expected
    assert '"at": ["<a>", 1.5, null]' in expected


def test_client_variables_render_as_in_transformers() -> None:
    expected = reference("qwen", [USER], add_generation_prompt=True, enable_thinking=False)
    text = template("qwen").render([USER], variables={"enable_thinking": False})
    assert text == expected
    assert text.endswith("</think>\n\n")


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        template("mistral").render([USER, USER])
