"""A whole engine on the Triton backend answers as it does on torch's; see `test_kernels`."""

from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch

from tests.support.model.lora_files import weight_shapes, write_adapter
from tests.support.model.tiny_checkpoint import rewritten, save_checkpoint
from tests.support.model.whole_engine import NUM_SLOTS, Way, run_way, tokens_of, torch_config
from tests.support.worker.poisoned_graphs import PoisonedGraphs
from worker.config import EngineConfig, LoraConfig, SchedulerConfig
from worker.engine.messages import AddRequest
from worker.executor.graphs import DecodeGraphs
from worker.executor.interface import Executor
from worker.executor.model_runner import ModelRunner
from worker.executor.start import build_executor
from worker.models.llama import LlamaModel
from worker.ops.backends import TORCH
from worker.ops.linear import DenseLinear, Linear
from worker.types import Adapter, SamplingParams

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
REQUESTS = 50 if torch.cuda.is_available() else 20  # the interpreter takes seconds for each
# Sizes of captured steps and pieces, and requests for them: every capture runs a step, padded rows
# included.
PIECES = (24, 48)
SIZES, COUNT = ((2, 8), 8) if torch.cuda.is_available() else ((4,), 4)
Answers = dict[str, list[int]]


WAYS = {
    "alone": Way(batch=1),
    "batched, one step ahead": Way(batch=25, overlap=True),
    "chunked and preempted": Way(38, 40, 12, preempts=True),
    "with drafts": Way(batch=25, drafts=3),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_checkpoint(path, CONFIG)
    return path


def engine_config(checkpoint: Path, backend: str) -> EngineConfig:
    limits = SchedulerConfig(max_model_len=512)
    changes = {"block_size": 8, "num_blocks_override": 200, "scheduler": limits}
    lora = LoraConfig(NUM_SLOTS, NUM_SLOTS)
    return torch_config(checkpoint, attention_backend=backend, lora=lora, **changes)


def executor(checkpoint: Path, backend: str) -> Executor:
    return build_executor(engine_config(checkpoint, backend))[0]


def with_dense_weights(model: LlamaModel) -> LlamaModel:
    """Give the layers the weights that they have on a GPU; a CPU packs them."""
    sizes = {"qkv": 80, "output": 48, "gate_up": 80, "down": 48}

    def dense(linear: Linear, outputs: int) -> Linear:
        return DenseLinear(linear.rows(torch.arange(outputs, device=model.device)))

    layers = [
        replace(layer, **{name: dense(getattr(layer, name), size) for name, size in sizes.items()})
        for layer in model.layers
    ]
    return replace(model, layers=tuple(layers))


def graphed(checkpoint: Path) -> Executor:
    built, _ = build_executor(engine_config(checkpoint, "triton"))
    assert isinstance(built, ModelRunner)
    (model, _), adapters, device = built._awake(), built._adapters, PoisonedGraphs()
    assert adapters is not None
    model = with_dense_weights(model)

    def cache() -> torch.Tensor:
        made = torch.zeros(1, 201, 2, 1, 8, 16, device=model.device)
        device.spoilt = [made[:, -1]]
        return made

    graphs = DecodeGraphs(device, SIZES, (64, 64), 3, adapters.plan_rows, PIECES)
    return ModelRunner(model, lambda: model, cache, graphs=graphs, adapters=adapters)


def requests() -> dict[str, AddRequest]:
    draw = Random(11)
    stem = [draw.randrange(90) for _ in range(20)]
    made = {}
    for index in range(REQUESTS):
        own = [draw.randrange(90) for _ in range(270 if index == 7 else draw.randrange(2, 14))]
        prompt = (stem if index % 3 else []) + own + own[:4]
        heat = {"temperature": 0.0} if index % 2 else {"temperature": 0.8, "top_p": 0.9}
        params = SamplingParams(max_tokens=4, seed=index, ignore_eos=True, **heat)
        made[str(index)] = AddRequest(str(index), prompt, params, 0.0)
    return made


def run(executor: Executor, way: Way, asked: dict[str, AddRequest]) -> Answers:
    return tokens_of(run_way(executor, way, list(asked.values())))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Answers:
    return run(executor(checkpoint, "torch"), WAYS["batched, one step ahead"], requests())


@pytest.mark.parametrize("name", WAYS)
def test_answers_are_those_of_torch(checkpoint: Path, expected: Answers, name: str) -> None:
    assert run(executor(checkpoint, "triton"), WAYS[name], requests()) == expected


@pytest.mark.parametrize("drafts", [0, 3])
def test_graphs_answer_as_torch_does(checkpoint: Path, expected: Answers, drafts: int) -> None:
    asked = {name: request for name, request in requests().items() if int(name) < COUNT}
    way = Way(budget=PIECES[-1], batch=6, overlap=True, drafts=drafts)
    assert run(graphed(checkpoint), way, asked) == {name: expected[name] for name in asked}


@pytest.mark.parametrize("drafts", [0, 3] if torch.cuda.is_available() else [3])
def test_graphs_with_adapters_answer_as_torch_does(
    checkpoint: Path, expected: Answers, drafts: int, tmp_path: Path
) -> None:
    shapes, chosen = weight_shapes(checkpoint), list[Adapter | None]([None] * 4)
    for n in range(3):  # of different ranks
        path = write_adapter(tmp_path / f"a{n}", shapes, n, 4 + n, lora_alpha=4)
        chosen[n] = Adapter(f"a{n}", str(path), n + 1)
    asked = {
        name: msgspec.structs.replace(request, adapter=chosen[int(name) % 4])
        for name, request in requests().items()
        if int(name) < COUNT
    }
    wanted = run(executor(checkpoint, "torch"), Way(batch=6), asked)
    assert wanted != {name: expected[name] for name in asked}
    assert run(graphed(checkpoint), Way(batch=6, overlap=True, drafts=drafts), asked) == wanted


def test_a_cache_of_eight_bits_answers_as_torch_does(checkpoint: Path, tmp_path: Path) -> None:
    """Torch's cache is as coarse; values saturate in it, so an exact one answers otherwise."""
    scales = {"k_proj.k_scale": torch.tensor(0.05), "v_proj.v_scale": torch.tensor([0.0005])}
    named = {f"model.layers.0.self_attn.{name}": scale for name, scale in scales.items()}
    rewritten(checkpoint, tmp_path, lambda tensors: tensors | named)
    asked = {name: request for name, request in requests().items() if int(name) < 7}
    config = replace(engine_config(tmp_path, "triton"), kv_cache_dtype="fp8_e4m3")
    runner, _ = build_executor(config)
    assert isinstance(runner, ModelRunner)
    model, cache = runner._awake()
    assert cache.dtype is torch.float8_e4m3fn
    twin = replace(model, backend=TORCH)
    coarse = ModelRunner(twin, lambda: twin, lambda: torch.zeros_like(cache))
    way = Way(budget=40, batch=12)
    found = run(runner, way, asked)
    assert found == run(coarse, WAYS["batched, one step ahead"], asked)
    assert found != run(executor(tmp_path, "torch"), WAYS["batched, one step ahead"], asked)
