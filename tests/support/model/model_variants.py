"""Tiny models of all architectures: a transformers class, and what it changes of a tiny Llama."""

from typing import Any

TINY = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

# The sizes of models that transformers saves.
SAVED = {
    **TINY,
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 2.0}

PHI3: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PARTLY = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.75}

GEMMA2: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 24,
    "query_pre_attn_scalar": 24,
    "sliding_window": 40,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 4.0,
}
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 7,
    "head_dim": 24,
    "query_pre_attn_scalar": 24,
    "sliding_window": 40,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
QWEN3_MOE: dict[str, Any] = {
    "head_dim": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def of(name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    return name, changes


# Checkpoints both formats can hold.
VARIANTS = {
    "llama, untied head": of("Llama", tie_word_embeddings=False),
    "llama, tied head": of("Llama", tie_word_embeddings=True),
    "llama, one KV head a head": of("Llama", num_key_value_heads=4),
    "llama, explicit head_dim": of("Llama", head_dim=24),
    "llama, biases": of("Llama", attention_bias=True, mlp_bias=True),
    "llama, linear rope": of("Llama", rope_parameters=LINEAR),
    "llama, yarn rope": of("Llama", rope_parameters=YARN),
    "mistral": of("Mistral", sliding_window=None),
    "qwen2, untied head": of("Qwen2", use_sliding_window=False, tie_word_embeddings=False),
    "qwen2, tied head": of("Qwen2", use_sliding_window=False, tie_word_embeddings=True),
    "qwen2, yarn rope": of("Qwen2", use_sliding_window=False, rope_parameters=YARN),
    "qwen3, untied head": of("Qwen3", head_dim=24, tie_word_embeddings=False),
    "qwen3, tied head": of("Qwen3", head_dim=24, tie_word_embeddings=True),
    "smollm3": of("SmolLM3", num_hidden_layers=5, pad_token_id=0),
    "gemma2": of("Gemma2", **GEMMA2),
    "gemma3": of("Gemma3", **GEMMA3),
    "mixtral": of("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3 moe": of("Qwen3Moe", **QWEN3_MOE),
    "phi3": of("Phi3", **PHI3),
    "phi3, partly rotated, with a window": of(
        "Phi3", **PHI3, rope_parameters=PARTLY, sliding_window=40, tie_word_embeddings=True
    ),
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
# Those only config.json can describe.
HF_VARIANTS = {
    "gemma2, another scale": of(
        "Gemma2", **GEMMA2 | {"query_pre_attn_scalar": 60, "attn_logit_softcapping": None}
    ),
    "gemma3, listed layers and a softcap": of(
        "Gemma3",
        **GEMMA3 | {"num_hidden_layers": 2, "query_pre_attn_scalar": 60},
        final_logit_softcapping=3.0,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "mixtral, window": of("Mixtral", num_local_experts=5, num_experts_per_tok=1, sliding_window=40),
    "qwen3 moe, some dense layers": of(
        "Qwen3Moe",
        **QWEN3_MOE | {"num_hidden_layers": 4, "norm_topk_prob": False},
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "phi3, longrope": of("Phi3", rope_parameters=LONGROPE, **PHI3),
    "mistral, window": of("Mistral", sliding_window=40),
    "qwen2, some layers with a window": of(
        "Qwen2",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=40,
        max_window_layers=1,
    ),
    "qwen3, listed layers with a window": of(
        "Qwen3",
        head_dim=24,
        use_sliding_window=True,
        sliding_window=30,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "smollm3, windows without rope": of(
        "SmolLM3", num_hidden_layers=4, pad_token_id=0, use_sliding_window=True, sliding_window=20
    ),
    "llama3 rope": of("Llama", rope_parameters=LLAMA3),
    "dynamic rope": of("Llama", rope_parameters=DYNAMIC),
    "yarn rope, all settings": of(
        "Llama",
        rope_parameters=YARN
        | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3},
    ),
    "yarn rope, mscale": of(
        "Llama", rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}
    ),
    "qwen3, biases": of("Qwen3", head_dim=16, attention_bias=True),
    "smollm3, other layers": of(
        "SmolLM3", num_hidden_layers=3, no_rope_layers=[0, 1, 0], pad_token_id=0
    ),
}
