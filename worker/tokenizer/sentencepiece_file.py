"""Reader of SentencePiece's `tokenizer.model`: the few protobuf fields that matter, without protoc.

Source: sentencepiece_model.proto of https://github.com/google/sentencepiece. A message is a row of
(key, value) pairs, key = field number · 8 + wire type; anything unknown is stepped over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worker.errors import ModelError
from worker.tokenizer.sentencepiece import BYTE, NORMAL, ScoredPiece

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_PIECES, _MODEL_TRAINER, _MODEL_NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_KIND = 1, 2, 3
_TRAINER_MODEL_TYPE, _TRAINER_BOS, _TRAINER_EOS = 3, 41, 42
_NORMALIZER_CHARSMAP, _NORMALIZER_DUMMY_PREFIX, _NORMALIZER_EXTRA_BLANKS = 2, 3, 4
_BPE = 2
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True, slots=True)
class SentencePieceFile:
    """The vocabulary of a file, and what it says about the text around it."""

    pieces: tuple[ScoredPiece, ...]
    bos_id: int | None
    eos_id: int | None
    add_space_prefix: bool


class _DamagedError(Exception):
    """The bytes are not a message."""


def read_sentencepiece(path: Path) -> SentencePieceFile:
    """Read a file; raise `ModelError` when it is damaged, or made by another algorithm than BPE, or
    rewrites text before it is cut.
    """
    try:
        return _parse(path, path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (_DamagedError, UnicodeDecodeError, struct.error) as error:
        raise ModelError(
            f"{path}: not a SentencePiece model ({error}); a model with another kind of tokenizer"
            " needs its tokenizer.json"
        ) from error


def _parse(path: Path, data: bytes) -> SentencePieceFile:
    pieces: list[ScoredPiece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if isinstance(value, int):
            continue
        if number == _MODEL_PIECES:
            pieces.append(_piece(value))
        elif number == _MODEL_TRAINER:
            trainer = dict(_fields(value))
        elif number == _MODEL_NORMALIZER:
            normalizer = dict(_fields(value))
    if not pieces:
        raise _DamagedError("it has no pieces")
    kind = trainer.get(_TRAINER_MODEL_TYPE, 1)
    if kind != _BPE:
        name = _MODEL_TYPES.get(kind, kind) if isinstance(kind, int) else kind
        raise ModelError(
            f"{path}: a SentencePiece model of type {name!r} is not supported, only 'bpe';"
            " put the model's tokenizer.json beside it"
        )
    if normalizer.get(_NORMALIZER_CHARSMAP) or normalizer.get(_NORMALIZER_EXTRA_BLANKS, 1):
        raise ModelError(
            f"{path}: its normalizer rewrites text, which is not supported;"
            " put the model's tokenizer.json beside it"
        )
    return SentencePieceFile(
        tuple(pieces),
        _known_id(trainer.get(_TRAINER_BOS, 1), len(pieces)),
        _known_id(trainer.get(_TRAINER_EOS, 2), len(pieces)),
        bool(normalizer.get(_NORMALIZER_DUMMY_PREFIX, 1)),
    )


def _piece(data: bytes) -> ScoredPiece:
    fields = dict(_fields(data))
    text, score = fields.get(_PIECE_TEXT, b""), fields.get(_PIECE_SCORE, b"\0\0\0\0")
    kind = fields.get(_PIECE_KIND, NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise _DamagedError("a piece has fields of the wrong type")
    if not NORMAL <= kind <= BYTE:
        raise _DamagedError(f"a piece has the unknown type {kind}")
    return ScoredPiece(text.decode("utf-8"), struct.unpack("<f", score)[0], kind)


def _known_id(value: int | bytes, num_pieces: int) -> int | None:
    """An id of the vocabulary; the file writes -1 (as 64 bits) for a token it does not have."""
    return value if isinstance(value, int) and value < num_pieces else None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers with numbers (varints) or raw bytes, in the order they are written."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire_type == _BYTES:
            size, position = _varint(data, position)
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise _DamagedError(f"wire type {wire_type} at {position}")
        if position + size > len(data):
            raise _DamagedError(f"a field runs past the end at {position}")
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number in base 128, and the position after it."""
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise _DamagedError(f"a number runs past the end at {position}")
