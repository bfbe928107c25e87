"""Decoded tensors against the gguf package's own decoder."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from worker.models.gguf import GgufFile
from worker.models.quants import read_tensor

Type = gguf.GGMLQuantizationType


def write(path: Path, values: np.ndarray, kind: Type) -> np.ndarray:
    """Write one encoded tensor; return what the package decodes it to."""
    encoded = gguf.quants.quantize(values, kind)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("weights", encoded, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return np.asarray(gguf.quants.dequantize(encoded, kind), np.float32)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1"])
def test_decodes_exactly_as_the_format_says(kind: str, tmp_path: Path) -> None:
    """Every value equals the package's, for our own decoders and the ones we borrow."""
    values = np.random.default_rng(1).normal(size=(6, 96)).astype(np.float32)
    values[0] = 0.0
    path = tmp_path / "weights.gguf"
    expected = write(path, values, Type[kind])
    decoded = read_tensor(GgufFile.open(path), "weights")
    assert decoded.dtype == np.float32
    assert decoded.flags.writeable
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_allclose(decoded, values, atol=0.5)


def test_decodes_k_quants(tmp_path: Path) -> None:
    """A super-block encoding the package cannot write is decoded by the package."""
    raw = np.random.default_rng(2).integers(0, 64, size=(2, 210), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("weights", raw, raw_dtype=Type.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    decoded = read_tensor(GgufFile.open(tmp_path / "k.gguf"), "weights")
    np.testing.assert_array_equal(decoded, gguf.quants.dequantize(raw, Type.Q6_K))
