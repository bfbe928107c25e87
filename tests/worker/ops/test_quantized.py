"""Weights that can be packed, and weights that must be decoded."""

import pytest
import torch

from worker.ops.quantized import Encoding, GroupedWeight, choose_product, pack

CPU = torch.device("cpu")


def weight(
    inputs: int, groups: torch.Tensor, encoding: Encoding = Encoding.UINT4, rows: int = 6
) -> GroupedWeight:
    noise = torch.Generator().manual_seed(inputs)
    count = int(groups.max()) + 1
    codes = torch.randint(0, 16, (rows, inputs), generator=noise, dtype=torch.uint8)
    scales = torch.rand(rows, count, generator=noise) + 0.5
    if encoding is Encoding.FLOAT8:
        return GroupedWeight(encoding, codes.view(torch.float8_e4m3fn), scales, None, groups)
    zeros = torch.randint(0, 16, (rows, count), generator=noise, dtype=torch.uint8)
    return GroupedWeight(encoding, codes, scales, zeros, groups)


@pytest.mark.parametrize(
    ("first", "size"), [(0, 32), (3, 64), (0, 128)], ids=["many groups", "later groups", "one"]
)
def test_columns_are_sorted_by_group(first: int, size: int) -> None:
    """`order` has the input of each column."""
    groups = (torch.arange(128) // size + first)[torch.randperm(128)]
    grouped = weight(128, groups)
    packed = pack([grouped, grouped], CPU)
    assert packed is not None
    assert packed.group == size
    assert len(packed.scales) == 128 // size
    order = torch.arange(128) if packed.order is None else packed.order
    wanted = torch.cat([grouped.decode()] * 2)[:, order]
    assert torch.equal(packed.decode().T, wanted)


@pytest.mark.parametrize(
    "grouped",
    [
        weight(96, torch.arange(96) // 32),
        weight(128, torch.arange(128) // 16),
        weight(128, (torch.arange(128) + 16) // 32),
        weight(96, torch.arange(96) // 24, Encoding.UINT8),
        weight(128, torch.tensor([0] * 70 + [1] * 58), Encoding.UINT8),
    ],
    ids=["odd pairs", "small groups", "part of a group", "small groups of bytes", "uneven groups"],
)
def test_groups_that_kernels_do_not_take_are_not_packed(grouped: GroupedWeight) -> None:
    assert pack([grouped], CPU) is None


def test_parts_of_different_groups_are_not_packed() -> None:
    """One order of inputs cannot serve two."""
    groups = torch.arange(128) // 32
    assert pack([weight(128, groups), weight(128, groups.flip(0))], CPU) is None


def test_float8_that_is_not_a_number_is_not_packed() -> None:
    """The kernel has no such number; a decoded weight has."""
    grouped = weight(64, torch.zeros(64, dtype=torch.int64), Encoding.FLOAT8)
    assert pack([grouped], CPU) is not None
    grouped.codes.view(torch.uint8)[3, 5] = 255
    assert pack([grouped], CPU) is None
    assert grouped.decode()[3, 5].isnan()


def test_a_cpu_decodes_weights_at_the_start() -> None:
    assert choose_product(CPU) is None
