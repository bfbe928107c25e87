"""Tokenizers that encode with the Rust library and decode by the exact bytes of each token."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as RustTokenizer

from worker.errors import ModelError
from worker.tokenizer.detokenize import decode

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Spelling = Callable[[str], bytes]


class LibraryTokenizer:
    """A tokenizer of the Rust library, with a table of the bytes of tokens seen so far."""

    def __init__(
        self,
        rust: RustTokenizer,
        spelling: Spelling | None = None,
        strips_leading_space: bool = False,
    ) -> None:
        """`spelling` maps a token's text to its bytes (default: the byte-level alphabet)."""
        self._rust = rust
        self._spelling = spelling or byte_level_bytes
        self.strips_leading_space = strips_leading_space
        added = rust.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # Added tokens are spelled in plain text, not in the vocabulary's alphabet.
        self._bytes: dict[int, bytes] = {i: t.content.encode() for i, t in added.items()}
        # The ids of a vocabulary may have gaps.
        self.vocab_size = 1 + max(rust.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Unlike `encode`, the batch form releases the interpreter lock, and skips the unused
        # offsets.
        batch = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._rust.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return encoding.ids, encoding.offsets

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = decode(self.token_bytes, token_ids, skipped)
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spelling(self.token_text(token_id))
        return known

    def token_text(self, token_id: int) -> str:
        return (self._rust.id_to_token(token_id) or "") if token_id >= 0 else ""


def _byte_decoder() -> dict[str, int]:
    """Map characters to bytes: printable Latin-1 to itself, U+0100 on to the 68 others in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    rest = (b for b in range(256) if b not in set(printable))
    table.update({chr(0x100 + n): b for n, b in enumerate(rest)})
    return table


_BYTE_OF = _byte_decoder()


def byte_level_bytes(spelling: str) -> bytes:
    try:
        return bytes([_BYTE_OF[c] for c in spelling])
    except KeyError:  # a token outside the alphabet stands for its own text
        return spelling.encode()


def _piece_spelling(space: str, has_byte_pieces: bool) -> Spelling:
    """Return a function that spells pieces: `space` is a blank, `<0x0A>` a byte."""

    def spelled(piece: str) -> bytes:
        match = _BYTE_PIECE.fullmatch(piece) if has_byte_pieces else None
        return bytes.fromhex(match[1]) if match else piece.replace(space, " ").encode()

    return spelled


class _Decoder(msgspec.Struct):
    type: str
    decoders: list[dict[str, Any]] = []
    replacement: str = "\u2581"
    prepend_scheme: str = "always"
    add_prefix_space: bool = True


class _TokenizerFile(msgspec.Struct):
    decoder: _Decoder | None = None


def from_tokenizer_json(path: Path) -> LibraryTokenizer:
    """Read a `tokenizer.json`; raise `ModelError` naming a decoder that is not supported."""
    try:
        decoder = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).decoder
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    spelling, strips = _decoding(path, decoder)
    try:
        rust = RustTokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises plain `Exception`
        raise ModelError(f"{path}: the tokenizers library cannot read it: {error}") from error
    # Files may store the limits of training, which must not cut prompts.
    rust.no_truncation()
    rust.no_padding()
    return LibraryTokenizer(rust, spelling, strips)


def _decoding(path: Path, decoder: _Decoder | None) -> tuple[Spelling, bool]:
    if decoder is not None and decoder.type == "Metaspace":
        prepends = decoder.prepend_scheme != "never" and decoder.add_prefix_space
        return _piece_spelling(decoder.replacement, has_byte_pieces=False), prepends
    steps = [] if decoder is None else decoder.decoders
    kinds = [] if decoder is None else [decoder.type, *(str(s.get("type")) for s in steps)]
    if "ByteLevel" in kinds:
        return byte_level_bytes, False
    known = {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip"}
    replaced = [s for s in steps if s.get("type") == "Replace" and s.get("content") == " "]
    if set(kinds) <= known and len(replaced) == 1:
        pattern = replaced[0].get("pattern")
        space = pattern.get("String") if isinstance(pattern, dict) else None
        strips = [s for s in steps if s.get("type") == "Strip"]
        fits = all((s.get("content"), s.get("start"), s.get("stop")) == (" ", 1, 0) for s in strips)
        if isinstance(space, str) and space and fits:
            return _piece_spelling(space, "ByteFallback" in kinds), bool(strips)
    raise ModelError(
        f"{path}: a decoder of {', '.join(kinds) or 'no steps'} is not supported; supported are"
        " ByteLevel, Metaspace, and SentencePiece's Replace, ByteFallback, Fuse, Strip"
    )
