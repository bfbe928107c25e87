"""Tokenizers built from GGUF metadata and from tokenizer.json give the models' own ids."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from tests.depth import examples
from worker.errors import ModelError
from worker.tokenizer.checkpoint import Checkpoint, read_checkpoint
from worker.tokenizer.detokenize import decode
from worker.tokenizer.rust import LibraryTokenizer, byte_level_bytes
from worker.tokenizer.tokenizer import PRE_TOKENIZATIONS, build_tokenizer


def spelled(text: str) -> list[str]:
    return [{" ": "Ġ", "\n": "Ċ"}.get(c, c) for c in text]


ALPHABET = spelled(" \nabcdefghijklmnopqrstuvwxyz0123456789'")
MERGES = ["a b", "ab c", "1 2", "12 3", "Ġ a", "Ġ Ġ", "' l", "'l l"]
TOKENS = [*ALPHABET, *(m.replace(" ", "") for m in MERGES), "<|end|>", "<user>"]
END, USER = len(TOKENS) - 2, len(TOKENS) - 1


def checkpoint(**changes: Any) -> Checkpoint:
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
def test_each_named_rule_cuts_text_its_own_way(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(pre, text) == expected


def test_the_prefix_depends_on_the_file_and_the_caller() -> None:
    assert pieces("llama-bpe", "a", add_bos_token=False) == ["a"]
    tokenizer = build_tokenizer(checkpoint(add_bos_token=True))
    assert tokenizer.encode("a", add_special_tokens=True)[0] == END
    assert END not in tokenizer.encode("a", add_special_tokens=False)


def test_control_tokens_are_special_and_user_defined_are_text() -> None:
    tokenizer = build_tokenizer(checkpoint())
    assert tokenizer.special_ids == {END}
    assert tokenizer.token_bytes(USER) == b"<user>"
    assert tokenizer.token_bytes(len(TOKENS) + 7) == b""
    assert tokenizer.token_bytes(TOKENS.index("Ġa")) == b" a"


def test_the_largest_id_decides_the_size_of_a_vocabulary_with_gaps() -> None:
    rust = RustTokenizer(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    assert LibraryTokenizer(rust).vocab_size == 8


def test_offsets_are_ranges_of_characters() -> None:
    tokenizer = build_tokenizer(
        checkpoint(add_bos_token=True, add_eos_token=True, eos_token_id=END)
    )
    ids, offsets = tokenizer.encode_with_offsets("abc 1<|end|>a", add_special_tokens=True)
    assert ids == tokenizer.encode("abc 1<|end|>a", add_special_tokens=True)
    assert [TOKENS[i] for i in ids] == ["<|end|>", "abc", "Ġ", "1", "<|end|>", "a", "<|end|>"]
    assert offsets == [(0, 0), (0, 3), (3, 4), (4, 5), (5, 12), (12, 13), (0, 0)]


def test_a_tokenizer_knows_its_size_and_decodes_whole_texts() -> None:
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
@examples(80)
def test_words_are_cut_as_in_transformers(pre: str, reference: str, text: str) -> None:
    theirs = getattr(transformers, reference)().backend_tokenizer
    rule = PRE_TOKENIZATIONS.get(pre)
    assert rule is not None
    normalizer = rule.normalizer()
    cut = text if normalizer is None else normalizer.normalize_str(text)
    expected = text if theirs.normalizer is None else theirs.normalizer.normalize_str(text)
    assert rule.pre_tokenizer().pre_tokenize_str(cut) == (
        theirs.pre_tokenizer.pre_tokenize_str(expected)
    )


@pytest.mark.parametrize("pre", PRE_TOKENIZATIONS)
@given(text=st.text(max_size=20))
@examples(15)
def test_no_rule_loses_text(pre: str, text: str) -> None:
    rule = PRE_TOKENIZATIONS.get(pre)
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
def test_an_unsupported_or_broken_vocabulary_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        build_tokenizer(checkpoint(**changes))


@pytest.fixture(scope="module")
def smollm(model_path: Path) -> LibraryTokenizer:
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
    """Copies of this tokenizer often fail at blanks before digits."""
    assert smollm.encode(text, add_special_tokens=True) == ids


@pytest.mark.model
@given(st.lists(st.integers(0, 49151), max_size=12) | st.text(max_size=20))
@examples(150)
def test_decoding_matches_the_library(smollm: LibraryTokenizer, given: list[int] | str) -> None:
    ids = smollm.encode(given, add_special_tokens=False) if isinstance(given, str) else given
    text = decode(smollm.token_bytes, ids)
    assert text == smollm._rust.decode(ids, skip_special_tokens=False)
    skipped = decode(smollm.token_bytes, ids, smollm.special_ids)
    assert skipped == smollm._rust.decode(ids, skip_special_tokens=True)


@pytest.mark.model
@given(st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"]), max_size=40))
@examples(150)
def test_any_text_survives_the_round_trip(smollm: LibraryTokenizer, text: str) -> None:
    """Excluded are the characters for which the vocabulary lacks tokens."""
    ids, offsets = smollm.encode_with_offsets(text, add_special_tokens=False)
    assert smollm.decode(ids, skip_special_tokens=False) == text
    assert offsets == sorted(offsets)
    assert {place for span in offsets for place in range(*span)} == set(range(len(text)))


@pytest.mark.model
def test_the_default_checkpoint_describes_itself(model_path: Path) -> None:
    found = read_checkpoint(model_path)
    assert (found.context_length, found.vocab_size, found.eos_token_ids) == (8192, 49152, (2, 0))
    assert found.chat_template is not None
    assert "<|im_start|>" in found.chat_template
    assert (found.bos_token, found.eos_token) == ("<|im_start|>", "<|im_end|>")
