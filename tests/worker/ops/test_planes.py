"""Planes hold the numbers of GGUF's blocks, all of them and no others."""

import numpy as np
import pytest
import torch

from tests.support.model.block_weights import decoded, random_blocks
from worker.ops.planes import BlockWeight, choose_planes, pack

CPU = torch.device("cpu")
K_KINDS = ("Q4_K", "Q5_K", "Q6_K")
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [32, 160, 512])
def test_planes_are_decoded_as_by_the_package(kind: str, columns: int) -> None:
    if kind in K_KINDS:
        columns = 256 * (columns // 32 % 3 + 1)
    parts = [random_blocks(kind, rows, columns, rows) for rows in (5, 1, 40)]
    planes = pack(parts, CPU)
    assert planes is not None
    (weight,) = planes
    wanted = np.concatenate([decoded(part) for part in parts])
    assert (weight.outputs, weight.inputs) == wanted.shape
    np.testing.assert_array_equal(weight.decode().numpy(), wanted)


def test_every_code_and_scale_is_represented() -> None:
    """Random blocks have all bytes, as files of odd quantisers may."""
    for kind in K_KINDS:
        weight = random_blocks(kind, 64, 256 * 8)
        planes = pack([weight], CPU)
        assert planes is not None
        np.testing.assert_array_equal(planes[0].decode().numpy(), decoded(weight))


def test_large_weights_are_packed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_blocks("Q5_K", 11, 512)
    whole = pack([weight], CPU)
    monkeypatch.setattr("worker.ops.planes._PIECE_ELEMENTS", 3 * 512)
    pieces = pack([weight], CPU)
    assert whole is not None
    assert pieces is not None
    assert torch.equal(pieces[0].decode(), whole[0].decode())


def test_each_run_of_one_encoding_is_a_weight() -> None:
    """The values of Q4_K_M files have another encoding than queries and keys."""
    parts = [
        random_blocks(kind, rows, 256) for kind, rows in (("Q4_K", 8), ("Q4_K", 4), ("Q6_K", 4))
    ]
    planes = pack(parts, CPU)
    assert planes is not None
    assert [weight.outputs for weight in planes] == [12, 4]


@pytest.mark.parametrize(
    ("kind", "bits"), [("Q4_0", 4.5), ("Q4_1", 5), ("Q8_0", 8.5), ("Q4_K", 4.625), ("Q6_K", 6.5625)]
)
def test_planes_take_little_more_memory_than_the_file(kind: str, bits: float) -> None:
    planes = pack([random_blocks(kind, 64, 1024)], CPU)
    assert planes is not None
    num_bytes = sum(plane.nbytes for plane in planes[0].planes if plane is not None)
    assert num_bytes * 8 == 64 * 1024 * bits


def test_other_encodings_and_cut_blocks_are_not_packed() -> None:
    weight = random_blocks("Q4_0", 4, 64)
    assert pack([weight, random_blocks("Q3_K", 4, 256)], CPU) is None
    assert pack([BlockWeight("Q4_0", weight.data, is_cut=True)], CPU) is None


def test_a_cpu_has_no_kernels_for_planes() -> None:
    assert choose_planes(CPU) is None
