"""Text ↔ token ids, from the vocabulary inside a GGUF file or from a `tokenizer.json`.

Byte-level BPE only: every token stands for exact bytes, which is what lets the incremental
detokenizer be a byte decoder. The pieces are the Rust `tokenizers` library's; what lives here is
the choice of pieces for each GGUF `tokenizer.ggml.pre` name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from worker.errors import ModelError
from worker.tokenizer.checkpoint import Checkpoint

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# The regexes are the published pre-tokenizers of the models the names stand for.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_NAMES = ("smollm", "llama-bpe", "qwen2", "gpt-2", "default")


class Tokenizer(Protocol):
    """What the API needs of a tokenizer. Thread-safe: long prompts are encoded in a thread."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which `skip_special_tokens` leaves out of the text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Control tokens written out in it become their ids.
        `add_special_tokens` puts the model's own prefix (bos) in front where it has one.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a token's bytes need not be whole UTF-8 characters. An id
        the vocabulary does not name stands for nothing.
        """
        ...

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token, for people."""
        ...


def _byte_decoder() -> dict[str, int]:
    """GPT-2's printable stand-ins, character → byte: printable Latin-1 characters mean themselves,
    the 68 others are shifted past U+0100 in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    rest = (b for b in range(256) if b not in set(printable))
    table.update({chr(0x100 + n): b for n, b in enumerate(rest)})
    return table


_BYTE_OF = _byte_decoder()


class ByteLevelTokenizer:
    """A byte-level BPE tokenizer. Owns a growing table of the bytes of tokens it was asked for
    (bounded by the vocabulary).
    """

    def __init__(self, rust: RustTokenizer) -> None:
        self._rust = rust
        added = rust.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {i: t.content.encode() for i, t in added.items()}

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens."""
        return self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See `Tokenizer.encode`."""
        # The batch form lets other threads run meanwhile, which `encode` does not, and skips the
        # offsets nobody reads.
        batch = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = _spelled_bytes(self.token_text(token_id))
        return known

    def token_text(self, token_id: int) -> str:
        """See `Tokenizer.token_text`."""
        return self._rust.id_to_token(token_id) or ""


def _spelled_bytes(spelling: str) -> bytes:
    try:
        return bytes([_BYTE_OF[c] for c in spelling])
    except KeyError:  # a token that is not spelled in stand-ins means its own text
        return spelling.encode()


def build_tokenizer(checkpoint: Checkpoint) -> ByteLevelTokenizer:
    """Build a checkpoint's tokenizer; raise `ModelError` naming what is not supported."""
    if checkpoint.gguf_metadata is not None:
        return _from_gguf(checkpoint.path, checkpoint.gguf_metadata)
    return _from_tokenizer_json(checkpoint.path / "tokenizer.json")


def _from_gguf(path: Path, metadata: dict[str, Any]) -> ByteLevelTokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        kind = {"llama": " (SentencePiece)", "bert": " (WordPiece)"}.get(str(model), "")
        raise ModelError(
            f"{path}: tokenizer.ggml.model is {model!r}{kind}, which is not supported yet;"
            " use a model with a byte-level BPE tokenizer ('gpt2')"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the Rust library raises bare exceptions
        raise ModelError(f"{path}: tokenizer.ggml.merges do not fit the vocabulary") from error
    rust = RustTokenizer(bpe)
    rust.pre_tokenizer = _pre_tokenizer(path, pre)
    rust.decoder = decoders.ByteLevel()
    _add_marked_tokens(rust, tokens, metadata.get("tokenizer.ggml.token_type", []))
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and isinstance(bos, int):
        rust.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return ByteLevelTokenizer(rust)


def _add_marked_tokens(rust: RustTokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are matched before pre-tokenisation and can be skipped in the output;
    user-defined ones are matched too but are text.
    """
    marked = [(t, kind) for t, kind in zip(tokens, types, strict=False) if kind >= _CONTROL]
    rust.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in marked if kind == _CONTROL]
    )
    rust.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in marked if kind == _USER_DEFINED]
    )


def _pre_tokenizer(path: Path, pre: object) -> pre_tokenizers.PreTokenizer:
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if pre in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("llama-bpe", "qwen2"):
        words = _LLAMA3_WORDS if pre == "llama-bpe" else _QWEN2_WORDS
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise ModelError(
        f"{path}: tokenizer.ggml.pre is {pre!r}, which is not supported yet;"
        f" supported are {', '.join(_PRE_NAMES)}"
    )


class _Decoder(msgspec.Struct):
    type: str
    decoders: list[dict[str, Any]] = []


class _TokenizerFile(msgspec.Struct):
    decoder: _Decoder | None = None


def _from_tokenizer_json(path: Path) -> ByteLevelTokenizer:
    try:
        decoder = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).decoder
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    names = [] if decoder is None else [decoder.type, *(d.get("type") for d in decoder.decoders)]
    if "ByteLevel" not in names:
        raise ModelError(
            f"{path}: the decoder is {names[0] if names else None!r} (SentencePiece-like), which"
            " is not supported yet; use a model with a byte-level BPE tokenizer"
        )
    try:
        rust = RustTokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare exceptions
        raise ModelError(f"{path}: the tokenizers library cannot read it: {error}") from error
    rust.no_truncation()
    rust.no_padding()
    return ByteLevelTokenizer(rust)
