"""The llama family and its descendants: Mistral, Phi, Qwen (with biases of q, k and v, or norms)
and Gemma (which also normalises the outputs of attention and MLP).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from worker.models.config import ModelConfig
from worker.ops.backends import TORCH, AddTo, Around, Attention, AttentionShape, Backend, HeadNorms
from worker.ops.cpu.native import BlockLinear, CpuKernels, LayerShape, NativeLayers
from worker.ops.experts import Experts
from worker.ops.linear import Linear
from worker.ops.parallel import summed_over_ranks
from worker.ops.rope import RopeTable
from worker.ops.step import StepTensors as StepTensors


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; `qkv` and `gate_up` are fused along their outputs. Without `input_norm`,
    queries, keys and values read the layer's input itself.

    `query_norm` and `key_norm` [head_dim] come before the rotation, `attention_norm` and
    `branch_norm` [hidden] before the outputs of attention and MLP are added, where the architecture
    has them. `gate_up` and `down` belong to the first of `experts`. An 8-bit cache stores keys and
    values divided by `kv_scales` [2, kv_heads] float32.
    """

    input_norm: Tensor | None
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    rotates: bool = True
    window: int | None = None
    attention_norm: Tensor | None = None
    branch_norm: Tensor | None = None
    experts: Experts | None = None
    kv_scales: Tensor | None = None


def layer_shape(config: ModelConfig) -> LayerShape:
    return LayerShape(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)


def attention_shape(config: ModelConfig, kv_cache: Tensor) -> AttentionShape:
    return AttentionShape(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        kv_cache.shape[4],
        config.attention_scale or config.head_dim**-0.5,
        config.attention_softcap,
    )


def native_layers(layers: Sequence[LayerWeights], config: ModelConfig) -> NativeLayers | None:
    """Return native layers; None: a product is not native, or the kernels lack the arithmetic."""
    if config.post_norms or config.activation != "silu" or config.num_experts:
        return None
    products, norms = [], []
    for layer in layers:
        if layer.input_norm is None:
            return None
        own = (layer.qkv, layer.output, layer.gate_up, layer.down)
        products.append([product for product in own if isinstance(product, BlockLinear)])
        norms.append((layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm))
        if len(products[-1]) < len(own):
            return None
    rotates, windows = [n.rotates for n in layers], [n.window for n in layers]
    return NativeLayers(layer_shape(config), products, norms, rotates, windows)


# Adds the adapters' part of a product, by its name: from the input x, to the output y, in place.
AddAdapters = Callable[[str, Tensor, Tensor], None]


def _to(name: str, add: AddAdapters | None) -> AddTo:
    return None if add is None else partial(add, name)


def before_attention(
    x: Tensor,
    layer: LayerWeights,
    config: ModelConfig,
    cache: Tensor,
    attention: Attention,
    backend: Backend,
    add: AddAdapters | None = None,
    beside: Tensor | None = None,
) -> Tensor:
    """Write keys and values of norm(x), x [T, hidden], into `cache`; return the queries [T, heads,
    head_dim]. The parameters are those of `attention_block`.
    """
    eps = config.rms_norm_eps
    read, norm = x, layer.input_norm
    if beside is not None:
        normed = x if norm is None else backend.rms_norm(x, norm, eps)
        read, norm = torch.cat((beside, normed), dim=-1), None
    qkv = backend.product(layer.qkv, read, Around(norm, eps), _to("qkv", add))
    norms = None
    if layer.query_norm is not None and layer.key_norm is not None:
        norms = HeadNorms(layer.query_norm, layer.key_norm, eps)
    attention.write(qkv, cache, norms, layer.rotates, _scales(layer, cache))
    width = config.num_heads * config.head_dim
    return qkv[:, :width].view(-1, config.num_heads, config.head_dim)


def attend(queries: Tensor, layer: LayerWeights, cache: Tensor, attention: Attention) -> Tensor:
    """Return what queries [T, heads, head_dim] attend to: [T, heads · head_dim]."""
    return attention.run(queries, cache, layer.window, _scales(layer, cache))


def after_attention(
    x: Tensor,
    attended: Tensor,
    layer: LayerWeights,
    config: ModelConfig,
    backend: Backend,
    add: AddAdapters | None = None,
) -> Tensor:
    """Compute x [T, hidden] + output(attended [T, heads · head_dim])."""
    # Without a norm in between, the product can add the residual itself, in one pass.
    after = Around(residual=x if layer.attention_norm is None else None)
    output = backend.product(layer.output, attended, after, _to("output", add))
    if layer.attention_norm is None:
        return output
    return x + backend.rms_norm(output, layer.attention_norm, config.rms_norm_eps)


def _scales(layer: LayerWeights, cache: Tensor) -> Tensor | None:
    # Wider caches store keys and values without scaling.
    return layer.kv_scales if cache.itemsize == 1 else None


