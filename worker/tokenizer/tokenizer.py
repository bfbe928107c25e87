"""Text ↔ token ids: the interface, and the construction of a checkpoint's tokenizer.

A GGUF file contains only the name of the rule that cuts text into words; here are the published
rules.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from worker.errors import ModelError
from worker.tokenizer.checkpoint import Checkpoint
from worker.tokenizer.rust import LibraryTokenizer, from_tokenizer_json
from worker.tokenizer.sentencepiece import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    ScoredPiece,
    SentencePieceOptions,
    SentencePieceTokenizer,
    read_sentencepiece,
)

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's fallback for a vocabulary without a recorded rule.
_DEFAULT_RULES = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """One rule. `patterns` None stands for GPT-2's own. `splits_digits`: every digit is a piece.
    `ignore_merges`: a word that is a token stays one. `compose`: the text becomes NFC first.
    `adds_bos`: the begin token is added unless the file says otherwise.
    """

    patterns: tuple[str, ...] | None = None
    splits_digits: bool = False
    ignore_merges: bool = False
    compose: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[Any] = []
        if self.splits_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            for pattern in self.patterns or ()
        ]
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.patterns is None)
        return pre_tokenizers.Sequence([*steps, words]) if steps else words

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.compose else None


_GPT2 = PreTokenization()
_SMOLLM = PreTokenization(splits_digits=True)
_LLAMA3 = PreTokenization((_LLAMA3_WORDS,), ignore_merges=True, adds_bos=True)
_LLAMA3_PLAIN = PreTokenization((_LLAMA3_WORDS,))
_QWEN2 = PreTokenization((_QWEN2_WORDS,), compose=True)

# By `tokenizer.ggml.pre`.
PRE_TOKENIZATIONS: dict[object, PreTokenization] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _SMOLLM),
    **dict.fromkeys(("exaone", "minerva", "minerva-7b"), _SMOLLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3_PLAIN),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "stablelm2": PreTokenization((_QWEN2_WORDS,)),
    "qwen35": PreTokenization((_QWEN35_WORDS,), compose=True),
    "tekken": PreTokenization((_TEKKEN_WORDS,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion"), _GPT2),
    "default": PreTokenization(_DEFAULT_RULES),
}


_KEY = "tokenizer.ggml."
_Entry = TypeVar("_Entry")


class Tokenizer(Protocol):
    """The API's view of a tokenizer. Thread-safe: long prompts are encoded in a thread."""

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, including added tokens; the model's embeddings may be more."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which `skip_special_tokens` leaves out of the text."""

    @property
    def strips_leading_space(self) -> bool:
        """True if decoding removes the first space of a sequence, which SentencePiece adds."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text and its control tokens. `add_special_tokens` adds the model's prefix."""

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text; return its ids and the range of characters of each, which is empty for
        additions of the tokenizer and the same for all tokens that spell one character.
        """

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Decode a sequence, without blanks between special tokens; invalid bytes become U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, maybe part of a UTF-8 character; none for an unknown id."""

    def token_text(self, token_id: int) -> str:
        """Return the vocabulary's own spelling of a token, for display."""


def build_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Build a checkpoint's tokenizer; raise `ModelError` naming an unsupported feature."""
    if checkpoint.gguf_metadata is not None:
        return _from_gguf(checkpoint.path, checkpoint.gguf_metadata)
    described = checkpoint.path / "tokenizer.json"
    if not described.is_file() and checkpoint.tokenizer_config is not None:
        model = checkpoint.path / "tokenizer.model"
        if model.is_file():
            return _from_sentencepiece(model, checkpoint.tokenizer_config)
    return from_tokenizer_json(described)


def _from_gguf(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    model = metadata.get(f"{_KEY}model")
    if model == "gpt2":
        return _byte_level_from_gguf(path, metadata)
    if model == "llama":
        return _sentencepiece_from_gguf(path, metadata)
    kind = {"bert": " (WordPiece)", "t5": " (Unigram)"}.get(str(model), "")
    raise ModelError(
        f"{path}: tokenizer.ggml.model is {model!r}{kind}, which is not supported; supported are"
        " 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
    )


def _byte_level_from_gguf(path: Path, metadata: dict[str, Any]) -> LibraryTokenizer:
    name = metadata.get(f"{_KEY}pre", "default")
    rule = PRE_TOKENIZATIONS.get(name) if isinstance(name, str) else None
    if rule is None:
        raise ModelError(
            f"{path}: tokenizer.ggml.pre is {name!r}, which is not supported;"
            f" supported are {', '.join(map(str, PRE_TOKENIZATIONS))}"
        )
    tokens: list[str] = metadata[f"{_KEY}tokens"]
    pairs = (m.partition(" ") for m in _list_of(path, metadata, "merges", str))
    merges = [(left, right) for left, _, right in pairs]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.ignore_merges)
    except Exception as error:  # the Rust library raises plain `Exception`
        raise ModelError(f"{path}: tokenizer.ggml.merges do not fit the vocabulary") from error
    rust = RustTokenizer(bpe)
    normalizer = rule.normalizer()
    if normalizer is not None:
        rust.normalizer = normalizer
    rust.pre_tokenizer = rule.pre_tokenizer()
    rust.decoder = decoders.ByteLevel()
    _add_marked_tokens(rust, tokens, _list_of(path, metadata, "token_type", int))
    template, added = ["$A"], []
    for kind, default in (("bos", rule.adds_bos), ("eos", False)):
        token_id = _asked_id(metadata, kind, default, len(tokens))
        if token_id is not None:
            template.insert(0 if kind == "bos" else len(template), kind)
            # Under `kind`, not its text, which may have a meaning in the template syntax.
            added.append({"id": kind, "ids": [token_id], "tokens": [tokens[token_id]]})
    if added:
        rust.post_processor = processors.TemplateProcessing(single=template, special_tokens=added)
    return LibraryTokenizer(rust)


