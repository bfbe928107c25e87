"""The kernels of a decode step as cases of `gpu.py`: what each runs, by any backend, on random
operands, and the bytes that it has to move.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))

from tests.support.model.block_weights import random_blocks
from worker.models.llama import LlamaModel
from worker.ops.backends import TORCH, Around, AttentionShape, Backend
from worker.ops.experts import Experts
from worker.ops.linear import DenseLinear, Linear
from worker.ops.planes import SUPER_COLUMNS, PlaneWeight, choose_planes
from worker.ops.planes import pack as pack_blocks
from worker.ops.quantized import (
    PAIRED_COLUMNS,
    Encoding,
    GroupedWeight,
    PackedWeight,
    choose_product,
    multiply,
    pack,
)
from worker.ops.sample import DRAW_WORDS, DrawColumns, draw_table
from worker.ops.step import StepTensors, sent
from worker.types import SampleSpec, SamplingParams

BLOCK = 16
ROUNDED = torch.float8_e4m3fn
ENCODINGS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


class Size(NamedTuple):
    """A batch that decodes: sequences, tokens that each has already, LoRA adapters, and the prompt
    tokens that one more sequence reads in each step.
    """

    sequences: int
    context: int
    adapters: int = 0
    chunk: int = 0


def step_of(size: Size, rows: int, device: torch.device) -> StepTensors:
    """A step of sequences with `rows` new rows each, whose blocks follow one another."""
    each = -(-size.context // BLOCK)
    ints = torch.arange(size.sequences * each, dtype=torch.int32, device=device)
    tables = ints.view(size.sequences, each)
    positions = torch.arange(size.context - rows, size.context, device=device).int()
    slots = tables[:, positions // BLOCK] * BLOCK + positions % BLOCK
    starts = torch.arange(size.sequences + 1, device=device).int() * rows
    last = starts[1:] - 1
    contexts = torch.full_like(last, size.context)
    every = positions.repeat(size.sequences)
    tensors = (every % 90, every, slots.flatten(), starts, contexts, tables, last)
    return StepTensors(*tensors, rows, size.context)


class Kernel(NamedTuple):
    """One part of a layer, by a backend; `num_bytes` is what it has to move at least."""

    name: str
    run: Callable[[Backend], Tensor]
    num_bytes: float


def attention(
    model: LlamaModel, step: StepTensors, cache_dtype: torch.dtype
) -> Callable[[Backend], Tensor]:
    """Attention of a step over a random cache, whose numbers a cache of eight bits scales."""
    config, device = model.config, model.device
    noise = torch.Generator(device).manual_seed(3)
    scale = config.head_dim**-0.5
    heads = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, BLOCK, scale)
    sizes = (step.block_tables.numel(), 2, config.num_kv_heads, BLOCK, config.head_dim)
    of_model = {"dtype": model.dtype, "device": device}
    cache = torch.empty(*sizes, **of_model).normal_(generator=noise).to(cache_dtype)
    rows = (len(step.token_ids), config.num_heads, config.head_dim)
    queries = torch.empty(*rows, **of_model).normal_(generator=noise)
    scales = torch.full((2, config.num_kv_heads), 0.5, device=device)

    def run(backend: Backend) -> Tensor:
        planned = backend.plan(step, heads, model.rope)
        return planned.run(queries, cache, scales=scales if cache_dtype == ROUNDED else None)

    return run


def kernels(model: LlamaModel, size: Size, prompt: int) -> Iterator[Kernel]:
    """The kernels of a decode step of `size`, and attention of a prompt of `prompt` tokens."""
    config, device, dtype = model.config, model.device, model.dtype
    noise = torch.Generator(device).manual_seed(2)

    def normal(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device=device).normal_(generator=noise)

    count, item = size.sequences, dtype.itemsize
    kv_bytes = 2 * config.num_kv_heads * config.head_dim * item
    step, read = step_of(size, 1, device), count * size.context * kv_bytes
    yield Kernel("attention", attention(model, step, dtype), read)
    yield Kernel("attention, e4m3", attention(model, step, ROUNDED), read / item)
    chunk = step_of(Size(1, prompt), prompt, device)
    yield Kernel("attention, prompt", attention(model, chunk, dtype), prompt * kv_bytes)
    x, gates = normal(count, config.hidden_size), normal(count, 2 * config.intermediate_size)
    weight = normal(config.hidden_size)
    yield Kernel("norm", lambda b: b.rms_norm(x, weight, 1e-5), 2 * x.numel() * item)
    yield Kernel("activation", lambda b: b.gated(gates.clone()), 2.5 * gates.numel() * item)
    side = PAIRED_COLUMNS * max(1, config.hidden_size // PAIRED_COLUMNS)
    inputs = normal(count, side)
    for encoding in (Encoding.UINT4, Encoding.FLOAT8):
        packed = random_weight(encoding, side, device)

        def times(backend: Backend, weight: PackedWeight = packed) -> Tensor:
            product = None if backend is TORCH else choose_product(device)
            return (product or multiply)(inputs, weight)

        yield Kernel(f"product, {encoding.value}", times, packed.codes.numel())
    wide = normal(count, SUPER_COLUMNS * max(1, config.hidden_size // SUPER_COLUMNS))
    for kind in ENCODINGS:
        planes = random_planes(kind, wide.shape[1], wide.shape[1], device)
        times_planes = partial(multiply_planes, wide, planes)
        yield Kernel(f"product, {kind}", times_planes, plane_bytes(planes))
    yield from products(model, count)
    yield from draws(count, config.vocab_size, device)


def products(model: LlamaModel, count: int) -> Iterator[Kernel]:
    """A layer's products of `count` rows, with what is around them."""
    noise = torch.Generator(model.device).manual_seed(6)
    layer, eps = model.layers[0], model.config.rms_norm_eps

    def normal(width: int) -> Tensor:
        made = torch.empty(count, width, dtype=model.dtype, device=model.device)
        return made.normal_(generator=noise)

    added = Around(residual=normal(model.config.hidden_size))
    for name, linear, around in (
        ("norm, qkv", layer.qkv, Around(layer.input_norm, eps)),
        ("output, residual", layer.output, added),
        ("norm, gate_up, silu", layer.gate_up, Around(layer.mlp_norm, eps, "silu")),
        ("down, residual", layer.down, added),
    ):
        assert isinstance(linear, DenseLinear)
        parts = (linear, normal(linear.weight.shape[1]), around)

        def run(backend: Backend, parts: tuple[Linear, Tensor, Around] = parts) -> Tensor:
            return backend.product(*parts, None)

        yield Kernel(name, run, linear.weight.nbytes)