def attention_block(
    x: Tensor,
    layer: LayerWeights,
    config: ModelConfig,
    cache: Tensor,
    attention: Attention,
    backend: Backend,
    add: AddAdapters | None = None,
    beside: Tensor | None = None,
) -> Tensor:
    """Compute x [T, hidden] + attention(norm(x)); write the step's keys and values into `cache`.

    cache [num_blocks, 2, kv_heads, block_size, head_dim] is this layer's; `attention` is planned
    for the step by `backend`; `add` gets the name, input and output of every product. Queries, keys
    and values also read `beside` [T, n], which comes before norm(x).
    """
    queries = before_attention(x, layer, config, cache, attention, backend, add, beside)
    attended = attend(queries, layer, cache, attention)
    return after_attention(x, attended, layer, config, backend, add)


def mlp_block(
    x: Tensor,
    layer: LayerWeights,
    config: ModelConfig,
    backend: Backend,
    add: AddAdapters | None = None,
) -> Tensor:
    """Compute x [T, hidden] + down(silu(gate) · up) of norm(x), or with GELU, or with several
    experts. `add` gets the name, input and output of every product but those of experts.
    """
    eps = config.rms_norm_eps
    if layer.experts is not None:
        mixed = backend.mix_experts(backend.rms_norm(x, layer.mlp_norm, eps), layer.experts)
        return x + (summed_over_ranks(mixed) if layer.experts.is_split else mixed)
    around = Around(layer.mlp_norm, eps, config.activation)
    gated = backend.product(layer.gate_up, x, around, _to("gate_up", add))
    after = Around(residual=x if layer.branch_norm is None else None)
    down = backend.product(layer.down, gated, after, _to("down", add))
    if layer.branch_norm is None:
        return down
    return x + backend.rms_norm(down, layer.branch_norm, eps)


def layer_states(
    x: Tensor,
    layers: Sequence[LayerWeights],
    config: ModelConfig,
    rope: RopeTable,
    kv_cache: Tensor,
    step: StepTensors,
    backend: Backend,
    local_rope: RopeTable | None = None,
) -> Iterator[Tensor]:
    """Run x [T, hidden] through layers, each with its part of the cache; yield the state that
    enters each layer, then the one that leaves the last.
    """
    shape = attention_shape(config, kv_cache)
    attention = backend.plan(step, shape, rope)
    local = attention if local_rope is None else backend.plan(step, shape, local_rope)
    for index, (layer, cache) in enumerate(zip(layers, kv_cache.unbind(0), strict=True)):
        yield x
        planned = attention if layer.window is None else local
        add = None if step.adapters is None else partial(step.adapters.add, index)
        x = attention_block(x, layer, config, cache, planned, backend, add)
        x = mlp_block(x, layer, config, backend, add)
    yield x


@dataclass(frozen=True, slots=True)
class LlamaModel:
    """Weights on one device, and how to run them. Holds no state between steps.

    `embedding` is read by rows only. `dtype` is the dtype of activations. With `kernels`, all
    products are native, and `native`, if set, runs the layers; else `backend` does. `local_rope` is
    the table of the layers with a window, if it differs.
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
    native: NativeLayers | None = None
    backend: Backend = TORCH
    local_rope: RopeTable | None = None

    def forward(self, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """Run a step; return logits [R, vocab_size] float32 of its `sample_rows`.

        kv_cache [num_layers, num_blocks, 2, kv_heads, block_size, head_dim] is read and written.
        """
        return self.logits(self.hidden(step, kv_cache))

    def hidden(self, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """Run a step; return the input of `logits` [R, hidden_size] for its `sample_rows`."""
        return self.states(step, kv_cache).index_select(0, step.sample_rows)

    def states(self, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """Run a step; return hidden states [T, hidden_size] of all rows before the final norm."""
        states, _ = self.states_and_inputs(step, kv_cache, ())
        return states

    def states_and_inputs(
        self, step: StepTensors, kv_cache: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run a step; return its `states`, and those [T, hidden_size] that enter `layers`; the
        number of layers stands for the state that leaves the last one.
        """
        x = self.embedded(step.token_ids)
        inputs: dict[int, Tensor] = {}
        if self.native is not None:
            first = 0
            for layer in sorted({*layers, self.config.num_layers}):
                x = self.native.run(x, self.rope, kv_cache, step, range(first, layer))
                first, inputs[layer] = layer, x.clone() if layer in layers else x
        else:
            model = (self.layers, self.config, self.rope, kv_cache, step, self.backend)
            for layer, state in enumerate(layer_states(x, *model, self.local_rope)):
                x = state
                if layer in layers:
                    inputs[layer] = x
        return x, [inputs[layer] for layer in layers]

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Return the input [T, hidden_size] of the first layer."""
        x = self.embedding.rows(token_ids)
        # Rounded to the dtype first, as transformers does.
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, vocab_size] float32 of hidden states [R, hidden_size], row by row."""
        logits = self.head(self.normed(hidden)).float()
        cap = self.config.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def normed(self, hidden: Tensor) -> Tensor:
        """Return hidden states [R, hidden_size] after the final norm; each row on its own."""
        norm = self.backend.rms_norm if self.kernels is None else self.kernels.norm
        return norm(hidden, self.final_norm, self.config.rms_norm_eps)
