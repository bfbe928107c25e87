"""A chat template with tools, and an engine with scripted answers."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from worker.sim import tokenizer as sim
from worker.types import FinishReason

# Shaped like Qwen's and Hermes's.
TEMPLATE = """{%- if tools %}
{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools> Answer within <tool_call></tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def says(
    bench: Any, tokens: str | Sequence[int], finish: FinishReason = FinishReason.STOP, size: int = 1
) -> None:
    """Make the engine generate the bytes of a text, or tokens, a given number in each step."""
    ids = list(tokens.encode()) if isinstance(tokens, str) else list(tokens)
    ends = finish is FinishReason.STOP
    ids += [sim.IM_END_ID] if ends else []
    starts = range(0, len(ids), size)
    bench.engine.steps = [
        bench.say(
            ids[at : at + size],
            finish if at == starts[-1] else None,
            stop_token=sim.IM_END_ID if ends and at == starts[-1] else None,
        )
        for at in starts
    ]


class ByteTokenizer(sim.SimTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def prompt_of(bench: Any) -> str:
    return bytes(bench.engine.requests[-1].prompt_token_ids).decode()


@asynccontextmanager
async def client_of(
    bench: Any, kind: Callable[..., Any], path: str = "", key: str = "x", **settings: Any
) -> AsyncIterator[Any]:
    """A vendor's client of a worker on a socket, which uses the template and the tokenizer."""
    bench.template_source, bench.tokenizer = TEMPLATE, ByteTokenizer()
    async with (
        bench.listening(bench.api(max_model_len=4096, **settings)) as url,
        kind(base_url=url + path, api_key=key, max_retries=0) as client,
    ):
        yield client
