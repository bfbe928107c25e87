"""ggml's encodings are decoded and encoded exactly as by the gguf package."""

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.errors import ModelError
from worker.models import checkpoints
from worker.models.checkpoints import Float32Array, decoded, quantized
from worker.models.gguf import GGML_TYPES, GgufFile

Type = gguf.GGMLQuantizationType
WRITABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
DECODABLE = sorted({kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"})
REFUSED = sorted({kind.name for kind in Type} - set(DECODABLE))


def write(path: Path, encoded: np.ndarray, kind: Type) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("weights", encoded, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile.open(path)


def read_tensor(file: GgufFile, name: str) -> Float32Array:
    return decoded(file, name, file.tensor_bytes(name)).reshape(file.tensors[name].shape)


def random_blocks(kind: Type, rows: int, blocks: int, seed: int = 2) -> np.ndarray:
    """The bytes are small enough that half-precision scales are finite."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    return generator.integers(0, 0x7B, size=(rows, blocks * num_bytes), dtype=np.uint8)


def test_the_table_of_encodings_matches_the_package() -> None:
    ours = {t.name: (t.block_elements, t.block_bytes) for t in GGML_TYPES.values()}
    assert ours == {kind.name: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: t.name for number, t in GGML_TYPES.items()} == {k.value: k.name for k in Type}


@pytest.mark.parametrize("name", WRITABLE)
def test_a_tensor_that_the_package_encoded_is_decoded(name: str, tmp_path: Path) -> None:
    kind = Type[name]
    values = np.random.default_rng(1).normal(size=(6, 512)).astype(np.float32)
    values[0] = 0.0
    encoded = gguf.quants.quantize(values, kind)
    found = read_tensor(write(tmp_path / "weights.gguf", encoded, kind), "weights")
    assert found.dtype == np.float32
    assert found.flags.writeable
    np.testing.assert_array_equal(found, gguf.quants.dequantize(encoded, kind))
    assert float(np.abs(found - values).mean()) < 0.6


@pytest.mark.parametrize("name", DECODABLE)
def test_any_blocks_are_decoded_as_by_the_package(name: str, tmp_path: Path) -> None:
    kind = Type[name]
    encoded = random_blocks(kind, rows=6, blocks=3)
    if name in ("F32", "F16"):
        encoded = (
            encoded.reshape(6, -1)
            .repeat(4, axis=-1)
            .view(np.dtype(f"<f{4 if name == 'F32' else 2}"))
        )
    file = write(tmp_path / "weights.gguf", encoded, kind)
    expected = np.asarray(gguf.quants.dequantize(encoded, kind), np.float32)
    np.testing.assert_array_equal(read_tensor(file, "weights"), expected)
    rows = np.frombuffer(file.tensor_bytes("weights"), np.uint8).reshape(6, -1)[2:5]
    np.testing.assert_array_equal(decoded(file, "weights", rows), expected[2:5].reshape(-1))


@pytest.mark.parametrize("name", REFUSED)
def test_an_encoding_without_a_decoder_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    kind = Type[name]
    blocks = random_blocks(kind, rows=2, blocks=8)
    if gguf.GGML_QUANT_SIZES[kind][0] == 1:
        blocks = blocks.view("<f8" if name == "F64" else f"<i{gguf.GGML_QUANT_SIZES[kind][1]}")
    file = write(path, blocks, kind)
    with pytest.raises(ModelError, match=f"tensor weights: cannot decode {name}"):
        read_tensor(file, "weights")


@pytest.mark.parametrize("name", sorted(checkpoints._DECODERS))
@given(st.data())
@examples(25)
def test_the_decoders_of_plain_numbers_match_the_package(name: str, data: st.DataObject) -> None:
    kind = Type[name]
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.frombuffer(data.draw(st.binary(min_size=num_bytes, max_size=num_bytes)), np.uint8)
    with np.errstate(all="ignore"):
        ours = checkpoints._DECODERS[name](raw)
        packages = gguf.quants.dequantize(raw.copy().reshape(1, -1), kind)
    np.testing.assert_array_equal(ours.reshape(-1), np.asarray(packages, np.float32).reshape(-1))


def hard_rows(dtype: torch.dtype) -> torch.Tensor:
    rows = torch.randn(131, 576, generator=torch.Generator().manual_seed(3))
    rows[0], rows[1] = 0.0, -0.75
    rows[2] = torch.arange(576) % 32 * 4.5 - 63.5  # multiples of half of the scale
    rows[3], rows[4] = rows[3] * 2.0**-14, rows[4] * 2.0**11
    rows[5] = rows[5].abs()
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_encoding_gives_the_bytes_of_the_package(name: str, dtype: torch.dtype) -> None:
    weight = hard_rows(dtype)
    part = quantized(weight, name)
    assert (part.type_name, part.rows, part.cols, part.heads) == (name, 131, 576, 0)
    wanted = gguf.quants.quantize(weight.float().numpy(), Type[name])
    np.testing.assert_array_equal(part.data.reshape(131, -1), wanted)


def test_a_block_is_encoded_by_its_definition() -> None:
    values = [-127.0, -63.5, -0.5, 0.5, 1.5, 2.5, 127.0] + [0.0] * 25
    data = quantized(torch.tensor([values]), "Q8_0").data
    assert data[:2].view("<f2").tolist() == [1.0]
    assert data[2:].view(np.int8).tolist() == [-127, -64, -1, 1, 2, 3, 127] + [0] * 25
    values = [8.0 + step for step in range(31)] + [8.0]
    data = quantized(torch.tensor([values]), "Q4_1").data
    assert data[:4].view("<f2").tolist() == [2.0, 8.0]
    codes = [(step + 1) // 2 for step in range(31)] + [0]
    assert data[4:].tolist() == [codes[i] | codes[i + 16] << 4 for i in range(16)]


def test_a_value_that_is_not_finite_affects_only_its_block() -> None:
    weight = hard_rows(torch.float32)
    weight[7, 40], weight[8, 3] = torch.nan, torch.inf
    for name in ("Q8_0", "Q4_1"):
        data = quantized(weight, name).data.reshape(131, -1)
        with np.errstate(invalid="ignore"):
            found = gguf.quants.dequantize(data, Type[name]).reshape(131, 18, 32)
        assert np.argwhere(~np.isfinite(found).all(-1)).tolist() == [[7, 1], [8, 0]]


def test_encoding_takes_little_memory_beside_its_result() -> None:
    weight = torch.zeros(8192, 576, dtype=torch.bfloat16)
    for name in ("Q8_0", "Q4_1"):
        tracemalloc.start()
        part = quantized(weight, name)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < part.data.nbytes + (1 << 20)
