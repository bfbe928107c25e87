"""The llama family: Llama, SmolLM, Mistral, and Qwen2 (which adds biases to q, k and v)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.models.config import ModelConfig
from worker.models.layers import LayerWeights, StepTensors, attention_block, mlp_block
from worker.ops.linear import Linear
from worker.ops.norm import rms_norm
from worker.ops.rope import RopeTable


@dataclass(frozen=True, slots=True)
class LlamaModel:
    """Weights on one device in one dtype, and how to run them. Holds no state between steps."""

    config: ModelConfig
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear
    rope: RopeTable

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and of the KV cache."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live and steps run."""
        return self.embedding.device

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
        x = functional.embedding(step.token_ids, self.embedding)
        rope = self.rope.rows(step.positions)
        for layer, cache in zip(self.layers, kv_cache.unbind(0), strict=True):
            x = attention_block(x, layer, self.config, rope, cache, step)
            x = mlp_block(x, layer, self.config)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab_size] float32 of hidden states [R, hidden_size]; each row on its own."""
        return self.head(rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)).float()
