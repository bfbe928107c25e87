"""The worker on a GPU: kernels, decoding and prompts, against the limits of the GPU.

    python benchmarks/gpu.py [--shapes 1B 8B] [--tiles] [--packed] [--products] [--draws] [--check]

On a machine with a GPU; under ten minutes.
Weights are random, shapes are those of published models. First the GPU's own speed is measured: of
copies, and of products of matrices. Then, for each shape:

- each kernel against its twin in torch: whether the answer is the same, and only then the times, of
  the kernel replayed from a graph and of the twin as launched from Python;
- attention over a cache of eight bits, as a part of the time over one of the model's type;
- decoding by graphs and launched anew: tokens a second, and the bytes that a step must read (all
  weights and the contexts of all sequences) over its time, as a part of the speed of copies;
- a step in which one more sequence reads a part of its prompt, in pieces and launched anew;
- decoding by graphs with LoRA adapters (rank 16, all products): the time of a step as a multiple of
  that without adapters;
- a step that verifies four drafts a sequence, and one that makes as many with a head besides, as
  multiples of a plain step from graphs; what drafting gains where each draft is right with a given
  probability; and the same step launched anew;
- a prompt: operations a second as a part of the speed of products;
- blocks moved to host memory and back, as tiers move them, as a part of the speed of one copy.

`--draws` times draws alone, of 16 and 256 rows of 128k logits, as a graph of a step has them,
against reading the logits once; half of the rows are flat: a top-p retains thousands of tokens.
`--tiles` times attention with other tiles and numbers of warps than those that are chosen.
`--packed` times products with GGUF's encodings, by rows, against copies of as many bytes and the
product with the decoded weight; with 257 rows, weights are decoded in each product. Then mixtures
of experts in these encodings, against copies of the chosen experts and the dense mixture.
`--products` times a layer's products of few rows, with the norm, activation or residual around
them in one launch, against torch's product with separate kernels, by rows and weights.
`--check` checks kernels and decoding on a toy, in Triton's interpreter where there is no GPU (set
TRITON_INTERPRET=1), and measures nothing.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))

from gpu_kernels import (
    BLOCK,
    ENCODINGS,
    ROUNDED,
    Kernel,
    Mixture,
    Size,
    attention,
    check,
    draws,
    experts,
    kernels,
    multiply_planes,
    plane_bytes,
    products,
    random_planes,
    step_of,
)

from tests.support.worker.poisoned_graphs import PoisonedGraphs
from worker.executor.adapters import DeviceAdapters
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.drafting.loading import HeadNetwork
from worker.executor.graphs import CudaGraphs, DecodeGraphs
from worker.executor.interface import Ticket
from worker.executor.kv_cache import BlockSaver, host_memory, write_tokens, zeros
from worker.executor.model_runner import ModelRunner
from worker.executor.pieces import piece_sizes
from worker.executor.start import choose_backend
from worker.models.adapters import layer_products
from worker.models.config import ModelConfig
from worker.models.draft_head import HeadShape, assemble
from worker.models.llama import LayerWeights, LlamaModel
from worker.ops.backends import TORCH, Backend
from worker.ops.linear import DenseLinear
from worker.ops.lora import Factors, Product
from worker.ops.planes import SUPER_COLUMNS
from worker.ops.rope import make_rope_table
from worker.types import (
    KvLoad,
    KvSave,
    SampleSpec,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
)

CONTEXT, LONG, PROMPT, STEPS, ROUNDS = 1024, 8192, 4096, 20, 5
DRAWN_FROM, DRAWN_ROWS = 128256, (16, 256)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CACHED = (1024, 4096, 16384, 65536)
ADAPTED, ADAPTERS, RANK = (1, 8, 64), (1, 8, 32), 16
DRAFTED, DRAFTS = (1, 8, 64), 4
MIXED, CHUNKS = (1, 64), (60, 180, 440)
PRODUCT_ROWS = (1, 2, 4, 8, 16)
PACKED_ROWS = (1, 4, 16, 64, 256, 257, 2048)
PACKED_COLUMNS = "encoding       rows        us   of copies   dense us"
MIXTURE = Mixture(128, 8, 2048, 768)  # Qwen3-30B-A3B's


def shape(name: str, *sizes: int) -> ModelConfig:
    """A model of `sizes`: vocabulary, hidden and inner, layers, heads, KV heads, head."""
    return ModelConfig(name, *sizes, max_context=16384, rms_norm_eps=1e-5, rope_theta=500000.0)


SHAPES = (
    shape("135M", 49152, 576, 1536, 30, 9, 3, 64),
    shape("1B", 128256, 2048, 8192, 16, 32, 8, 64),
    shape("8B", 128256, 4096, 14336, 32, 32, 8, 128),
)
TOY = shape("toy", 96, 48, 40, 1, 3, 1, 16)


def random_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, backend: Backend
) -> LlamaModel:
    """Activations stay of the order of one."""
    noise = torch.Generator(device).manual_seed(1)

    def linear(rows: int, columns: int) -> DenseLinear:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return DenseLinear(weight.normal_(0, columns**-0.5, generator=noise))

    hidden, inner = config.hidden_size, config.intermediate_size
    width = config.num_heads * config.head_dim
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    ones = torch.ones(hidden, dtype=dtype, device=device)
    layers = [
        LayerWeights(
            ones,
            linear(qkv, hidden),
            linear(hidden, width),
            ones,
            linear(2 * inner, hidden),
            linear(hidden, inner),
        )
        for _ in range(config.num_layers)
    ]
    powers = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
    rope = make_rope_table(config.rope_theta**-powers, config.max_context)
    head = linear(config.vocab_size, hidden)
    return LlamaModel(config, head, tuple(layers), ones, head, rope, dtype, device, backend=backend)


def random_adapters(model: LlamaModel, count: int) -> DeviceAdapters:
    """`count` slots, all filled."""
    from worker.ops.triton.lora import StackedAdapters

    layers = layer_products(model.config)
    store = StackedAdapters(count, RANK, layers, model.dtype, model.device)
    noise = torch.Generator(model.device).manual_seed(4)

    def side(rows: int, columns: int) -> Tensor:
        made = torch.empty(rows, columns, dtype=model.dtype, device=model.device)
        return made.normal_(0, columns**-0.5, generator=noise)

    def factors(product: Product) -> Factors:
        parts = [(side(RANK, product.inputs), side(size, RANK)) for size in product.sizes]
        return Factors(product, tuple(parts))

    for slot in range(count):
        store.put(slot, [{name: factors(p) for name, p in layer.items()} for layer in layers])
    return DeviceAdapters(model.config, RANK, store)


def random_head(model: LlamaModel) -> HeadNetwork:
    """A head with the inner size of a layer, which can draft a quarter of the vocabulary."""
    config = model.config
    sizes = HeadShape(config.intermediate_size, config.vocab_size // 4)
    noise = torch.Generator(model.device).manual_seed(5)

    def made(size: tuple[int, ...]) -> Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=model.dtype, device=model.device)
        weight = torch.empty(size, dtype=model.dtype, device=model.device)
        return weight.normal_(0, size[1] ** -0.5, generator=noise)

    tensors = {name: made(size) for name, size in sizes.tensor_shapes(config).items()}
    vocab = torch.arange(0, config.vocab_size // 4 * 4, 4, device=model.device)
    return HeadNetwork(assemble(sizes, tensors, vocab, model))


def num_weights(model: LlamaModel) -> int:
    """Numbers that every step reads: all products, the head included."""
    products = [model.head]
    for layer in model.layers:
        products += [layer.qkv, layer.output, layer.gate_up, layer.down]
    return sum(product.weight.numel() for product in products if isinstance(product, DenseLinear))


def seconds(act: Callable[[], object]) -> float:
    """The median time of the device for it, after one that does not count."""
    spent = []
    for turn in range(ROUNDS + 1):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)  # type: ignore[no-untyped-call]
        start.record()
        act()
        end.record()
        torch.cuda.synchronize()
        if turn:
            spent.append(start.elapsed_time(end) / 1e3)
    return statistics.median(spent)


def replayed(act: Callable[[], object]) -> float:
    """The time of the device for it without the host's, from a graph of some."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            act()
    return seconds(graph.replay) / ROUNDS


