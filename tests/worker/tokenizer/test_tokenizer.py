"""Tokenizers rebuilt from GGUF metadata and from tokenizer.json give the models' own ids."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.errors import ModelError
from worker.tokenizer import pretokenize
from worker.tokenizer.chat import chat_template_of
from worker.tokenizer.checkpoint import Checkpoint, read_checkpoint, served_name
from worker.tokenizer.detokenize import decode
from worker.tokenizer.rust import LibraryTokenizer, byte_level_bytes
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


def test_offsets_say_where_tokens_come_from() -> None:
    """Characters of the text, nothing for what is added, and the same for parts of a character."""
    tokenizer = build_tokenizer(
        checkpoint(add_bos_token=True, add_eos_token=True, eos_token_id=END)
    )
    ids, offsets = tokenizer.encode_with_offsets("abc 1<|end|>a", add_special_tokens=True)
    assert ids == tokenizer.encode("abc 1<|end|>a", add_special_tokens=True)
    assert [TOKENS[i] for i in ids] == ["<|end|>", "abc", "Ġ", "1", "<|end|>", "a", "<|end|>"]
    assert offsets == [(0, 0), (0, 3), (3, 4), (4, 5), (5, 12), (12, 13), (0, 0)]


def test_a_tokenizer_knows_its_size_and_decodes_whole_texts() -> None:
    """Added tokens count; control tokens are skipped on demand; no blanks come between them."""
    tokenizer = build_tokenizer(checkpoint())
    assert tokenizer.vocab_size == len(TOKENS)
    assert not tokenizer.strips_leading_space
    ids = [END, END, TOKENS.index("Ġa"), USER]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|end|><|end|> a<user>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == " a<user>"
    assert (tokenizer.token_text(-1), tokenizer.token_bytes(-1)) == ("", b"")


@pytest.mark.parametrize(
    ("pre", "reference"), [("qwen2", "Qwen2Tokenizer"), ("gpt-2", "GPT2Tokenizer")]
)
@given(text=st.text("ab'sTLL 019\n\téé́٣🙂.,", max_size=20) | st.text(max_size=12))
@settings(max_examples=80, deadline=None)
def test_words_are_cut_as_transformers_cuts_them(pre: str, reference: str, text: str) -> None:
    """The named rules are those of the models' own tokenizers."""
    theirs = getattr(transformers, reference)().backend_tokenizer
    rule = pretokenize.by_name(pre)
    assert rule is not None
    normalizer = rule.normalizer()
    cut = text if normalizer is None else normalizer.normalize_str(text)
    expected = text if theirs.normalizer is None else theirs.normalizer.normalize_str(text)
    assert rule.pre_tokenizer().pre_tokenize_str(cut) == (
        theirs.pre_tokenizer.pre_tokenize_str(expected)
    )


@pytest.mark.parametrize("pre", pretokenize.NAMES)
@given(text=st.text(max_size=20))
@settings(max_examples=15, deadline=None)
def test_no_rule_loses_text(pre: str, text: str) -> None:
    """Cut by any rule, the pieces are the text again, once it is composed."""
    rule = pretokenize.by_name(pre)
    assert rule is not None
    composed = unicodedata.normalize("NFC", text) if rule.compose else text
    words = rule.pre_tokenizer().pre_tokenize_str(composed)
    assert b"".join(byte_level_bytes(word) for word, _ in words) == composed.encode()


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
@given(st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"]), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_text_survives_the_round_trip(smollm: LibraryTokenizer, text: str) -> None:
    """What is encoded decodes to itself, and the offsets cover it, as far as the vocabulary goes:
    it has no token for some control characters and for a byte of the rarest others.
    """
    ids, offsets = smollm.encode_with_offsets(text, add_special_tokens=False)
    assert smollm.decode(ids, skip_special_tokens=False) == text
    assert "".join(text[a:b] for a, b in dict.fromkeys(offsets)) == text


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


SPM_STEPS = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


@pytest.mark.parametrize(
    ("decoder", "text", "strips"),
    [
        ({"type": "Sequence", "decoders": SPM_STEPS}, b" a\n", True),
        ({"type": "Sequence", "decoders": SPM_STEPS[:3]}, b" a\n", False),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}, b" a<0x0A>", True),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}, b" a<0x0A>", False),
    ],
)
def test_sentencepiece_like_directories_spell_by_their_decoder(
    decoder: dict[str, Any], text: bytes, strips: bool, tmp_path: Path
) -> None:
    """Spaces and bytes of a tokenizer.json are what its decoder makes of the tokens."""
    vocabulary = {"<unk>": 0, "▁a": 1, "<0x0A>": 2}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True}
    folder = write_directory(
        tmp_path, decoder=decoder, model=model, pre_tokenizer=None, added_tokens=[]
    )
    tokenizer = build_tokenizer(read_checkpoint(folder))
    assert tokenizer.token_bytes(1) + tokenizer.token_bytes(2) == text
    assert tokenizer.strips_leading_space is strips
    assert tokenizer.decode([1, 1], skip_special_tokens=False) == " a a"[strips:]


