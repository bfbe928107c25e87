"""A model whose marks are control tokens and whose other tokens are bytes, for a simulated worker
that echoes its prompt. The chat template's prompt is the last message, be it of a user or a tool:
so the model says what a test sends it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = ("<eos>", "<tool_call>", "</tool_call>", "<think>", "</think>")
# Of tools it shows the format alone.
TEMPLATE = "{% if tools %}{# <tool_call> #}{% endif %}{{ messages[-1].content }}"
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


def write_echo_model(folder: Path) -> tuple[str, ...]:
    """Write the files into a folder; the flags of a worker that serves it as `echo`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id("<eos>")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "max_position_embeddings": 4096,
        "eos_token_id": eos,
    }
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ("--model", str(folder), "--served-model-name", "echo", "--sim-mode", "echo")
