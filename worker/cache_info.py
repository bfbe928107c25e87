"""The labels of `vllm:cache_config_info`: the KV cache as vLLM describes its own."""

from __future__ import annotations

from worker.config import EngineConfig
from worker.engine.messages import EngineReady


def cache_info(engine: EngineConfig, ready: EngineReady) -> dict[str, str]:
    """One label for each attribute of vLLM's cache configuration, as `str` shows its value. What
    this engine does not have is "None", 0 or False, as in a vLLM that does not use it.
    """
    num_tokens = ready.num_blocks * ready.block_size
    values = {
        "block_size": ready.block_size,
        "user_specified_block_size": True,
        "kv_cache_layout": "auto",
        "prefix_match_unit": 1 if engine.enable_partial_hits else ready.block_size,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "cache_dtype": engine.dtype,
        "is_attention_free": False,
        "num_gpu_blocks_override": engine.num_blocks_override,
        "sliding_window": None,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "prefix_caching_hash_algo": engine.prefix_caching_hash_algo,
        "prefix_cache_retention_interval": None,
        "num_gpu_blocks": ready.num_blocks,
        "num_cpu_blocks": None,
        "effective_attention_block_size": ready.block_size,
        "kv_cache_size_tokens": num_tokens,
        "kv_cache_max_concurrency": num_tokens / ready.max_model_len,
        "hash_block_size": ready.block_size,
        "kv_cache_memory_bytes": engine.kv_cache_memory_bytes,
        "kv_offloading_size": None,
        "kv_offloading_backend": "native",
        "mamba_block_size": None,
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": None,
        "mamba_ssm_cache_dtype": "auto",
    }
    return {name: str(value) for name, value in values.items()}
