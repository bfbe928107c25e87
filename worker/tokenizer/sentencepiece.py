"""SentencePiece byte-pair encoding from scored pieces, run by the Rust `tokenizers` library.

SentencePiece joins the two neighbours that make the piece with the best score, the leftmost first.
The library joins by a list of ranked pairs instead: every way to split every piece, by its score.
Pairs of one piece then rank one after the other rather than equal, which has made no difference in
any text compared with the original. A `tokenizer.model` is a protobuf message
(sentencepiece_model.proto of https://github.com/google/sentencepiece), read without protoc.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as RustTokenizer

from worker.errors import ModelError
from worker.tokenizer.rust import LibraryTokenizer

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ScoredPiece:
    """One entry of the vocabulary. A mark with `strips_left` absorbs the blanks on its left."""

    text: str
    score: float = 0.0
    kind: int = NORMAL
    strips_left: bool = False
    strips_right: bool = False

    @property
    def is_mark(self) -> bool:
        return self.kind in (CONTROL, USER_DEFINED) and bool(self.text)

    @property
    def mark_text(self) -> str:
        return self.text.replace(SPACE, " ")


@dataclass(frozen=True, slots=True)
class SentencePieceOptions:
    """The additions around a text; with `space_after_marks` a text after a mark gets a space."""

    bos_id: int | None = None
    eos_id: int | None = None
    add_space_prefix: bool = True
    space_after_marks: bool = True


class SentencePieceTokenizer(LibraryTokenizer):
    def __init__(
        self,
        source: str,
        pieces: Sequence[ScoredPiece],
        options: SentencePieceOptions | None = None,
    ) -> None:
        """Index the pieces; raise `ModelError` (naming `source`) when text cannot be encoded."""
        self._options = options or SentencePieceOptions()
        self._pieces = tuple(pieces)
        marks = tuple(p.mark_text for p in pieces if p.is_mark)
        # The library's space also follows marks; without that, `encode` adds the first space.
        everywhere = self._options.add_space_prefix and self._options.space_after_marks
        self._prefixes = self._options.add_space_prefix and not everywhere
        self._marks = marks
        super().__init__(
            _rust_tokenizer(source, pieces, everywhere), _bytes_of, self._options.add_space_prefix
        )
        self._bytes = {i: _piece_bytes(piece) for i, piece in enumerate(pieces)}
        self.special_ids = frozenset(
            i for i, piece in enumerate(pieces) if piece.kind in (CONTROL, UNKNOWN)
        )
        self.vocab_size = len(self._pieces)
        self._split_ids = _unused_splits(pieces)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = super().encode(self._prefixed(text), add_special_tokens=False)
        if self._split_ids:
            ids = [part for i in ids for part in self._split_ids.get(i, (i,))]
        if add_special_tokens:
            before, after = self._options.bos_id, self._options.eos_id
            ids = [*_present(before), *ids, *_present(after)]
        return ids

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        given = self._prefixed(text)
        shift = len(given) - len(text)
        found, spans = super().encode_with_offsets(given, add_special_tokens=False)
        pairs: list[tuple[int, tuple[int, int]]] = []
        for place, (token_id, (start, end)) in enumerate(zip(found, spans, strict=True)):
            start, end = max(0, start - shift), max(0, end - shift)
            # The library maps an added space to the character after it.
            following = spans[place + 1][0] - shift if place + 1 < len(spans) else None
            if self._pieces[token_id].text == SPACE and following == start:
                end = start
            pairs += [(part, (start, end)) for part in self._split_ids.get(token_id, (token_id,))]
        if add_special_tokens:
            before = [(i, (0, 0)) for i in _present(self._options.bos_id)]
            after = [(i, (len(text), len(text))) for i in _present(self._options.eos_id)]
            pairs = [*before, *pairs, *after]
        return [i for i, _ in pairs], [span for _, span in pairs]

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        return self._pieces[token_id].text if 0 <= token_id < len(self._pieces) else ""

    def _prefixed(self, text: str) -> str:
        return f" {text}" if self._prefixes and text and not text.startswith(self._marks) else text


def _rust_tokenizer(source: str, pieces: Sequence[ScoredPiece], prepends: bool) -> RustTokenizer:
    # Only a full set can spell every character.
    has_bytes = len({m[1].upper() for p in pieces if (m := _byte_match(p))}) == 256
    unknown = next((p.text for p in pieces if p.kind == UNKNOWN), None)
    if not has_bytes and unknown is None:
        raise ModelError(f"{source}: the vocabulary has neither 256 byte pieces nor an unknown")
    model = models.BPE(
        vocab={p.mark_text if p.is_mark else p.text: i for i, p in enumerate(pieces)},
        merges=[(left, right) for _, left, right in _merges(pieces)],
        byte_fallback=has_bytes,
        unk_token=unknown,
        fuse_unk=True,  # as SentencePiece does
    )
    rust = RustTokenizer(model)
    escaping = normalizers.Replace(" ", SPACE)
    prefixing = [normalizers.Prepend(SPACE)] if prepends else []
    rust.normalizer = normalizers.Sequence([*prefixing, escaping])
    # Not normalized: marks are found before the blanks in them would be escaped.
    rust.add_tokens(
        [
            AddedToken(p.mark_text, lstrip=p.strips_left, rstrip=p.strips_right, normalized=False)
            for p in pieces
            if p.is_mark
        ]
    )
    return rust


def _merges(pieces: Sequence[ScoredPiece]) -> list[tuple[float, str, str]]:
    scores = {p.text: p.score for p in pieces if p.kind in (NORMAL, UNUSED)}
    merges = [
        (-score, text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return sorted(merges, key=lambda merge: merge[0])


def _unused_splits(pieces: Sequence[ScoredPiece]) -> dict[int, tuple[int, ...]]:
    unused = {p.text for p in pieces if p.kind == UNUSED}
    if not unused:
        return {}
    ids = {p.text: i for i, p in enumerate(pieces)}
    halves = {left + right: (left, right) for _, left, right in reversed(_merges(pieces))}

    def parts(text: str) -> Iterator[int]:
        if text in unused and text in halves:
            for half in halves[text]:
                yield from parts(half)
        else:
            yield ids[text]

    return {ids[text]: tuple(parts(text)) for text in unused}


def _present(token_id: int | None) -> tuple[int, ...]:
    return () if token_id is None else (token_id,)


def _byte_match(piece: ScoredPiece) -> re.Match[str] | None:
    return _BYTE_PIECE.fullmatch(piece.text) if piece.kind == BYTE else None


def _piece_bytes(piece: ScoredPiece) -> bytes:
    match = _byte_match(piece)
    if match is not None:
        return bytes.fromhex(match[1])
    return piece.text.encode() if piece.kind in (CONTROL, UNKNOWN) else _bytes_of(piece.text)


def _bytes_of(text: str) -> bytes:
    return text.replace(SPACE, " ").encode()


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_PIECES, _MODEL_TRAINER, _MODEL_NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_KIND = 1, 2, 3
_TRAINER_MODEL_TYPE, _TRAINER_BOS, _TRAINER_EOS = 3, 41, 42
_NORMALIZER_CHARSMAP, _NORMALIZER_DUMMY_PREFIX, _NORMALIZER_EXTRA_BLANKS = 2, 3, 4
_BPE = 2
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True, slots=True)
class SentencePieceFile:
    pieces: tuple[ScoredPiece, ...]
    bos_id: int | None
    eos_id: int | None
    add_space_prefix: bool


class _DamagedError(Exception): ...


def read_sentencepiece(path: Path) -> SentencePieceFile:
    """Read a file; raise `ModelError` if it is damaged, is not BPE, or rewrites text first."""
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
    # protobuf omits fields with their default: a missing type is unigram.
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
    """Return a token's id, if it has one: files have -1 (as 64 bits) for a missing token."""
    return value if isinstance(value, int) and value < num_pieces else None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield fields in file order: the field number with an integer (varint) or raw bytes."""
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
        # A slice past the end would silently be shorter.
        if position + size > len(data):
            raise _DamagedError(f"a field runs past the end at {position}")
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise _DamagedError(f"a number runs past the end at {position}")
