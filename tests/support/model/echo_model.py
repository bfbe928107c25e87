"""A model whose marks are control tokens and whose other tokens are bytes, for a simulated worker
that echoes its prompt: it says what the last message says, be it of a user, a tool or the system.
With `TEMPLATE` that message is the whole prompt; with `TALK` the prompt has the conversation, which
the prefix cache finds again in the next turn, answers and calls included.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = ("<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
# Of tools it shows the format alone.
TEMPLATE = "{% if tools %}{# <tool_call> #}{% endif %}{{ messages[-1].content }}"
TALK = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }} In <tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather.",
            "strict": True,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CITIES = ("Zürich 🙂", 'a "b" {</tool_call>}')
CALLS = [
    '<tool_call>\n{"name": "get_weather", "arguments": '
    + json.dumps({"city": city}, ensure_ascii=False)
    + "}\n</tool_call>"
    for city in CITIES
]
ANSWER = f"<think>\nTwo cities.\n</think>\n\nI look.\n{CALLS[0]}\n{CALLS[1]}"


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Model files for a simulated worker that echoes its last message; tokens are bytes and marks.
    With `TALK` the prompt has the conversation, so that the prefix cache finds earlier turns.
    """
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>{call}</tool_call>"


def write_echo_model(folder: Path, template: str = TEMPLATE) -> tuple[str, ...]:
    # In the order of bytes, as the simulator knows a line break by its byte.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte)
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "max_position_embeddings": 4096 if template == TEMPLATE else 65536,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    marks = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**marks, "chat_template": template}))
    return ("--model", str(folder), "--served-model-name", "echo", "--sim-mode", "echo")


def _byte(letter: str) -> int:
    """In byte-level vocabularies printable bytes stand for themselves, the others follow from 256
    on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if ord(letter) < 256:
        return ord(letter)
    return [byte for byte in range(256) if byte not in printable][ord(letter) - 256]
