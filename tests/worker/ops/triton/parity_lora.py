"""Stacked adapters against pairs of torch's products; see `test_kernels`."""

import numpy as np
import pytest
import torch
from torch import Tensor

from worker.ops.lora import AdapterFactors, Factors, LinearAdapters, Product
from worker.ops.triton.lora import StackedAdapters

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
NUM_SLOTS, MAX_RANK = 3, 8


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def factors_of(product: Product, ranks: tuple[int | None, ...], seed: int) -> Factors:
    parts = tuple(
        None
        if rank is None
        else (
            draw(rank, product.inputs, seed=seed) * product.inputs**-0.5,
            draw(size, rank, seed=seed + 1) * rank**-0.5,
        )
        for size, rank in zip(product.sizes, ranks, strict=True)
    )
    return Factors(product, parts)


def added(
    adapters: list[AdapterFactors], owners: list[int], x: Tensor, product: Product
) -> tuple[Tensor, Tensor]:
    layers, found = [{"qkv": product}], []
    for store in (
        StackedAdapters(NUM_SLOTS, MAX_RANK, layers, x.dtype, DEVICE),
        LinearAdapters(NUM_SLOTS, x.dtype, DEVICE),
    ):
        for slot in range(NUM_SLOTS):  # what was there before leaves nothing behind
            store.put(slot, store.prepared([{"qkv": factors_of(product, (8,) * 3, 99)}]))
        for slot, layers_of in enumerate(adapters):
            store.put(slot, store.prepared(layers_of))
        y = torch.ones(len(x), sum(product.sizes), dtype=x.dtype, device=DEVICE)
        store.plan(np.array(owners, np.int32)).add(0, "qkv", x.to(DEVICE), y)
        found.append(y.cpu())
    return found[0], found[1]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("sizes", "inputs", "owners"),
    [
        ((32, 16, 16), 48, [0]),
        ((32, 16, 16), 48, [2, -1, 0, 1, 1, -1, 2]),
        ((70, 33, 33), 65, [n % 4 - 1 for n in range(150)]),
        ((70, 33, 33), 65, [1] * 70 + [-1]),
        ((70, 33, 33), 1100, [n % 4 - 1 for n in range(70)]),
    ],
)
def test_the_torch_twin(
    sizes: tuple[int, ...], inputs: int, owners: list[int], dtype: torch.dtype
) -> None:
    """Sizes are no multiples of a tile's, ranks are below the maximum, and some parts are empty."""
    product = Product(sizes, inputs)
    ranks: list[tuple[int | None, ...]] = [(8, 8, 8), (3, None, 3), (None, 1, None)]
    adapters = [[{"qkv": factors_of(product, r, n)}] for n, r in enumerate(ranks)]
    x = draw(len(owners), inputs, seed=7).to(dtype)
    stacked, wanted = added(adapters, owners, x, product)
    allowed = TOLERANCES[dtype] * float(wanted.float().abs().max())
    torch.testing.assert_close(stacked.float(), wanted.float(), rtol=0, atol=allowed)
    untouched = torch.tensor(owners) < 0
    assert bool((stacked[untouched] == 1).all())


def test_an_adapter_without_the_product_adds_nothing() -> None:
    product = Product((16, 16, 16), 32)
    stacked, wanted = added([[{}]], [0, 0], draw(2, 32, seed=7), product)
    assert bool((stacked == 1).all())
    assert bool((wanted == 1).all())


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    """In the interpreter rows are equal to rounding only: a tile's rows are summed in another
    order.
    """
    allowed = 0.0 if DEVICE.type == "cuda" else 1e-6
    # Steps of more than 1,024 rows do not split the sums of a tile among programs.
    product, x = Product((32, 16, 16), 600), draw(1050, 600, seed=5)
    adapters = [[{"qkv": factors_of(product, (8, 8, 8), 1)}]]
    together, _ = added(adapters, [-1] * 1000 + [0] * 50, x, product)
    for row in (1000, 1031, 1049):
        alone, _ = added(adapters, [0], x[row : row + 1], product)
        torch.testing.assert_close(alone, together[row : row + 1], rtol=allowed, atol=allowed)
