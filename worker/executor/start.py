"""Builds the executor of a configuration: device, number types, backend, weights, KV cache."""

import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import cast

# First: it sets variables that torch reads when it is loaded.
from worker.executor.model_runner import ModelRunner

# isort: split
import torch
from torch import Tensor

from worker.config import EngineConfig
from worker.errors import ConfigError, DeviceMemoryError
from worker.executor.adapters import DeviceAdapters
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.drafting.interface import DraftNetwork
from worker.executor.drafting.loading import LoadNetwork, drafter_bytes_per_token, network_loader
from worker.executor.graphs import CudaGraphs, DecodeGraphs, graph_sizes
from worker.executor.interface import Executor, execute
from worker.executor.kv_cache import allocate, choose_num_blocks, room_bytes
from worker.executor.memory import CudaMemory, DeviceMemory, largest_step
from worker.executor.pieces import piece_sizes
from worker.executor.ranks import Ranks, TensorParallelExecutor, agree_on_blocks
from worker.logits_processors import load as load_processor
from worker.models.adapters import layer_products
from worker.models.checkpoints import open_checkpoint
from worker.models.config import ModelConfig
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.backends import TORCH, Backend
from worker.ops.cpu.native import CpuKernels, open_kernels
from worker.ops.linear import can_pack, supported_dtype
from worker.ops.lora import AdapterStore, LinearAdapters
from worker.ops.parallel import WHOLE, Shard
from worker.types import ModelOutput

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# vLLM has two names for one type.
EIGHT_BITS = ("fp8", "fp8_e4m3")
_EIGHT_BIT_GPUS = (8, 9)  # the compute capability


