"""The text settings of a checkpoint, which the engine's configuration depends on."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from worker.errors import ModelError
from worker.models.config import (
    check_architecture,
    gguf_context_length,
    gguf_fields,
    hf_context_length,
)
from worker.models.fields import Fields, read_json
from worker.models.gguf import GgufFile

CHATML_END_OF_TEXT = "<|endoftext|>"
_CHATML_MARK = "<|im_end|>"
# Tokens with which chat models end a turn or a document. GGUF files name one of them as their eos;
# most converters leave the others out, and llama.cpp recognises them by these texts.
_ENDS_OF_TURNS = frozenset(
    {
        *(_CHATML_MARK, CHATML_END_OF_TEXT, "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>"),
        *("<|end|>", "<|return|>", "<|call|>", "<|end_of_text|>", "<|end_of_turn|>", "<EOT>"),
        *("_<EOT>", "[EOT]", "[EOS]", "<end_of_turn>", "<end_of_utterance>"),
        *("<|END_OF_TURN_TOKEN|>", "<\uff5cend▁of▁sentence\uff5c>"),
    }
)
# In a model with the second token, the first ends a message within its turn, not the turn.
_END_OF_MESSAGE, _END_BEHIND_MESSAGES = "<|end|>", "<|return|>"
_KINDS = "tokenizer.ggml.token_type"
_NORMAL, _CONTROL = 1, 3
_MARKED_KINDS = (_CONTROL, 4)  # control, defined by the user

# The sampling defaults that newer GGUF files carry, by their `generation_config.json` names.
_GGUF_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The text side of one checkpoint. `eos_token_ids` are all below `vocab_size`, the number of
    embeddings; the first is the model's own. `chat_template` None: not a chat model.

    `generation_config` holds the non-null keys of `generation_config.json`, in the directory or
    next to a GGUF file, whose own metadata take precedence. `special_tokens` maps the names in
    templates to texts. `gguf_metadata` is set for GGUF files only, `tokenizer_config` for
    directories.
    """

    path: Path
    name: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    bos_token: str
    eos_token: str
    gguf_metadata: dict[str, Any] | None = field(default=None, repr=False)
    bos_token_id: int | None = None
    tool_chat_template: str | None = None
    hidden_size: int | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] | None = field(default=None, repr=False)


def read_checkpoint(path: Path, *, any_architecture: bool = False) -> Checkpoint:
    """Describe a GGUF file or a Hugging Face directory; raise `ModelError` saying what is wrong."""
    if path.is_dir():
        return _from_directory(path, any_architecture)
    if not path.exists():
        raise ModelError(f"{path}: no such model file or directory")
    return _from_gguf(path, any_architecture)


def _from_gguf(path: Path, any_architecture: bool) -> Checkpoint:
    file = GgufFile.open(path)
    metadata = file.metadata
    architecture = file.architecture
    # Before any other key, which another architecture may lack.
    if not any_architecture:
        check_architecture(str(path), architecture)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or set(map(type, tokens)) != {str}:
        raise ModelError(f"{path}: tokenizer.ggml.tokens is missing, or not a list of texts")
    template = _gguf_template(file, "tokenizer.chat_template")
    metadata = _with_marked_ends(tokens, metadata, template or "")
    keys = ("bos", "eos", "unknown", "padding", "eot", "eom")
    named = {key: _known_id(metadata.get(f"tokenizer.ggml.{key}_token_id"), tokens) for key in keys}
    ends = [
        *(i for i in (named["eos"], named["eot"], named["eom"]) if i is not None),
        *_id_list(metadata.get("tokenizer.ggml.eos_token_ids")),
        *(() if template is None else _ends_by_text(tokens, metadata)),
    ]
    # Tensors state sizes more reliably than older metadata.
    embedding = file.tensors.get("token_embd.weight")
    shape = () if embedding is None else embedding.shape
    fields = gguf_fields(str(path), architecture, metadata)
    vocab_size = shape[0] if shape else fields.number("vocab_size", int, len(tokens))
    texts = {
        f"{key[:3]}_token": tokens[named_id]  # as directories abbreviate them
        for key, named_id in named.items()
        if named_id is not None and key not in ("eot", "eom")
    }
    return Checkpoint(
        path=path,
        name=served_name(path),
        context_length=gguf_context_length(str(path), architecture, metadata),
        vocab_size=vocab_size,
        eos_token_ids=_embedded(ends, vocab_size),
        chat_template=template,
        bos_token=texts.get("bos_token", ""),
        eos_token=texts.get("eos_token", ""),
        gguf_metadata=metadata,
        bos_token_id=named["bos"],
        tool_chat_template=_gguf_template(file, "tokenizer.chat_template.tool_use"),
        hidden_size=shape[1] if len(shape) > 1 else None,
        special_tokens=texts,
        generation_config=_read_generation_config(path.parent)
        | {
            name: metadata[f"general.sampling.{key}"]
            for name, key in _GGUF_SAMPLING.items()
            if f"general.sampling.{key}" in metadata
        },
    )


def _read_generation_config(folder: Path) -> dict[str, Any]:
    stated = read_json(folder / "generation_config.json", required=False)
    return {name: value for name, value in stated.items() if value is not None}


def _gguf_template(file: GgufFile, key: str) -> str | None:
    template = file.metadata.get(key)
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{file.path}: {key} is not a text")
    return template


