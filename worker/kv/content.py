"""The identity of KV: its tokens, and the model and number format that computed it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from worker.types import Adapter

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 14
_WEIGHTS = (".gguf", ".safetensors", ".bin")
_CONFIGURATIONS = ("config.json", "adapter_config.json")


class KvShape(msgspec.Struct, frozen=True, array_like=True):
    """The properties that two engines must share so that one can use the KV of the other. `model`
    is a digest of weights and configuration. Block sizes may differ.
    """

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    byte_order: str = sys.byteorder

    def difference(self, other: KvShape) -> str | None:
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"its {name} is {theirs}, and {ours} here"
        return None


def content_digest(
    token_ids: Sequence[int], cache_salt: str | None, adapter: Adapter | None
) -> bytes:
    """Return a digest of what the KV of tokens depends on besides the model."""
    facts = (cache_salt, None if adapter is None else adapter.digest, token_ids)
    return sha256(msgspec.msgpack.encode(facts)).digest()


def model_digest(path: Path | None, *facts: object) -> str:
    """Return a digest of the weights below `path`, a file or a folder (the size and samples of each
    file), and of `facts` about their use. Two quantisations of a model differ.
    """
    digest = sha256(repr(facts).encode())
    files = [] if path is None else [path]
    if path is not None and path.is_dir():
        found = (p for p in path.iterdir() if p.suffix in _WEIGHTS or p.name in _CONFIGURATIONS)
        files = sorted(found, key=lambda p: p.name)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.suffix} {size}\n".encode())
        with file.open("rb") as opened:
            for index in range(_SAMPLES):
                opened.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
