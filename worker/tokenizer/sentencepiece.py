"""SentencePiece byte-pair encoding from scored pieces, run by the Rust `tokenizers` library.

SentencePiece joins the two neighbours that make the piece with the best score, the leftmost first.
The library joins by a list of ranked pairs instead: every way to split every piece, by its score.
Pairs of one piece then rank one after the other rather than equal, which has made no difference in
any text compared with the original. A `tokenizer.model` is a protobuf message
(sentencepiece_model.proto of https://github.com/google/sentencepiece).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
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


_BPE = 2
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
# What is read of a file; other fields are skipped.
_SCHEMA = """
name: "sentencepiece.proto" package: "worker"
message_type { name: "Piece"
    field { name: "text" number: 1 type: TYPE_BYTES label: LABEL_OPTIONAL }
    field { name: "score" number: 2 type: TYPE_FLOAT label: LABEL_OPTIONAL }
    field { name: "kind" number: 3 type: TYPE_INT32 label: LABEL_OPTIONAL default_value: "1" }
}
message_type { name: "Trainer"
    field { name: "model_type" number: 3 type: TYPE_INT32 label: LABEL_OPTIONAL default_value: "1" }
    field { name: "bos_id" number: 41 type: TYPE_INT32 label: LABEL_OPTIONAL default_value: "1" }
    field { name: "eos_id" number: 42 type: TYPE_INT32 label: LABEL_OPTIONAL default_value: "2" }
}
message_type { name: "Normalizer"
    field { name: "charsmap" number: 2 type: TYPE_BYTES label: LABEL_OPTIONAL }
    field { name: "prefix" number: 3 type: TYPE_BOOL label: LABEL_OPTIONAL default_value: "true" }
    field { name: "trims" number: 4 type: TYPE_BOOL label: LABEL_OPTIONAL default_value: "true" }
}
message_type { name: "Model"
    field { name: "pieces" number: 1 type_name: ".worker.Piece" label: LABEL_REPEATED }
    field { name: "trainer" number: 2 type_name: ".worker.Trainer" label: LABEL_OPTIONAL }
    field { name: "normalizer" number: 3 type_name: ".worker.Normalizer" label: LABEL_OPTIONAL }
}
"""


@dataclass(frozen=True, slots=True)
class SentencePieceFile:
    pieces: tuple[ScoredPiece, ...]
    bos_id: int | None
    eos_id: int | None
    add_space_prefix: bool


def read_sentencepiece(path: Path) -> SentencePieceFile:
    """Read a file; raise `ModelError` if it is damaged, is not BPE, or rewrites text first."""
    try:
        model = _model_type().FromString(path.read_bytes())
        pieces = tuple(ScoredPiece(p.text.decode(), p.score, p.kind) for p in model.pieces)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    if not pieces:
        raise _damaged(path, "it has no pieces")
    for piece in pieces:
        if not NORMAL <= piece.kind <= BYTE:
            raise _damaged(path, f"a piece has the unknown type {piece.kind}")
    trainer, normalizer = model.trainer, model.normalizer
    if trainer.model_type != _BPE:
        name = _MODEL_TYPES.get(trainer.model_type, trainer.model_type)
        raise ModelError(
            f"{path}: a SentencePiece model of type {name!r} is not supported, only 'bpe';"
            " put the model's tokenizer.json beside it"
        )
    if normalizer.charsmap or normalizer.trims:
        raise ModelError(
            f"{path}: its normalizer rewrites text, which is not supported;"
            " put the model's tokenizer.json beside it"
        )
    # Files have -1 for a missing token.
    bos_id, eos_id = (i if 0 <= i < len(pieces) else None for i in (trainer.bos_id, trainer.eos_id))
    return SentencePieceFile(pieces, bos_id, eos_id, normalizer.prefix)


def _damaged(path: Path, reason: str) -> ModelError:
    return ModelError(
        f"{path}: not a SentencePiece model ({reason}); a model with another kind of tokenizer"
        " needs its tokenizer.json"
    )


@cache
def _model_type() -> Any:
    pool = DescriptorPool()
    pool.Add(text_format.Parse(_SCHEMA, FileDescriptorProto()))
    return GetMessageClass(pool.FindMessageTypeByName("worker.Model"))