def decoding(
    model: LlamaModel, size: Size, is_graphed: bool, steps: int
) -> tuple[float, list[int]]:
    """Seconds of a decode step, two under way, and the first sequence's tokens. The cache holds
    zeros: reading them takes as long.
    """
    config, device = model.config, model.device
    adapters = random_adapters(model, size.adapters) if size.adapters else None
    each = -(-(max(size.context, size.chunk) + steps + 1) // BLOCK)
    blocks = (size.sequences + 1) * each + 1
    graphs = None
    if is_graphed:
        kind = CudaGraphs(device) if device.type == "cuda" else PoisonedGraphs()
        room = (2 * size.sequences + 3, each)
        plan = None if adapters is None else adapters.plan_rows
        rows = [n for n in piece_sizes(PROMPT) if n >= size.sequences + size.chunk]
        pieces = rows[: bool(size.chunk)]
        graphs = DecodeGraphs(kind, (size.sequences,), room, 0, plan, pieces)

    def cache() -> Tensor:
        sizes = (config.num_layers, blocks, 2, config.num_kv_heads, BLOCK, config.head_dim)
        return zeros(sizes, model.dtype, device)

    runner = ModelRunner(model, lambda: model, cache, graphs=graphs, adapters=adapters)
    params = [SamplingParams(steps + 1, 0.8, seed=index) for index in range(size.sequences)]
    tables = [tuple(range(each * i, each * (i + 1))) for i in range(size.sequences + 1)]
    reading = ScheduledSequence(size.sequences, [1] * size.chunk, 0, tables[-1])
    tickets: list[Ticket] = []
    drawn: list[int] = []

    def submit(number: int) -> None:
        position, ahead = size.context + number, number > 0
        shares = tuple(
            ScheduledSequence(
                *(index, [] if ahead else [index % 90], position, tables[index]),
                (SampleSpec(params[index], position + 1),),
                takes_pending=ahead,
                adapter_slot=index % size.adapters if size.adapters else None,
            )
            for index in range(size.sequences)
        )
        shares += (reading,) if size.chunk else ()
        tickets.append(runner.submit(SchedulerOutput(number, shares)))

    def run() -> None:
        drawn.clear()
        for number in range(steps):
            submit(number)
            if len(tickets) == 2:
                drawn.append(tickets.pop(0).collect().sampled[0][0].token_id)
        drawn.append(tickets.pop(0).collect().sampled[0][0].token_id)

    if device.type != "cuda":
        run()
        return 0.0, drawn
    return seconds(run) / steps, drawn


def drafting(
    model: LlamaModel, size: Size, is_graphed: bool, has_head: bool, steps: int
) -> tuple[float, list[object]]:
    """Seconds of a step that verifies `DRAFTS` drafts a sequence, and with a head makes as many;
    and the first sequence's tokens and drafts. No context is read before, and the first step, whose
    drafts no graph makes, does not count.
    """
    config, device = model.config, model.device
    each = -(-(size.context + (steps + 1) * (1 + DRAFTS) + DRAFTS) // BLOCK)
    blocks = size.sequences * each + 1
    graphs = drafter = None
    if is_graphed:
        kind = CudaGraphs(device) if device.type == "cuda" else PoisonedGraphs()
        graphs = DecodeGraphs(kind, (size.sequences,), (2 * size.sequences + 1, each), DRAFTS)
    if has_head:
        head = random_head(model)
        drafter = CachedDrafter(lambda _: head, head, model, (blocks, BLOCK), "greedy")
        drafter._awake()[1].mark(np.arange(blocks * BLOCK, dtype=np.int32), True)

    def cache() -> Tensor:
        sizes = (config.num_layers, blocks, 2, config.num_kv_heads, BLOCK, config.head_dim)
        return zeros(sizes, model.dtype, device)

    runner = ModelRunner(model, lambda: model, cache, drafter, graphs=graphs)
    params = SamplingParams(steps * (1 + DRAFTS), 0.0)
    found: list[object] = []

    def run() -> float:
        found.clear()
        began = 0.0
        starts, lasts = [size.context] * size.sequences, [*range(size.sequences)]
        drafts = [(1,) * DRAFTS] * size.sequences
        for number in range(steps):
            shares = tuple(
                ScheduledSequence(
                    *(index, [lasts[index], *drafts[index]], starts[index]),
                    tuple(range(each * index, each * (index + 1))),
                    (SampleSpec(params, starts[index] + 1),),
                    num_drafts=DRAFTS,
                    num_to_draft=DRAFTS if has_head else 0,
                )
                for index in range(size.sequences)
            )
            output = runner.submit(SchedulerOutput(number, shares)).collect()
            made = output.drafts.get(0)
            found.append((output.sampled[0], made and made.token_ids))
            for index in range(size.sequences):
                draws = output.sampled[index]
                starts[index], lasts[index] = starts[index] + len(draws), draws[-1].token_id
                if index in output.drafts:
                    drafts[index] = output.drafts[index].token_ids
            began = began or time.perf_counter()
        return (time.perf_counter() - began) / (steps - 1)

    rounds = ROUNDS if device.type == "cuda" else 1
    return statistics.median(run() for _ in range(rounds)), found


def check_drafting(model: LlamaModel, size: Size, steps: int) -> None:
    """Raise unless graphs draw and draft what steps do that are launched anew."""
    tokens = [drafting(model, size, is_graphed, True, steps)[1] for is_graphed in (False, True)]
    if tokens[0] != tokens[1]:
        raise SystemExit(f"drafting by graphs: other tokens than launched anew: {tokens}")


def check_decoding(model: LlamaModel, size: Size, steps: int) -> None:
    """Raise unless graphs draw what steps draw that are launched anew."""
    tokens = [decoding(model, size, is_graphed, steps)[1] for is_graphed in (False, True)]
    if tokens[0] != tokens[1]:
        raise SystemExit(f"decoding by graphs: other tokens than launched anew: {tokens}")


def check_toy(backend: Backend, device: torch.device) -> None:
    """All checks at small sizes."""
    model = random_model(TOY, torch.float32, device, backend)
    mixtures = experts("Q4_K", Mixture(4, 2, 256, 256), (3,), torch.float32, device)
    for kernel in (*kernels(model, Size(3, 20), 24), *(own for _, own, _ in mixtures)):
        check(kernel, backend)
        print(f"{kernel.name}: as torch", flush=True)
    for adapters, chunk in ((0, 0), (2, 0), (0, 21)):
        check_decoding(model, Size(3, 20, adapters, chunk), 4)
    check_drafting(model, Size(3, 20), 4)
    print("decoding and drafting by graphs: as launched anew")


def report(config: ModelConfig, backend: Backend, bandwidth: float, peak: float) -> None:
    """Print the tables of a shape. `bandwidth` is bytes a second, `peak` operations a second."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    model = random_model(config, dtype, device, backend)
    print(f"\n{config.architecture}\nkernel               us    torch us   of copies")
    for kernel in kernels(model, Size(16, LONG), PROMPT):
        check(kernel, backend)
        own = replayed(lambda k=kernel: k.run(backend))  # type: ignore[misc]
        torchs = seconds(lambda k=kernel: k.run(TORCH))  # type: ignore[misc]
        part = kernel.num_bytes / own / bandwidth
        print(f"{kernel.name:18} {own * 1e6:8.1f} {torchs * 1e6:9.1f} {part:8.0%}", flush=True)
    weights, item = num_weights(model), dtype.itemsize
    check_decoding(model, Size(4, CONTEXT), STEPS)
    print("decoding     tokens/s   of copies   anew tokens/s")
    for count in BATCHES:
        size = Size(count, CONTEXT)
        tokens = count * (CONTEXT + STEPS / 2)
        num_bytes = (weights + config.kv_elements_per_token * tokens) * item
        if num_bytes * 1.2 > torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved():
            print(f"{count:4}: does not fit")
            continue
        graphed, anew = (decoding(model, size, way, STEPS)[0] for way in (True, False))
        part = num_bytes / graphed / bandwidth
        rates = f"{count / graphed:14.0f} {part:9.0%} {count / anew:15.0f}"
        print(f"{count:4} x {CONTEXT} {rates}", flush=True)
    report_mixed(model)
    report_caches(model, backend)
    report_adapters(model)
    report_drafts(model)
    step = step_of(Size(1, PROMPT), PROMPT, device)
    sizes = (config.num_layers, PROMPT // BLOCK, 2, config.num_kv_heads, BLOCK, config.head_dim)
    cache = zeros(sizes, dtype, device)
    spent = seconds(lambda: model.forward(step, cache))
    body = weights - config.vocab_size * config.hidden_size
    pairs = 2 * config.num_layers * config.num_heads * config.head_dim * PROMPT**2
    rate = (2 * body * PROMPT + pairs) / spent
    print(f"prompt of {PROMPT}: {rate / 1e12:.0f} TFLOP/s, {rate / peak:.0%} of products")
    report_moves(cache, num_blocks=PROMPT // BLOCK)


def report_mixed(model: LlamaModel) -> None:
    """Print how long steps with a part of a prompt take, in pieces and launched anew."""
    check_decoding(model, Size(4, CONTEXT, chunk=CHUNKS[0]), STEPS)
    print("sequences  prompt   us in pieces   us anew")
    for sequences, chunk in product(MIXED, CHUNKS):
        size = Size(sequences, CONTEXT, chunk=chunk)
        pieces, anew = (decoding(model, size, way, STEPS)[0] * 1e6 for way in (True, False))
        print(f"{sequences:9} {chunk:7} {pieces:14.0f} {anew:9.0f}", flush=True)


def report_caches(model: LlamaModel, backend: Backend) -> None:
    """Print attention's time over a cache of eight bits, of that over one of the model's type."""
    print("16 contexts of    us   e4m3: us   of that")
    for context in CACHED:
        step = step_of(Size(16, context), 1, model.device)
        runs = (attention(model, step, kind) for kind in (model.dtype, ROUNDED))
        spent = [replayed(lambda run=run: run(backend)) for run in runs]  # type: ignore[misc]
        times = f"{spent[0] * 1e6:8.1f} {spent[1] * 1e6:10.1f} {spent[1] / spent[0]:9.0%}"
        print(f"{context:12} {times}", flush=True)


def report_adapters(model: LlamaModel) -> None:
    """Print how much longer steps take with adapters; a step has no more than sequences."""
    check_decoding(model, Size(4, CONTEXT, 3), STEPS)
    print("sequences" + "".join(f"{f'{count} LoRA':>9}" for count in ADAPTERS))
    for sequences in ADAPTED:
        plain, _ = decoding(model, Size(sequences, CONTEXT), True, STEPS)
        found = [
            decoding(model, Size(sequences, CONTEXT, count), True, STEPS)[0] / plain
            for count in ADAPTERS
            if count <= sequences
        ]
        print(f"{sequences:9}" + "".join(f"{ratio:9.2f}" for ratio in found), flush=True)


def report_drafts(model: LlamaModel) -> None:
    """Print the times of steps with drafts, and what drafting with a head gains over plain steps
    where each of its drafts is right with probability p: (1 - p^(k+1)) / (1 - p) tokens a step.
    """
    shares = (0.5, 0.7, 0.9)
    gains = "".join(f"{f'gain at {p}':>13}" for p in shares)
    print(f"sequences  verify   draft{gains}   draft, anew")
    for sequences in DRAFTED:
        size = Size(sequences, CONTEXT)
        plain, _ = decoding(model, size, True, STEPS)
        ways = ((True, False), (True, True), (False, True))
        verify, draft, anew = (drafting(model, size, *way, STEPS)[0] / plain for way in ways)
        tokens = ((1 - p ** (1 + DRAFTS)) / (1 - p) for p in shares)
        line = "".join(f"{count / draft:13.2f}" for count in tokens)
        print(f"{sequences:9} {verify:7.2f} {draft:7.2f}{line} {anew:13.2f}", flush=True)


def report_moves(cache: Tensor, num_blocks: int) -> None:
    """Print how fast all blocks of `cache` go to the host and back, beside one pinned copy."""
    size = cache[:, 0].nbytes
    memory = host_memory(num_blocks * size, cache.device)
    slots = tuple(memory[n * size : (n + 1) * size] for n in range(num_blocks))
    blocks = tuple(range(num_blocks))
    expected = cache.normal_().clone()
    whole = torch.frombuffer(memory, dtype=cache.dtype).view(cache.shape)
    saver = BlockSaver()

    def save() -> None:
        saver.save(cache, [KvSave(blocks, slots)], keys_across=False)
        saver.save(cache, [], keys_across=False)  # the next step waits for it

    def load() -> None:
        write_tokens(cache, KvLoad(blocks, slots), keys_across=False)

    out = seconds(lambda: whole.copy_(cache, non_blocking=True))
    into = seconds(lambda: cache.copy_(whole, non_blocking=True))
    saved = seconds(save)
    cache.zero_()
    loaded = seconds(load)
    if not torch.equal(cache, expected):
        raise SystemExit("blocks that were saved and loaded differ")
    for name, spent, limit in (("saved", saved, out), ("loaded", loaded, into)):
        rate = memory.nbytes / spent / 1e9
        print(f"{num_blocks} blocks {name}: {rate:.1f} GB/s, {limit / spent:.0%} of one copy")


class Launch:
    """A kernel that is launched with other constants."""

    def __init__(self, kernel: Any, others: dict[str, int]) -> None:
        self._kernel, self._others = kernel, others

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **named: object) -> None:
            self._kernel[grid](*args, **{**named, **self._others})

        return launch


def report_draws(backend: Backend) -> None:
    """Print the time of draws, and its ratio to that of reading the logits."""
    for count in DRAWN_ROWS:
        logits = torch.zeros(count, DRAWN_FROM, device="cuda")
        reading = replayed(lambda x=logits: x.amax(1))  # type: ignore[misc]
        print(f"\n{count} x {DRAWN_FROM}: read in {reading * 1e6:.1f} us\nkernel", end="")
        print("                    us   times a reading")
        for kernel in draws(count, DRAWN_FROM, torch.device("cuda")):
            check(kernel, backend)
            own = replayed(lambda k=kernel: k.run(backend))  # type: ignore[misc]
            print(f"{kernel.name:18} {own * 1e6:9.1f} {own / reading:15.1f}", flush=True)


def report_tiles(config: ModelConfig, backend: Backend, bandwidth: float) -> None:
    """Print how long attention of 16 long contexts, and of a prompt, takes by its tiles."""
    from worker.ops.triton import attention

    model = random_model(
        replace(config, num_layers=1), torch.bfloat16, torch.device("cuda"), backend
    )
    short, prompt, *_ = kernels(model, Size(16, LONG), PROMPT)
    for kernel, name in ((short, "_split_kernel"), (prompt, "_chunk_kernel")):
        chosen = getattr(attention, name)
        print(f"\n{config.architecture}, {kernel.name}\nkeys warps stages        us   of copies")
        for keys, warps, stages in product((32, 64, 128), (2, 4, 8), (2, 3)):
            others = {"tile_keys": keys, "num_warps": warps, "num_stages": stages}
            setattr(attention, name, Launch(chosen, others))
            check(kernel, backend)
            own = replayed(lambda k=kernel: k.run(backend))  # type: ignore[misc]
            part = kernel.num_bytes / own / bandwidth
            print(f"{keys:4} {warps:5} {stages:6} {own * 1e6:9.1f} {part:8.0%}", flush=True)
        setattr(attention, name, chosen)


def report_packed(config: ModelConfig, backend: Backend, bandwidth: float) -> None:
    """Print how long products with packed weights take, by encoding and rows. The weight is that of
    gates and gated values, which no GPU's cache holds.
    """
    device, dtype = torch.device("cuda"), torch.bfloat16
    noise = torch.Generator(device).manual_seed(4)
    sizes = 2 * config.intermediate_size, SUPER_COLUMNS * (config.hidden_size // SUPER_COLUMNS)
    print(f"\n{config.architecture}, {sizes[0]} x {sizes[1]}\n{PACKED_COLUMNS}")
    for kind in ENCODINGS:
        weight = random_planes(kind, *sizes, device)
        dense = weight.decode().to(dtype).T
        for rows in PACKED_ROWS:
            x = torch.empty(rows, sizes[1], dtype=dtype, device=device).normal_(generator=noise)
            own = Kernel(kind, partial(multiply_planes, x, weight), plane_bytes(weight))
            print_packed(own, rows, partial(torch.mm, x, dense), backend, bandwidth)


def report_packed_experts(backend: Backend, bandwidth: float) -> None:
    """Print how long mixtures of packed experts take, by encoding and rows."""
    print(f"\n{MIXTURE}\n{PACKED_COLUMNS}")
    for kind in ENCODINGS:
        found = experts(kind, MIXTURE, PACKED_ROWS, torch.bfloat16, torch.device("cuda"))
        for rows, own, whole in found:
            print_packed(own, rows, partial(whole.run, backend), backend, bandwidth)


def print_packed(
    kernel: Kernel, rows: int, dense: Callable[[], object], backend: Backend, bandwidth: float
) -> None:
    """Check a kernel, and print its time and that of the same with `dense` weights."""
    check(kernel, backend)
    own, whole = replayed(lambda: kernel.run(backend)), replayed(dense)
    line = f"{own * 1e6:9.1f} {kernel.num_bytes / own / bandwidth:11.0%} {whole * 1e6:10.1f}"
    print(f"{kernel.name:13} {rows:5} {line}", flush=True)


def report_products(config: ModelConfig, backend: Backend, bandwidth: float) -> None:
    """Print how long products of few rows take in one launch, whatever the size of a weight, and
    in separate ones. Weights of less than a GPU's cache stay in it.
    """
    from worker.ops.triton import dense

    one_layer = replace(config, num_layers=1)
    model = random_model(one_layer, torch.bfloat16, torch.device("cuda"), backend)
    print(f"\n{config.architecture}\nproduct             rows        us   of copies   separate us")
    for rows in PRODUCT_ROWS:
        for kernel in products(model, rows):
            spent = []
            for dense.MAX_SIZE in (1 << 40, 0):
                check(kernel, backend)
                spent.append(replayed(lambda k=kernel: k.run(backend)))  # type: ignore[misc]
            line = f"{spent[0] * 1e6:9.1f} {kernel.num_bytes / spent[0] / bandwidth:11.0%}"
            print(f"{kernel.name:19} {rows:4} {line} {spent[1] * 1e6:13.1f}", flush=True)


def limits(device: torch.device) -> tuple[float, float]:
    """Bytes a second of copies, read and written; operations a second of products."""
    source, side = torch.empty(1 << 29, dtype=torch.int16, device=device), 8192
    target = torch.empty_like(source)
    square = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    copying = seconds(lambda: target.copy_(source))
    return 2 * source.nbytes / copying, 2 * side**3 / seconds(lambda: square @ square)


@torch.inference_mode()
def main() -> None:
    """Check, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="check a toy, and measure nothing")
    parser.add_argument("--draws", action="store_true", help="only time draws")
    parser.add_argument("--tiles", action="store_true", help="only time attention by its tiles")
    parser.add_argument("--packed", action="store_true", help="only time packed weights")
    parser.add_argument("--products", action="store_true", help="only time products of few rows")
    names = [config.architecture for config in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names, help="(default: all)")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.check:
        check_toy(choose_backend("triton", device), device)
        return
    if device.type != "cuda":
        raise SystemExit("torch finds no GPU: --check is all that can be done here")
    backend = choose_backend("triton", device)
    bandwidth, peak = limits(device)
    print(f"{torch.cuda.get_device_name()}: copies {bandwidth / 1e12:.2f} TB/s,", end=" ")
    print(f"products {peak / 1e12:.0f} TFLOP/s")
    if not (args.tiles or args.packed or args.products):
        report_draws(backend)
    if args.packed:
        report_packed_experts(backend, bandwidth)
    for config in () if args.draws else SHAPES:
        if config.architecture not in args.shapes:
            continue
        if args.packed:
            report_packed(config, backend, bandwidth)
        elif args.products:
            report_products(config, backend, bandwidth)
        elif args.tiles:
            report_tiles(config, backend, bandwidth)
        else:
            report(config, backend, bandwidth, peak)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
