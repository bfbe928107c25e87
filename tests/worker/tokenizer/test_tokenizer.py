"""Tokenizers rebuilt from GGUF metadata and from tokenizer.json give the models' own ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.errors import ModelError
from worker.tokenizer.checkpoint import Checkpoint, read_checkpoint, served_name
from worker.tokenizer.detokenize import decode
from worker.tokenizer.rust import LibraryTokenizer
from worker.tokenizer.tokenizer import build_tokenizer


def spelled(text: str) -> list[str]:
    """Every byte of a text in GPT-2's spelling, for the ASCII letters, digits and blanks."""
    return [{" ": "Ġ", "\n": "Ċ"}.get(c, c) for c in text]


ALPHABET = spelled(" \nabcdefghijklmnopqrstuvwxyz0123456789'")
MERGES = ["a b", "ab c", "1 2", "12 3", "Ġ a", "Ġ Ġ", "' l", "'l l"]
TOKENS = [*ALPHABET, *(m.replace(" ", "") for m in MERGES), "<|end|>", "<user>"]
END, USER = len(TOKENS) - 2, len(TOKENS) - 1


def checkpoint(**changes: Any) -> Checkpoint:
    """A small GGUF-like checkpoint; changes are metadata keys without their prefix."""
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [*[1] * (len(TOKENS) - 2), 3, 4],
        "tokenizer.ggml.bos_token_id": END,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Checkpoint(Path("x.gguf"), "x", 64, len(TOKENS), (END,), None, "", "", metadata)


def pieces(pre: str, text: str, **changes: Any) -> list[str]:
    """The tokens of a text under one pre-tokenizer."""
    tokenizer = build_tokenizer(checkpoint(pre=pre, **changes))
    return [TOKENS[i] for i in tokenizer.encode(text, add_special_tokens=True)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "abc123", ["abc", "1", "2", "3"]),
        ("smollm", "  1", ["ĠĠ", "1"]),
        ("gpt-2", "abc123", ["abc", "123"]),
        ("gpt-2", "  1", ["Ġ", "Ġ", "1"]),
        ("default", "a'll", ["a", "'", "l", "l"]),
        ("default", "123", ["123"]),
        ("default", "1231", ["123", "1"]),
        ("starcoder", "  1", ["ĠĠ", "1"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("llama-bpe", "12312", ["<|end|>", "123", "12"]),
        ("smollm", "a<|end|>b<user>", ["a", "<|end|>", "b", "<user>"]),
    ],
)
def test_each_pre_name_cuts_text_its_own_way(pre: str, text: str, expected: list[str]) -> None:
    """Digits and blanks go where the named pre-tokenizer puts them; only llama has a prefix."""
    assert pieces(pre, text) == expected


def test_the_prefix_can_be_asked_for_and_left_out() -> None:
    """`add_bos_token` decides whether special tokens are added, the caller whether they are."""
    assert pieces("llama-bpe", "a", add_bos_token=False) == ["a"]
    tokenizer = build_tokenizer(checkpoint(add_bos_token=True))
    assert tokenizer.encode("a", add_special_tokens=True)[0] == END
    assert END not in tokenizer.encode("a", add_special_tokens=False)


def test_control_tokens_are_special_and_user_defined_are_text() -> None:
    """Only control tokens are left out of the output."""
    tokenizer = build_tokenizer(checkpoint())
    assert tokenizer.special_ids == {END}
    assert tokenizer.token_bytes(USER) == b"<user>"
    assert tokenizer.token_bytes(len(TOKENS) + 7) == b""
    assert tokenizer.token_bytes(TOKENS.index("Ġa")) == b" a"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "llama"}, "scores"),
        ({"model": "bert"}, "WordPiece"),
        ({"model": "t5"}, "Unigram"),
        ({"pre": "deepseek-coder"}, "deepseek-coder"),
        ({"merges": ["q zz"]}, "merges"),
    ],
)
def test_what_cannot_be_rebuilt_is_named(changes: dict[str, Any], named: str) -> None:
    """An unsupported or broken vocabulary is a ModelError that says which."""
    with pytest.raises(ModelError, match=named):
        build_tokenizer(checkpoint(**changes))


@pytest.fixture(scope="module")
def smollm(model_path: Path) -> LibraryTokenizer:
    """The default model's tokenizer."""
    return build_tokenizer(read_checkpoint(model_path))


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("  123", [256, 33, 34, 35]),
        ("a  12b", [81, 256, 33, 34, 82]),
        ("foo\n\n12", [15236, 1116, 33, 34]),
        ("tab\t\t9", [15999, 1656, 41]),
        ("<|im_end|>", [2]),
        ("", []),
    ],
)
def test_the_default_model_has_its_published_ids(
    smollm: LibraryTokenizer, text: str, ids: list[int]
) -> None:
    """Blanks before digits are where copies of this tokenizer go wrong."""
    assert smollm.encode(text, add_special_tokens=True) == ids