def build_executor(config: EngineConfig) -> tuple[Executor, int]:
    """Load the model and allocate its KV cache; return the executor and the number of blocks.

    Other ranks end with the caller's thread. Raises `ModelError` for a checkpoint that cannot be
    loaded, and `ConfigError` for settings that cannot work. Sets the number of torch threads.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return build_shard(config)
    ranks = Ranks(config)
    try:
        runner, num_blocks = build_shard(config, Shard(0, size), ranks.start)
    except BaseException:
        ranks.close()
        raise
    # The runner's shape is that of its shard.
    num_kv_heads = open_checkpoint(Path(config.model_path or "")).config.num_kv_heads
    return TensorParallelExecutor(runner, ranks, size, num_kv_heads), num_blocks


def build_shard(
    config: EngineConfig, shard: Shard = WHOLE, meet: Callable[[torch.device], object] | None = None
) -> tuple[ModelRunner, int]:
    """Build one rank's executor; `meet` joins the other ranks after all checks."""
    if config.model_path is None:
        raise ConfigError("--engine torch needs --model")
    for name in config.logits_processors:
        load_processor(name)  # so that the first request that uses it need not wait
    path, max_model_len = config.model_path, config.scheduler.max_model_len
    if config.num_threads is not None or shard.size > 1:
        threads = config.num_threads or torch.get_num_threads()
        torch.set_num_threads(max(1, threads // shard.size))  # ranks share the CPU
    device = choose_device(config.device, shard)
    dtype = choose_dtype(config.dtype, device, can_pack(torch.bfloat16))
    kernels = choose_kernels(config, device, dtype)
    backend = choose_backend(config.attention_backend, device)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, device, dtype, backend)
    memory = CudaMemory(device) if device.type == "cuda" else None

    def check(shape: ModelConfig) -> None:
        # Refuse a model that is too large before loading takes minutes.
        if shard.rank == 0:
            choose_num_blocks(config, shape, kv_dtype, device, room_bytes(config, memory))
        if meet is not None:
            meet(device)

    def load(check: Callable[[ModelConfig], object] | None = None) -> LlamaModel:
        how = (check, kernels, config.quantization, shard)
        model = load_model(path, dtype, device, max_model_len, *how)
        return dataclasses.replace(model, backend=backend)

    load_network = _network_loader(config, path, shard)
    with torch.inference_mode(), fitting("the weights", _FOR_WEIGHTS):
        model = load(check)
        adapters = choose_adapters(config, model, shard)
        network = load_network(model) if load_network is not None else None
        extra = drafter_bytes_per_token(network, model, kv_dtype) if network is not None else 0
    graphs = choose_graphs(config, backend, device, adapters)
    source = (load_network, network)
    make_drafter = partial(_make_drafter, config, model, source, kv_dtype, shard.size > 1)
    parts = (graphs, adapters, make_drafter)
    taken = step_bytes(config, model, kv_dtype, memory, *parts)
    room = room_bytes(config, memory, taken)
    places = config, model.config, kv_dtype, device
    choose = partial(choose_num_blocks, *places, drafter_token_bytes=extra)
    num_blocks = choose(room) if shard.size == 1 else agree_on_blocks(room, choose, shard, device)
    # The padded rows of graphs write to one extra block, which is never read.
    num_held = num_blocks + (graphs is not None)

    def allocate_cache() -> Tensor:
        return allocate(num_held, config.block_size, model.config, kv_dtype, device)

    with fitting("the KV cache and graphs", _FOR_CACHE):
        make = partial(ModelRunner, model, load, allocate_cache, adapters=adapters, graphs=graphs)
        chosen, drafter = config.speculative, make_drafter(num_held)
        if chosen is None or drafter is None:
            return make(), num_blocks
        return make(drafter, chosen.rejection_sample_method), num_blocks


def _network_loader(config: EngineConfig, path: str, shard: Shard) -> LoadNetwork | None:
    load = network_loader(config.speculative, config.scheduler.max_model_len)
    if load is None or shard.size == 1:
        return load
    # Each rank drafts by itself, with a whole network, from the states that all of them have.
    shape = open_checkpoint(Path(path)).config
    return lambda target: load(dataclasses.replace(target, config=shape))


def _make_drafter(
    config: EngineConfig,
    model: LlamaModel,
    source: tuple[LoadNetwork | None, DraftNetwork | None],
    kv_dtype: torch.dtype,
    must_agree: bool,
    num_blocks: int,
) -> CachedDrafter | None:
    """Make a drafter with a cache of `num_blocks`; None: the device makes no drafts."""
    load, network = source
    if config.speculative is None or load is None or network is None:
        return None
    sizes, method = (num_blocks, config.block_size), config.speculative.draft_sample_method
    return CachedDrafter(load, network, model, sizes, method, kv_dtype, must_agree)


@contextmanager
def fitting(what: str, advice: str) -> Iterator[None]:
    """Raise `ConfigError` if the device has too little memory for `what`."""
    try:
        yield
    except (torch.OutOfMemoryError, DeviceMemoryError) as error:
        raise ConfigError(f"the device's memory is too small for {what}: {advice}") from error


def step_bytes(
    config: EngineConfig,
    model: LlamaModel,
    kv_dtype: torch.dtype,
    memory: DeviceMemory | None,
    graphs: DecodeGraphs | None,
    adapters: DeviceAdapters | None = None,
    make_drafter: Callable[[int], CachedDrafter | None] = lambda _: None,
) -> int:
    """Return the device memory that trials of the largest step and of `graphs` take, both beside
    a drafter with a cache of as few blocks.
    """
    is_sized = (config.kv_cache_memory_bytes, config.num_blocks_override) != (None, None)
    if memory is None or is_sized:
        return 0
    # Block 0, to which all trial sequences write, and the block of graphs' padded rows.
    tried = partial(allocate, 2, config.block_size, model.config, kv_dtype, model.device)

    def run() -> ModelOutput:
        slot = None if adapters is None else 0
        step = largest_step(config.scheduler, config.block_size, slot)
        how = (model, lambda: model, tried, make_drafter(2))
        runner = ModelRunner(*how, adapters=adapters)
        if graphs is None:  # whose captures also compile the kernels of few rows
            limits = dataclasses.replace(config.scheduler, max_num_batched_tokens=1)
            execute(runner, largest_step(limits, config.block_size))
        return execute(runner, step)

    with fitting("the largest step beside the weights", _FOR_STEPS):
        num_bytes = 0
        if graphs is not None:
            make = partial(ModelRunner, model, lambda: model, tried, graphs=graphs)
            num_bytes = memory.peak_of(lambda: make(make_drafter(2)))
            graphs.drop()
        return num_bytes + memory.peak_of(run)


_FOR_WEIGHTS = "choose a smaller or quantised model, or raise --tensor-parallel-size"
_FOR_STEPS = "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"
_FOR_CACHE = (
    "lower --kv-cache-memory-bytes or --num-gpu-blocks-override, where one is given, or"
    " --gpu-memory-utilization, or the largest of --cuda-graph-sizes"
)


def choose_adapters(config: EngineConfig, model: LlamaModel, shard: Shard) -> DeviceAdapters | None:
    """Return slots for LoRA adapters beside a model, in the form that its backend multiplies."""
    lora = config.lora
    if lora is None:
        return None
    size, place = lora.max_loras, (model.dtype, model.device)
    store: AdapterStore = LinearAdapters(size, *place, model.kernels)
    if model.backend.name == "triton":
        module = importlib.import_module("worker.ops.triton.lora")
        layers = layer_products(model.config)
        store = cast(
            "AdapterStore", module.StackedAdapters(size, lora.max_lora_rank, layers, *place)
        )
    # The model's shape is that of its shard.
    shape = open_checkpoint(Path(config.model_path or "")).config
    return DeviceAdapters(shape, lora.max_lora_rank, store, shard)


def choose_device(name: str, shard: Shard = WHOLE) -> torch.device:
    """Choose a device: "auto" is CUDA's first GPU, else the CPU; each rank has a GPU of its own."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no GPU (a driver, a torch built for CUDA, and"
            " CUDA_VISIBLE_DEVICES decide): leave the flag out for the CPU"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if shard.size == 1:
        return torch.device("cuda")
    seen = torch.cuda.device_count()
    if shard.size > seen:
        raise ConfigError(
            f"--tensor-parallel-size {shard.size} takes as many GPUs, and torch sees {seen}"
            f" (CUDA_VISIBLE_DEVICES decides): lower it to {seen}, or choose --device cpu"
        )
    return torch.device("cuda", shard.rank)


def choose_backend(name: str, device: torch.device) -> Backend:
    """Choose a backend; "auto" is Triton on a GPU, if it is installed, else torch. Raises
    `ConfigError` for a backend that cannot work.
    """
    has_triton = find_spec("triton") is not None
    if name == "torch" or (name == "auto" and not (device.type == "cuda" and has_triton)):
        return TORCH
    if not has_triton:
        raise ConfigError("--attention-backend triton needs the package triton, not installed here")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "--attention-backend triton takes a GPU, or TRITON_INTERPRET=1 for a slow check without"
            " one: leave the flag out"
        )
    module = importlib.import_module("worker.ops.triton.backend")
    return cast("Backend", module.TritonBackend(device))


def choose_graphs(
    config: EngineConfig,
    backend: Backend,
    device: torch.device,
    adapters: DeviceAdapters | None = None,
) -> DecodeGraphs | None:
    """Return graphs if a GPU's backend waits for no value, else None. Raises `ConfigError`."""
    limits = config.scheduler
    if config.cuda_graph_sizes and max(config.cuda_graph_sizes) > limits.max_num_seqs:
        raise ConfigError(
            f"--cuda-graph-sizes up to {max(config.cuda_graph_sizes)}: no step has more sequences"
            f" than --max-num-seqs {limits.max_num_seqs}"
        )
    if device.type != "cuda" or backend.name != "triton" or config.enforce_eager:
        return None
    sizes = config.cuda_graph_sizes or graph_sizes(limits.max_num_seqs)
    # There are slots for the sequences of two steps, and slot 0 belongs to none.
    room = (2 * limits.max_num_seqs + 1, -(-limits.max_model_len // config.block_size))
    drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    plan_rows = None if adapters is None else adapters.plan_rows
    pieces = piece_sizes(limits.max_num_batched_tokens)
    return DecodeGraphs(CudaGraphs(device), sizes, room, drafts, plan_rows, pieces)


def choose_dtype(name: str, device: torch.device, packs_bfloat16: bool) -> torch.dtype:
    """Return the torch dtype of a name; "auto" is float32 on a CPU, half precision on a GPU.

    Small quantized models have near ties that bfloat16 decides wrongly, so a CPU is exact by
    default.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise ConfigError(f"--dtype {name} is not one of auto, {', '.join(_DTYPES)}")
        return supported_dtype(_DTYPES[name], device, packs_bfloat16)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.float32


def choose_kv_dtype(
    name: str, device: torch.device, dtype: torch.dtype, backend: Backend
) -> torch.dtype:
    """Return the dtype of a KV cache; "auto" is that of activations. Raises `ConfigError`."""
    if name in EIGHT_BITS:
        flag = f"--kv-cache-dtype {name}"
        if backend.name != "triton":
            raise ConfigError(
                f"{flag} takes the kernels of --attention-backend triton, and a GPU for them; here"
                f" the backend is {backend.name}: leave the flag out, or choose bfloat16 on a CPU"
            )
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < _EIGHT_BIT_GPUS:
            raise ConfigError(
                f"{flag} takes a GPU of compute capability 8.9 or higher (Ada, Hopper), which can"
                " convert such numbers; this one is older: leave the flag out"
            )
        return torch.float8_e4m3fn
    chosen = dtype if name == "auto" else _DTYPES[name]
    if chosen is not dtype and (device.type != "cpu" or dtype is not torch.float32):
        raise ConfigError(
            f"--kv-cache-dtype {name} takes a CPU and --dtype auto or float32; here activations are"
            f" {str(dtype).removeprefix('torch.')}, and so is the cache: leave the flag out"
        )
    return chosen


def choose_kernels(
    config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> CpuKernels | None:
    """Return the native kernels, for float32 activations on a CPU; None if they are not installed,
    and for another backend. Raises `ConfigError` for a `quantization` that cannot work.
    """
    kernels = None
    if device.type == "cpu" and dtype is torch.float32 and config.attention_backend == "auto":
        kernels = open_kernels(torch.get_num_threads(), config.cpu_activations == "int8")
    if config.quantization == "none":
        return kernels
    flag, speculative = f"--quantization {config.quantization}", config.speculative
    if device.type != "cpu":
        raise ConfigError(
            f"{flag} is for a CPU, and the worker has a GPU: leave the flag out, or choose --device"
            " cpu instead of cuda"
        )
    if config.dtype not in ("auto", "float32"):
        raise ConfigError(f"{flag} goes with --dtype auto or float32, not {config.dtype}")
    if speculative is not None and speculative.method in ("eagle", "eagle3"):
        raise ConfigError(
            f"{flag}: a draft head is trained for the weights in the file: leave the flag out, or"
            " choose another method in --speculative-config"
        )
    if config.attention_backend != "auto":
        raise ConfigError(f"{flag} goes without --attention-backend: leave one of them out")
    if kernels is None:
        raise ConfigError(
            f"{flag} needs the native kernels, which this package or CPU does not have: install it"
            " with a C++ compiler, or leave the flag out"
        )
    return kernels
