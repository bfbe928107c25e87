"""What a checkpoint says about its text: context length, end tokens, chat template.

Read before the engine starts, because the engine's configuration depends on it; it costs some
60 ms for the default model. Building the tokenizer itself (`tokenizer.build_tokenizer`) comes
after, beside the start of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from worker.errors import ModelError
from worker.models.gguf import GgufFile

CHATML_END_OF_TEXT = "<|endoftext|>"
_CHATML_MARK = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The text side of one checkpoint. `eos_token_ids` ends a sequence, the first one being the
    model's own; `chat_template` None means that the model is not a chat model.

    `gguf_metadata` is set for GGUF files only; a directory is read again by the tokenizer.
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


def read_checkpoint(path: Path) -> Checkpoint:
    """Describe a GGUF file or a Hugging Face directory; raise `ModelError` saying what is wrong."""
    if path.is_dir():
        return _from_directory(path)
    if not path.exists():
        raise ModelError(f"{path}: no such model file or directory")
    return _from_gguf(path)


def _from_gguf(path: Path) -> Checkpoint:
    file = GgufFile.open(path)
    metadata = file.metadata
    architecture = file.architecture
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{path}: tokenizer.ggml.tokens is missing")
    context_length = metadata.get(f"{architecture}.context_length")
    if not isinstance(context_length, int):
        raise ModelError(f"{path}: {architecture}.context_length is missing")
    template = metadata.get("tokenizer.chat_template")
    eos = _known_id(metadata.get("tokenizer.ggml.eos_token_id"), tokens)
    bos = _known_id(metadata.get("tokenizer.ggml.bos_token_id"), tokens)
    end_of_turn = _known_id(metadata.get("tokenizer.ggml.eot_token_id"), tokens)
    chatml = _chatml_end_id(template, tokens)
    eos_ids = [i for i in (eos, end_of_turn, chatml) if i is not None]
    return Checkpoint(
        path=path,
        name=served_name(path),
        context_length=context_length,
        vocab_size=int(metadata.get(f"{architecture}.vocab_size", len(tokens))),
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        chat_template=template,
        bos_token="" if bos is None else tokens[bos],
        eos_token="" if eos is None else tokens[eos],
        gguf_metadata=metadata,
    )


def _known_id(value: object, tokens: list[str]) -> int | None:
    return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _chatml_end_id(template: str | None, tokens: list[str]) -> int | None:
    """ChatML models end a document with `<|endoftext|>` besides ending turns with their eos."""
    if template is None or _CHATML_MARK not in template:
        return None
    try:
        return tokens.index(CHATML_END_OF_TEXT)
    except ValueError:
        return None


def _from_directory(path: Path) -> Checkpoint:
    config = _read_json(path / "config.json", required=True)
    tokenizer_config = _read_json(path / "tokenizer_config.json", required=False)
    generation = _read_json(path / "generation_config.json", required=False)
    added = _added_token_ids(path / "tokenizer.json")
    template = _directory_template(path, tokenizer_config)
    eos_token = _token_text(tokenizer_config.get("eos_token"))
    ids = [*_id_list(config.get("eos_token_id")), *_id_list(generation.get("eos_token_id"))]
    if eos_token in added:
        ids.append(added[eos_token])
    if template is not None and _CHATML_MARK in template and CHATML_END_OF_TEXT in added:
        ids.append(added[CHATML_END_OF_TEXT])
    return Checkpoint(
        path=path,
        name=served_name(path),
        context_length=_config_int(path, config, "max_position_embeddings"),
        vocab_size=_config_int(path, config, "vocab_size"),
        eos_token_ids=tuple(dict.fromkeys(ids)),
        chat_template=template,
        bos_token=_token_text(tokenizer_config.get("bos_token")),
        eos_token=eos_token,
    )


def _config_int(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ModelError(f"{path / 'config.json'}: {key} is missing or not an integer")
    return value


def _id_list(value: object) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [i for i in value if isinstance(i, int)] if isinstance(value, list) else []


def _token_text(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _directory_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """`chat_template.jinja` wins over `tokenizer_config.json`, as Hugging Face reads them."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ModelError(f"{path}: missing; is {path.parent} a Hugging Face model directory?")
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: not a JSON object: {error}") from error


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _added_token_ids(path: Path) -> dict[str, int]:
    if not path.is_file():
        raise ModelError(f"{path}: missing; a directory needs its tokenizer.json")
    try:
        parsed = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    return {token.content: token.id for token in parsed.added_tokens}


def served_name(path: Path) -> str:
    """The name a model is served under unless one is given: the file's stem without its
    quantisation, or the directory's name.
    """
    if path.suffix.lower() != ".gguf":
        return path.resolve().name
    stem, dot, quantisation = path.stem.rpartition(".")
    looks_quantised = quantisation[:1].upper() in {"Q", "F", "I", "B"} and any(
        c.isdigit() for c in quantisation
    )
    return stem if dot and looks_quantised else path.stem
