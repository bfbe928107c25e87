"""The llama family: Llama, SmolLM, Mistral, and Qwen2 (which adds biases to q, k and v)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.models.config import ModelConfig
from worker.ops.cpu.native import BlockLinear, CpuKernels, LayerShape, NativeLayer
from worker.ops.linear import Linear
from worker.ops.norm import rms_norm
from worker.ops.paged_attention import paged_attention, write_kv
from worker.ops.rope import RopeTable, apply_rope_
from worker.ops.step import StepTensors as StepTensors


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. `qkv` and `gate_up` are fused along their outputs.

    `query_norm` and `key_norm` [head_dim] normalise each head before it is rotated, where the
    architecture does so; `rotates` is off for layers without rotary embedding. With `native`, the
    kernels for a CPU run the layer.
    """

    input_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    rotates: bool = True
    native: NativeLayer | None = None


def layer_shape(config: ModelConfig) -> LayerShape:
    """What the native layers of a model have in common."""
    return LayerShape(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)


def with_native(layer: LayerWeights, config: ModelConfig) -> LayerWeights:
    """The layer, run by native kernels if all its products are native."""
    products = (layer.qkv, layer.output, layer.gate_up, layer.down)
    native = [product for product in products if isinstance(product, BlockLinear)]
    if len(native) < len(products):
        return layer
    norms = (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
    return dataclasses.replace(
        layer, native=NativeLayer(layer_shape(config), native, norms, layer.rotates)
    )


def attention_block(
    x: Tensor,
    layer: LayerWeights,
    config: ModelConfig,
    rope: RopeTable,
    cache: Tensor,
    step: StepTensors,
) -> Tensor:
    """x [T, hidden] + attention(norm(x)); writes the step's keys and values into `cache`.

    cache [num_blocks, 2, kv_heads, block_size, head_dim] is this layer's; `rope` holds the rows of
    the step's positions, or of all for a native layer, which changes x itself.
    """
    if layer.native is not None:
        return layer.native.attention(x, rope, cache, step)
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = layer.qkv(rms_norm(x, layer.input_norm, config.rms_norm_eps))
    queries_end, keys_end = heads * head_dim, (heads + kv_heads) * head_dim
    rotated = qkv[:, :keys_end].view(-1, heads + kv_heads, head_dim)
    if layer.query_norm is not None and layer.key_norm is not None:
        for part, weight in (
            (rotated[:, :heads], layer.query_norm),
            (rotated[:, heads:], layer.key_norm),
        ):
            part.copy_(rms_norm(part, weight, config.rms_norm_eps))
    if layer.rotates:
        apply_rope_(rotated, rope)
    write_kv(cache, qkv[:, queries_end:], step.slots)
    queries = qkv[:, :queries_end].view(-1, heads, head_dim)
    return layer.output(paged_attention(queries, cache, step), residual=x)


def mlp_block(x: Tensor, layer: LayerWeights, config: ModelConfig) -> Tensor:
    """x [T, hidden] + down(silu(gate) · up) of norm(x) (Shazeer, arXiv:2002.05202). A native layer
    changes x itself.
    """
    if layer.native is not None:
        return layer.native.mlp(x)
    gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, config.rms_norm_eps)).chunk(2, dim=-1)
    return layer.down(functional.silu(gate).mul_(up), residual=x)


@dataclass(frozen=True, slots=True)
class LlamaModel:
    """Weights on one device, and how to run them. Holds no state between steps.

    `embedding` is read by rows only. `dtype` is that of activations. With `kernels`, all products
    and layers are native.
    """

    config: ModelConfig
    embedding: Linear
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear
    rope: RopeTable
    dtype: torch.dtype
    device: torch.device
    kernels: CpuKernels | None = None

    def forward(self, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """Run a step; logits [R, vocab_size] float32 of the step's `sample_rows`.

        kv_cache [num_layers, num_blocks, 2, kv_heads, block_size, head_dim] is read and written.
        """
        return self.logits(self.hidden(step, kv_cache))

    def hidden(self, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """As `forward`, but what `logits` makes them from: [R, hidden_size]."""
        return self.states(step, kv_cache).index_select(0, step.sample_rows)

    def states(self, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """As `forward`, but of all rows what the final norm and the head have not seen yet:
        [T, hidden_size].
        """
        x = self.embedding.rows(step.token_ids)
        rope = self.rope if self.kernels is not None else self.rope.rows(step.positions)
        for layer, cache in zip(self.layers, kv_cache.unbind(0), strict=True):
            x = attention_block(x, layer, self.config, rope, cache, step)
            x = mlp_block(x, layer, self.config)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab_size] float32 of hidden states [R, hidden_size]; each row on its own."""
        norm = rms_norm if self.kernels is None else self.kernels.norm
        return self.head(norm(hidden, self.final_norm, self.config.rms_norm_eps)).float()