def draws(count: int, vocab_size: int, device: torch.device) -> Iterator[Kernel]:
    """All kinds of draws from `count` rows: every other one is flat, the rest have large logits."""
    noise = torch.Generator(device).manual_seed(4)
    logits = torch.empty(count, vocab_size, device=device).normal_(std=2, generator=noise)
    logits[::2, :: max(1, vocab_size // 30)] += 14
    for name, params in (
        ("draw, greedy", SamplingParams(1, 0.0)),
        ("draw", SamplingParams(1, 0.8)),
        ("draw, min-p", SamplingParams(1, 0.8, min_p=0.05)),
        ("draw, top-k", SamplingParams(1, 0.8, top_k=40)),
        ("draw, top-p", SamplingParams(1, 0.8, top_p=0.9)),
        ("draw, top-k, top-p", SamplingParams(1, 0.8, top_k=40, top_p=0.9)),
    ):
        table = draw_table(range(count), [SampleSpec(params, place) for place in range(count)])
        words = sent(table.view("int32"), device)
        columns = DrawColumns.of(words.view(count, DRAW_WORDS))

        def run(backend: Backend, columns: DrawColumns = columns) -> Tensor:
            return backend.draw(logits, columns)

        yield Kernel(name, run, logits.numel() * 4.0)


def random_weight(encoding: Encoding, side: int, device: torch.device) -> PackedWeight:
    """[side, side] in groups of 64 columns."""
    noise = torch.Generator().manual_seed(3)
    groups = torch.arange(side) // PAIRED_COLUMNS
    scales = torch.rand(side, int(groups[-1]) + 1, generator=noise) / 64 + 0.01
    codes = torch.randint(0, 16, (side, side), generator=noise, dtype=torch.uint8)
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    if encoding is Encoding.FLOAT8:
        codes, zeros = codes.float().sub_(8).to(torch.float8_e4m3fn), None
    packed = pack([GroupedWeight(encoding, codes, scales, zeros, groups)], device)
    assert packed is not None
    return packed


def random_planes(kind: str, outputs: int, inputs: int, device: torch.device) -> PlaneWeight:
    """Weights in one of GGUF's encodings, whose products are of the order of one."""
    planes = pack_blocks([random_blocks(kind, outputs, inputs, size=inputs**-0.5)], device)
    assert planes is not None
    return planes[0]


def plane_bytes(weight: PlaneWeight) -> int:
    """The memory of all planes."""
    return sum(plane.nbytes for plane in weight.planes if plane is not None)


def multiply_planes(x: Tensor, weight: PlaneWeight, backend: Backend) -> Tensor:
    """Multiply by kernels, or by torch."""
    kernels = None if backend is TORCH else choose_planes(x.device)
    if kernels is None:
        return x @ weight.decode().to(x.dtype).T
    out = x.new_empty(len(x), weight.outputs)
    kernels.multiply(x, weight, out)
    return out


class Mixture(NamedTuple):
    """A layer's experts: their number, those of a row, hidden and inner size."""

    count: int
    per_row: int
    hidden: int
    inner: int


def experts(
    kind: str, sizes: Mixture, rows: Iterable[int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[int, Kernel, Kernel]]:
    """Yield numbers of rows, the mixture of packed experts for each, and that of the same experts
    decoded, by which torch multiplies.
    """
    noise = torch.Generator(device).manual_seed(5)
    count, per_row, hidden, inner = sizes
    shapes = (count * 2 * inner, hidden), (count * hidden, inner)
    packed = [random_planes(kind, *shape, device) for shape in shapes]
    dense = [weight.decode().to(dtype).view(count, -1, weight.inputs) for weight in packed]
    gate_up, down = (tuple(map(DenseLinear, stack)) for stack in dense)
    router = torch.empty(count, hidden, dtype=dtype, device=device).normal_(generator=noise)
    whole = Experts(DenseLinear(router), gate_up, down, per_row, True, (dense[0], dense[1]))
    mixture = replace(whole, stacks=(packed[0], packed[1]))
    for number in rows:
        x = torch.empty(number, hidden, dtype=dtype, device=device).normal_(generator=noise)
        part = len(whole.route(x)[0].unique()) / count  # of all experts, the rows read some

        def run(experts: Experts, backend: Backend, x: Tensor = x) -> Tensor:
            return backend.mix_experts(x, experts)

        read = part * sum(map(plane_bytes, packed))
        own = Kernel(f"experts, {kind}", partial(run, mixture), read)
        yield number, own, Kernel("experts", partial(run, whole), read)


def check(kernel: Kernel, backend: Backend) -> None:
    """Raise unless the backend gives what torch gives: ids to the bit, numbers to rounding."""
    found, wanted = kernel.run(backend), kernel.run(TORCH)
    if not found.is_floating_point():
        if not torch.equal(found, wanted.to(found.dtype)):
            raise SystemExit(f"{kernel.name}: other tokens than torch's")
        return
    error = float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    if not error < (1e-4 if found.dtype is torch.float32 else 2e-2):
        raise SystemExit(f"{kernel.name}: {error:.1e} from torch's, of the largest value")