def _list_of(
    path: Path, metadata: dict[str, Any], key: str, kind: type[_Entry], *others: type
) -> list[_Entry]:
    values = metadata.get(f"{_KEY}{key}", [])
    if not isinstance(values, list) or not set(map(type, values)) <= {kind, *others}:
        raise ModelError(f"{path}: {_KEY}{key} is not a list of {kind.__name__} values")
    return values


def _asked_id(metadata: dict[str, Any], kind: str, default: bool, vocab_size: int) -> int | None:
    token_id = metadata.get(f"{_KEY}{kind}_token_id")
    if not metadata.get(f"{_KEY}add_{kind}_token", default):
        return None
    return token_id if isinstance(token_id, int) and 0 <= token_id < vocab_size else None


def _add_marked_tokens(rust: RustTokenizer, tokens: list[str], types: list[int]) -> None:
    """Add marked tokens, which are matched first; only control tokens are skipped in output."""
    marked = [(t, kind) for t, kind in zip(tokens, types, strict=False) if kind >= CONTROL]
    rust.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in marked if kind == CONTROL]
    )
    rust.add_tokens([AddedToken(t, normalized=False) for t, kind in marked if kind == USER_DEFINED])


def _sentencepiece_from_gguf(path: Path, metadata: dict[str, Any]) -> SentencePieceTokenizer:
    tokens: list[str] = metadata[f"{_KEY}tokens"]
    scores = _list_of(path, metadata, "scores", float, int)
    kinds = _list_of(path, metadata, "token_type", int) or [NORMAL] * len(tokens)
    if len(scores) != len(tokens) or len(kinds) != len(tokens):
        raise ModelError(
            f"{path}: tokenizer.ggml.scores and token_type must have one entry for each of the"
            f" {len(tokens)} tokens of a SentencePiece vocabulary"
        )
    options = SentencePieceOptions(
        bos_id=_asked_id(metadata, "bos", True, len(tokens)),
        eos_id=_asked_id(metadata, "eos", False, len(tokens)),
        add_space_prefix=bool(metadata.get(f"{_KEY}add_space_prefix", True)),
    )
    pieces = [ScoredPiece(t, float(s), k) for t, s, k in zip(tokens, scores, kinds, strict=True)]
    return SentencePieceTokenizer(str(path), pieces, options)


def _from_sentencepiece(path: Path, config: dict[str, Any]) -> SentencePieceTokenizer:
    file = read_sentencepiece(path)
    pieces = _with_added_tokens(path, file.pieces, config)
    adds_bos = config.get("add_bos_token", True) is not False
    prefix = config.get("add_prefix_space")
    options = SentencePieceOptions(
        bos_id=file.bos_id if adds_bos else None,
        eos_id=file.eos_id if config.get("add_eos_token") else None,
        add_space_prefix=file.add_space_prefix if prefix is None else bool(prefix),
        space_after_marks=config.get("legacy") is not False,
    )
    return SentencePieceTokenizer(str(path), pieces, options)


def _with_added_tokens(
    path: Path, pieces: tuple[ScoredPiece, ...], config: dict[str, Any]
) -> list[ScoredPiece]:
    result = list(pieces)
    added = config.get("added_tokens_decoder")
    entries = added.items() if isinstance(added, dict) else ()
    for key, token in sorted(entries, key=lambda entry: int(entry[0])):
        token_id = int(key)
        if not isinstance(token, dict):
            raise ModelError(f"{path}: the added token {token_id} is not an object")
        # Ids are positions in the list of pieces.
        if token_id > len(result):
            raise ModelError(f"{path}: added tokens leave a gap before id {token_id}")
        kind = CONTROL if token.get("special") else USER_DEFINED
        text = str(token.get("content"))
        # The file's control, unknown and byte pieces retain their type.
        if token_id < len(pieces) and pieces[token_id].kind not in (NORMAL, USER_DEFINED):
            kind = pieces[token_id].kind
        piece = ScoredPiece(text, 0.0, kind, bool(token.get("lstrip")), bool(token.get("rstrip")))
        result[token_id : token_id + 1] = [piece]
    return result
