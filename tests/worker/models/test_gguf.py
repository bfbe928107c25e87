"""The GGUF reader returns the written values, and names any damage."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.errors import ModelError
from worker.models.gguf import GgufFile

STRING, ARRAY, UINT32 = 8, 9, 4


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def container(*, kvs: list[bytes] = [], tensors: list[bytes] = [], data: bytes = b"") -> bytes:  # noqa: B006
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(kvs)) + b"".join(kvs + tensors)
    return head + b"\0" * (-len(head) % 32) + data


def tensor(name: str, dims: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", type_id, offset)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -300)
    writer.add_int32("i32", -70000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "käse 🧀")
    writer.add_array("words", ["a", "", "Ġb"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_tensor("first", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("second", np.ones(5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_type_of_value_is_read(sample: Path) -> None:
    metadata = GgufFile.open(sample).metadata
    expected = {
        "u8": 255,
        "i8": -5,
        "u16": 65535,
        "i16": -300,
        "i32": -70000,
        "u64": 2**63,
        "i64": -(2**62),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "käse 🧀",
        "words": ["a", "", "Ġb"],
        "numbers": [1, -2, 3],
    }
    assert {key: metadata[key] for key in expected} == expected


def test_tensors_have_their_shape_type_and_bytes(sample: Path) -> None:
    file = GgufFile.open(sample)
    assert file.architecture == "llama"
    assert file.tensors["first"].shape == (3, 4)
    assert file.tensors["second"].type.name == "F16"
    raw = np.frombuffer(file.tensor_bytes("first"), np.float32)
    assert raw.tolist() == list(range(12))


def test_an_unknown_tensor_is_an_error(sample: Path) -> None:
    with pytest.raises(ModelError, match="tensor third is missing"):
        GgufFile.open(sample).tensor_bytes("third")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf.*No such file"):
        GgufFile.open(tmp_path / "nowhere.gguf")


def kv(key: str, value_type: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", value_type) + value


BROKEN = {
    "empty": (b"", "it is empty"),
    "another format": (b"PK\3\4" + b"\0" * 40, "not a GGUF file"),
    "header cut": (b"GGUF\3\0\0\0\1", "the header"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors cannot fit"),
    "huge key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "metadata keys cannot fit"),
    "huge string": (
        container(kvs=[kv("k", STRING, struct.pack("<Q", 2**62))]),
        r"metadata key 'k'.*bytes wanted",
    ),
    "huge array": (
        container(kvs=[kv("k", ARRAY, struct.pack("<IQ", UINT32, 2**61))]),
        "array elements cannot fit",
    ),
    "string in an array past the end": (
        container(kvs=[kv("k", ARRAY, struct.pack("<IQQ", STRING, 1, 2**40))]),
        "string 0 of 1 runs past",
    ),
    "unknown value type": (container(kvs=[kv("k", 77, b"\0")]), "unknown value type 77"),
    "not UTF-8": (container(kvs=[kv("k", STRING, struct.pack("<Q", 1) + b"\xff")]), "UTF-8"),
    "deep nesting": (
        container(kvs=[kv("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 9 + b"\0" * 64)]),
        "nested deeper",
    ),
    "repeated key": (container(kvs=[kv("k", 7, b"\1")] * 2), "'k' appears twice"),
    "repeated tensor": (container(tensors=[tensor("t", [1])] * 2, data=b"\0" * 64), "twice"),
    "alignment of zero": (
        container(kvs=[kv("general.alignment", UINT32, b"\0" * 4)]),
        "alignment is 0",
    ),
    "unknown tensor type": (container(tensors=[tensor("t", [1], 99)]), "unknown tensor type 99"),
    "too many dimensions": (container(tensors=[tensor("t", [1] * 9)]), "9 dimensions"),
    "partial block": (container(tensors=[tensor("t", [33], 3)]), "not whole blocks of Q4_1"),
    "odd offset": (container(tensors=[tensor("t", [1], 0, 3)]), "not a multiple"),
    "data cut": (container(tensors=[tensor("t", [64])], data=b"\0" * 255), "tensor 't'.*partial"),
    "shape overflow": (
        container(tensors=[tensor("t", [2**40, 2**40])]),
        "tensor 't'.*its data ends",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damage_is_refused_with_file_and_reason(name: str, tmp_path: Path) -> None:
    content, reason = BROKEN[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"(?s)broken\.gguf: .*{reason}"):
        GgufFile.open(path)


@given(data=st.data())
@examples(150)
def test_a_damaged_file_is_opened_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(
        container(
            kvs=[kv("words", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("bc"))],
            tensors=[tensor("t", [32, 2], 3)],
            data=b"\1" * 40,
        )
    )
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("fuzz") / "file.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        file = GgufFile.open(path)
    except ModelError:
        return
    assert all(len(file.tensor_bytes(n)) == t.num_bytes for n, t in file.tensors.items())