@pytest.mark.model
@given(st.lists(st.integers(0, 49151), max_size=12) | st.text(max_size=20))
@settings(max_examples=150, deadline=None)
def test_decoding_is_the_librarys(smollm: LibraryTokenizer, given: list[int] | str) -> None:
    """Joining the bytes of tokens is what the Rust library does, for any ids and any text."""
    ids = smollm.encode(given, add_special_tokens=False) if isinstance(given, str) else given
    text = decode(smollm.token_bytes, ids)
    assert text == smollm._rust.decode(ids, skip_special_tokens=False)
    skipped = decode(smollm.token_bytes, ids, smollm.special_ids)
    assert skipped == smollm._rust.decode(ids, skip_special_tokens=True)


@pytest.mark.model
def test_encoding_loses_no_text(smollm: LibraryTokenizer) -> None:
    """Text of the languages the model knows survives the round trip."""
    text = "Schöne Grüße, 你好 — π ≈ 3.14159\n\tdef f(x):  return x  # 🙂"
    assert decode(smollm.token_bytes, smollm.encode(text, add_special_tokens=False)) == text


@pytest.mark.model
def test_the_default_checkpoint_describes_itself(model_path: Path) -> None:
    """Context, end tokens (the turn's and the document's) and template come from the file."""
    found = read_checkpoint(model_path)
    assert (found.context_length, found.vocab_size, found.eos_token_ids) == (8192, 49152, (2, 0))
    assert found.chat_template is not None
    assert "<|im_start|>" in found.chat_template
    assert (found.bos_token, found.eos_token) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("a/b.BF16.gguf", "b"),
        ("model-v1.5.gguf", "model-v1.5"),
        ("plain.gguf", "plain"),
        ("/models/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
    ],
)
def test_the_served_name_leaves_the_quantisation_out(path: str, name: str) -> None:
    """A model is called by its file without the encoding, or by its directory."""
    assert served_name(Path(path)) == name


def write_directory(folder: Path, **tokenizer: Any) -> Path:
    """A Hugging Face directory with the small vocabulary."""
    rust = build_tokenizer(checkpoint())._rust
    described = msgspec.json.decode(rust.to_str()) | tokenizer
    files: dict[str, Any] = {
        "config.json": {"max_position_embeddings": 32, "vocab_size": 60, "eos_token_id": END},
        "generation_config.json": {"eos_token_id": [END, 3]},
        "tokenizer_config.json": {
            "eos_token": {"content": "<|end|>"},
            "chat_template": [{"name": "default", "template": "hello"}],
        },
        "tokenizer.json": described,
    }
    for name, content in files.items():
        (folder / name).write_bytes(msgspec.json.encode(content))
    return folder


def test_a_directory_is_read_like_a_file(tmp_path: Path) -> None:
    """tokenizer.json and the configs beside it give what GGUF metadata gives."""
    found = read_checkpoint(write_directory(tmp_path))
    assert (found.context_length, found.vocab_size, found.eos_token_ids) == (32, 60, (END, 3))
    assert (found.eos_token, found.chat_template) == ("<|end|>", "hello")
    from_file = build_tokenizer(checkpoint())
    text = "  12 abc<|end|>a"
    assert build_tokenizer(found).encode(text, add_special_tokens=True) == from_file.encode(
        text, add_special_tokens=True
    )


def test_a_directory_whose_text_cannot_be_rebuilt_is_named(tmp_path: Path) -> None:
    """A tokenizer.json with another decoder is refused with that decoder's name."""
    folder = write_directory(tmp_path, decoder={"type": "WordPiece", "prefix": "##"})
    with pytest.raises(ModelError, match="WordPiece"):
        build_tokenizer(read_checkpoint(folder))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    """A directory without a needed file says which."""
    write_directory(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError, match=missing):
        read_checkpoint(tmp_path)


def test_no_such_model_is_an_error(tmp_path: Path) -> None:
    """A path that leads nowhere is a ModelError with the path."""
    with pytest.raises(ModelError, match="no such model"):
        read_checkpoint(tmp_path / "gone.gguf")
    broken = replace(checkpoint(), gguf_metadata=None, path=tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        build_tokenizer(broken)