@pytest.mark.parametrize(
    "steps",
    [
        [*SPM_STEPS[:3], {"type": "Strip", "content": " ", "start": 2, "stop": 0}],
        [*SPM_STEPS, {"type": "CTC"}],
        SPM_STEPS[1:],
    ],
)
def test_other_decoders_are_named(steps: list[dict[str, Any]], tmp_path: Path) -> None:
    """A sequence of steps that is not SentencePiece's is refused with its steps."""
    folder = write_directory(tmp_path, decoder={"type": "Sequence", "decoders": steps})
    with pytest.raises(ModelError, match=r"Sequence, .*ByteFallback.* is not supported"):
        build_tokenizer(read_checkpoint(folder))


def test_a_directory_tells_its_defaults(tmp_path: Path) -> None:
    """Sampling defaults, special tokens, and the template for tools come from the files."""
    write_directory(tmp_path)
    change(tmp_path / "generation_config.json", temperature=0.6, top_p=0.9, top_k=None)
    change(tmp_path / "config.json", pad_token_id=5, bos_token_id=None)
    change(
        tmp_path / "tokenizer_config.json",
        bos_token="<|end|>",
        unk_token={"content": "<user>"},
        add_bos_token=True,
        chat_template=[
            {"name": "default", "template": "a"},
            {"name": "tool_use", "template": "b"},
        ],
    )
    found = read_checkpoint(tmp_path)
    assert found.generation_config == {"eos_token_id": [END, 3], "temperature": 0.6, "top_p": 0.9}
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (END, END, 5)
    assert found.special_tokens["unk_token"] == "<user>"
    assert (found.chat_template, found.tool_chat_template) == ("a", "b")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("c")
    (tmp_path / "chat_template.jinja").write_text("d")
    found = read_checkpoint(tmp_path)
    assert (found.chat_template, found.tool_chat_template) == ("d", "c")
    chat = chat_template_of(found, now=datetime.now)
    assert chat is not None
    assert chat.render([], tools=[{}]) == "c"


def test_chatml_models_also_stop_at_the_end_of_a_document(tmp_path: Path) -> None:
    """`<|endoftext|>` ends a sequence of a ChatML model besides its own end token."""
    write_directory(tmp_path)
    described = msgspec.json.decode((tmp_path / "tokenizer.json").read_bytes())
    described["added_tokens"][1]["content"] = "<|endoftext|>"
    change(tmp_path / "tokenizer.json", added_tokens=described["added_tokens"])
    change(tmp_path / "tokenizer_config.json", chat_template="<|im_end|>")
    assert read_checkpoint(tmp_path).eos_token_ids == (END, 3, described["added_tokens"][1]["id"])


def change(path: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | values))


@pytest.mark.model
def test_a_file_tells_its_defaults(model_path: Path, tmp_path: Path) -> None:
    """Sampling defaults come from `general.sampling`, special tokens from their ids."""
    found = read_checkpoint(model_path)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 2, 2)
    assert found.special_tokens["unk_token"] == "<|endoftext|>"
    assert found.generation_config == {}
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_token_list(["a", "b"])
    writer.add_context_length(64)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_checkpoint(tmp_path / "x.gguf")
    assert found.generation_config == {"temperature": 0.5, "top_k": 20}
    assert (found.context_length, found.eos_token_ids, found.bos_token_id) == (128, (), None)
    assert chat_template_of(found, now=datetime.now) is None


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