def _embedded(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Return the ids with an embedding; other end tokens that files list are never drawn."""
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))


def _known_id(value: object, tokens: list[str]) -> int | None:
    return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _with_marked_ends(tokens: list[str], metadata: dict[str, Any], template: str) -> dict[str, Any]:
    """Mark ends of turns as control tokens, where a converter has marked them as plain text."""
    kinds = metadata.get(_KINDS)
    named = {text for text in _ENDS_OF_TURNS if text in template}
    if not named or not isinstance(kinds, list) or len(kinds) != len(tokens):
        return metadata
    pairs = zip(tokens, kinds, strict=True)
    marked = [_CONTROL if kind == _NORMAL and text in named else kind for text, kind in pairs]
    return {**metadata, _KINDS: marked}


def _ends_by_text(tokens: list[str], metadata: dict[str, Any]) -> list[int]:
    """Find end tokens by text; if there are types, only control and user-defined tokens count."""
    kinds = metadata.get(_KINDS)
    marked = kinds if isinstance(kinds, list) and len(kinds) == len(tokens) else None
    found = {
        text: i
        for i, text in enumerate(tokens)
        if text in _ENDS_OF_TURNS and (marked is None or marked[i] in _MARKED_KINDS)
    }
    if _END_BEHIND_MESSAGES in found:
        found.pop(_END_OF_MESSAGE, None)
    return list(found.values())


def _from_directory(path: Path, any_architecture: bool) -> Checkpoint:
    config = read_json(path / "config.json")
    if not any_architecture:
        check_architecture(str(path / "config.json"), config.get("model_type"))
    tokenizer_config = _tokenizer_config(path)
    generation = _read_generation_config(path)
    added = _added_token_ids(path, tokenizer_config)
    template = _directory_template(path, tokenizer_config, "default")
    texts = _special_tokens(tokenizer_config)
    eos_token = texts.get("eos_token", "")
    begins, ids = (
        [*_id_list(config.get(key)), *_id_list(generation.get(key))]
        for key in ("bos_token_id", "eos_token_id")
    )
    if eos_token in added:
        ids.append(added[eos_token])
    if template is not None and _CHATML_MARK in template and CHATML_END_OF_TEXT in added:
        ids.append(added[CHATML_END_OF_TEXT])
    vocab_size = Fields(str(path / "config.json"), config).number("vocab_size", int)
    return Checkpoint(
        path=path,
        name=served_name(path),
        context_length=hf_context_length(str(path / "config.json"), config),
        vocab_size=vocab_size,
        eos_token_ids=_embedded(ids, vocab_size),
        chat_template=template,
        bos_token=texts.get("bos_token", ""),
        eos_token=eos_token,
        bos_token_id=next(iter(begins), added.get(texts.get("bos_token", ""))),
        tool_chat_template=_directory_template(path, tokenizer_config, "tool_use"),
        hidden_size=size if isinstance(size := config.get("hidden_size"), int) else None,
        special_tokens=texts,
        generation_config=generation,
        tokenizer_config=tokenizer_config,
    )


def _tokenizer_config(path: Path) -> dict[str, Any]:
    """Read `tokenizer_config.json` and, if it adds no tokens, also older directories' files."""
    stated = read_json(path / "tokenizer_config.json", required=False)
    if "added_tokens_decoder" in stated:
        return stated
    stated |= read_json(path / "special_tokens_map.json", required=False)
    added = read_json(path / "added_tokens.json", required=False)
    others = stated.get("additional_special_tokens")
    special = {*_special_tokens(stated).values()}
    special.update(map(_token_text, others if isinstance(others, list) else ()))
    if added:
        stated["added_tokens_decoder"] = {
            str(token_id): {"content": text, "special": text in special}
            for text, token_id in added.items()
        }
    return stated


def _id_list(value: object) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [i for i in value if isinstance(i, int)] if isinstance(value, list) else []


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    found = {
        key: _token_text(value)
        for key, value in tokenizer_config.items()
        if key.endswith("_token") and not isinstance(value, bool)
    }
    return {key: text for key, text in found.items() if text}


def _token_text(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _directory_template(path: Path, tokenizer_config: dict[str, Any], name: str) -> str | None:
    """Return a template: from its file, else `tokenizer_config.json`, else `chat_template.json`."""
    main = path / "chat_template.jinja"
    file = main if name == "default" else path / "additional_chat_templates" / f"{name}.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file}: cannot be read: {error}") from error
    template = tokenizer_config.get("chat_template")
    if template is None:
        older = read_json(path / "chat_template.json", required=False)
        template = older.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get(name)
    elif name != "default":
        return None
    return template if isinstance(template, str) else None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _added_token_ids(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, int]:
    described = path / "tokenizer.json"
    if described.is_file():
        try:
            parsed = msgspec.json.decode(described.read_bytes(), type=_TokenizerFile)
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            raise ModelError(f"{described}: cannot be read: {error}") from error
        return {token.content: token.id for token in parsed.added_tokens}
    if not (path / "tokenizer.model").is_file():
        raise ModelError(
            f"{described}: missing; a directory needs its tokenizer.json (or a SentencePiece"
            " tokenizer.model)"
        )
    stated = tokenizer_config.get("added_tokens_decoder", {})
    if not isinstance(stated, dict) or not all(key.isdecimal() for key in stated):
        raise ModelError(
            f"{path / 'tokenizer_config.json'}: added_tokens_decoder is not an object of ids"
        )
    return {_token_text(token): int(key) for key, token in stated.items()}


def served_name(path: Path) -> str:
    if path.suffix.lower() != ".gguf":
        return path.resolve().name
    stem, dot, quantisation = path.stem.rpartition(".")
    # As in Q4_K_M, F16, IQ4_XS and BF16.
    looks_quantised = quantisation[:1].upper() in {"Q", "F", "I", "B"} and any(
        c.isdigit() for c in quantisation
    )
    return stem if dot and looks_quantised else path.stem
