"""Random weights in GGUF's blocks, and whole GGUF files of them: the package `gguf` cannot encode
the K encodings.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from worker.ops.planes import BlockWeight

Type = gguf.GGMLQuantizationType
# The bytes of half precision numbers in a block: scales, and what is added (or subtracted).
_SCALES = {"Q6_K": 208, "Q3_K": 108}
_MINIMUMS = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}
# What a scale is multiplied with at most: a code, or a code and the scale of a group.
_LARGEST = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 128}
_LARGEST |= {"Q3_K": 4 * 32, "Q4_K": 15 * 63, "Q5_K": 31 * 63, "Q6_K": 32 * 128}


def random_blocks(
    kind: str, rows: int, columns: int, seed: int = 1, size: float = 1.0
) -> BlockWeight:
    """Weights of up to about `size`."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    noise = np.random.default_rng(seed)
    blocks = noise.integers(0, 256, (rows, columns // elements, num_bytes), dtype=np.uint8)
    scales = noise.uniform(0.5, 1.0, blocks.shape[:2]) * size / _LARGEST[kind]
    put(blocks, _SCALES.get(kind, 0), scales)
    if kind in _MINIMUMS:
        is_added = kind in ("Q4_1", "Q5_1")
        added = -scales * 7 if is_added else scales * _LARGEST[kind] / 2 / 63
        put(blocks, _MINIMUMS[kind], added)
    return BlockWeight(kind, blocks)


def put(blocks: np.ndarray, place: int, values: np.ndarray) -> None:
    halves = values.astype("<f2")[..., None].view(np.uint8)
    blocks[..., place : place + 2] = halves


def decoded(weight: BlockWeight) -> np.ndarray:
    """The weight [out, in] float32, by the package."""
    rows = weight.data.reshape(len(weight.data), -1)
    return np.asarray(gguf.quants.dequantize(rows, Type[weight.type_name]), np.float32)


def save_llama(
    path: Path,
    kinds: Mapping[str, str],
    sizes: tuple[int, int, int] = (40, 256, 256),
    num_experts: int = 0,
) -> None:
    """Save a llama of one layer, with `sizes` (vocabulary, hidden, inner) and four heads, two of
    them for keys and values; with `num_experts`, a mixture that takes two of them. `kinds` has the
    encodings of tensors by ggml's names; the others are in float32.
    """
    vocab, hidden, inner = sizes
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(2)
    noise = np.random.default_rng(2)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (vocab, hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // 2, hidden),
        "blk.0.attn_v": (hidden // 2, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    if num_experts:
        for name in ("blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"):
            shapes[f"{name}_exps"] = (num_experts, *shapes.pop(name))
        shapes["blk.0.ffn_gate_inp"] = (num_experts, hidden)
    if "output" in kinds:
        shapes["output"] = (vocab, hidden)
    for number, (name, shape) in enumerate(shapes.items()):
        kind = kinds.get(name)
        if kind is None:
            values = noise.normal(size=shape, scale=0.1).astype(np.float32)
            writer.add_tensor(f"{name}.weight", values)
            continue
        blocks = random_blocks(kind, math.prod(shape[:-1]), shape[-1], number, 0.2).data
        writer.add_tensor(f"{name}.weight", blocks.reshape(*shape[:-1], -1), raw_dtype=Type[kind])
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", noise.uniform(0.5, 1.5, hidden).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
