"""A tiny llama of random weights, and steps on it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.executor.state import DeviceState
from worker.executor.step_batch import StepBatch
from worker.models.config import ModelConfig
from worker.models.llama import LayerWeights, LlamaModel, StepTensors
from worker.models.loader import model_rope_table
from worker.ops.linear import DenseLinear, make_linear
from worker.types import ScheduledSequence

BLOCK_SIZE = 4
NUM_BLOCKS = 40
CPU = torch.device("cpu")
GPU_IF_ANY = torch.device("cuda" if torch.cuda.is_available() else "cpu")

TINY = ModelConfig(
    architecture="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tied_head=True,
)


def tiny_llama(seed: int = 0, config: ModelConfig = TINY, device: torch.device = CPU) -> LlamaModel:
    """Weights are far enough from zero for tokens to differ."""
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.15) -> Tensor:
        return (torch.randn(shape, generator=noise) * scale).to(device)

    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            input_norm=1 + draw(hidden),
            qkv=make_linear(draw(queries + 2 * keys, hidden)),
            output=make_linear(draw(hidden, queries)),
            mlp_norm=1 + draw(hidden),
            gate_up=make_linear(draw(2 * inner, hidden)),
            down=make_linear(draw(hidden, inner)),
        )
        for _ in range(config.num_layers)
    )
    embedding = draw(config.vocab_size, hidden, scale=1.0)
    head = embedding if config.tied_head else draw(config.vocab_size, hidden, scale=1.0)
    return LlamaModel(
        config=config,
        embedding=DenseLinear(embedding),
        layers=layers,
        final_norm=1 + draw(hidden),
        head=make_linear(head),
        rope=model_rope_table(config, config.max_context, device),
        dtype=torch.float32,
        device=device,
    )


def empty_cache(config: ModelConfig, num_blocks: int = NUM_BLOCKS) -> Tensor:
    shape = (config.num_layers, num_blocks, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return torch.zeros(shape)


def step_of(token_ids: Sequence[int], start: int, table: Sequence[int]) -> StepTensors:
    sequence = ScheduledSequence(1, list(token_ids), start, list(table))
    return StepBatch([sequence], DeviceState(BLOCK_SIZE, torch.device("cpu"))).tensors


def states_of(model: LlamaModel, token_ids: Sequence[int]) -> Tensor:
    table = range(-(-len(token_ids) // BLOCK_SIZE))
    step = step_of(token_ids, 0, table)
    with torch.inference_mode():
        return model.states(step, empty_cache(model.config)).clone()
