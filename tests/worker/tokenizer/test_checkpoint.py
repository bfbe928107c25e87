"""End tokens, templates, defaults and names of checkpoints of both formats are read, or refused."""

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest

from worker.errors import ModelError
from worker.models.config import SUPPORTED_ARCHITECTURES
from worker.tokenizer.chat import chat_template_of
from worker.tokenizer.checkpoint import Checkpoint, read_checkpoint, served_name
from worker.tokenizer.tokenizer import build_tokenizer

TOKENS = ["a", "b", "c", "Ġ", "1", "2", "ab", "abc", "<|end|>", "<user>"]
END = TOKENS.index("<|end|>")


def small() -> Checkpoint:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.token_type": [*[1] * (len(TOKENS) - 2), 3, 4],
        "tokenizer.ggml.bos_token_id": END,
    }
    return Checkpoint(Path("x.gguf"), "x", 64, len(TOKENS), (END,), None, "", "", metadata)


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
def test_the_served_name_omits_the_quantisation(path: str, name: str) -> None:
    assert served_name(Path(path)) == name


CONFIG = {"model_type": "llama", "max_position_embeddings": 32, "vocab_size": 60}


def write_directory(folder: Path, **tokenizer: Any) -> Path:
    rust = build_tokenizer(small())._rust
    described = msgspec.json.decode(rust.to_str()) | tokenizer
    files: dict[str, Any] = {
        "config.json": {**CONFIG, "eos_token_id": END},
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


KEY = "tokenizer.ggml."


def write_file(
    folder: Path, metadata: dict[str, Any], num_embeddings: int = 0, architecture: str = "llama"
) -> Path:
    path = folder / "x.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {f"{architecture}.context_length": 64, **metadata}.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    if num_embeddings:
        writer.add_tensor("token_embd.weight", np.zeros((num_embeddings, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_directory_is_read_like_a_file(tmp_path: Path) -> None:
    found = read_checkpoint(write_directory(tmp_path))
    assert (found.context_length, found.vocab_size, found.eos_token_ids) == (32, 60, (END, 3))
    assert (found.eos_token, found.chat_template) == ("<|end|>", "hello")
    from_file = build_tokenizer(small())
    text = "  12 abc<|end|>a"
    ids = build_tokenizer(found).encode(text, add_special_tokens=True)
    assert ids == from_file.encode(text, add_special_tokens=True)


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
        [],
    ],
)
def test_other_decoders_are_named(steps: list[dict[str, Any]], tmp_path: Path) -> None:
    decoder = {"type": "Sequence" if steps else "WordPiece", "decoders": steps}
    folder = write_directory(tmp_path, decoder=decoder)
    named = "Sequence, .*ByteFallback.*" if steps else "WordPiece"
    with pytest.raises(ModelError, match=f"{named} is not supported"):
        build_tokenizer(read_checkpoint(folder))


TEMPLATES = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]


def test_a_directory_has_defaults_special_tokens_and_templates(tmp_path: Path) -> None:
    write_directory(tmp_path)
    change(tmp_path / "generation_config.json", temperature=0.6, top_p=0.9, top_k=None)
    change(tmp_path / "config.json", bos_token_id=None)
    change(
        tmp_path / "tokenizer_config.json",
        bos_token="<|end|>",
        unk_token={"content": "<user>"},
        add_bos_token=True,
        chat_template=TEMPLATES,
    )
    found = read_checkpoint(tmp_path)
    assert found.generation_config == {"eos_token_id": [END, 3], "temperature": 0.6, "top_p": 0.9}
    assert (found.bos_token_id, found.eos_token_ids[0]) == (END, END)
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
    write_directory(tmp_path)
    described = msgspec.json.decode((tmp_path / "tokenizer.json").read_bytes())
    described["added_tokens"][1]["content"] = "<|endoftext|>"
    change(tmp_path / "tokenizer.json", added_tokens=described["added_tokens"])
    change(tmp_path / "tokenizer_config.json", chat_template="<|im_end|>")
    assert read_checkpoint(tmp_path).eos_token_ids == (END, 3, described["added_tokens"][1]["id"])


def change(path: Path, **values: Any) -> None:
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | values))


@pytest.mark.model
def test_a_file_has_defaults_and_special_tokens(model_path: Path, tmp_path: Path) -> None:
    found = read_checkpoint(model_path)
    assert (found.bos_token_id, found.eos_token_ids[0]) == (1, 2)
    assert found.special_tokens["unk_token"] == "<|endoftext|>"
    assert found.generation_config == {}
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    path = write_file(tmp_path, {f"{KEY}tokens": ["a", "b"], **scaling, **sampling})
    found = read_checkpoint(path)
    assert found.generation_config == {"temperature": 0.5, "top_k": 20}
    (tmp_path / "generation_config.json").write_text('{"temperature": 1, "top_p": 0.8, "x": null}')
    beside = read_checkpoint(path).generation_config
    assert beside == {"temperature": 0.5, "top_k": 20, "top_p": 0.8}
    assert (found.context_length, found.eos_token_ids, found.bos_token_id) == (128, (), None)
    assert chat_template_of(found, now=datetime.now) is None


def test_end_tokens_without_an_embedding_are_ignored(tmp_path: Path) -> None:
    """A fine-tune may add such a token, which would index past the logits."""
    change(write_directory(tmp_path) / "config.json", vocab_size=END, eos_token_id=[END, 2, -1])
    assert read_checkpoint(tmp_path).eos_token_ids == (2, 3)


def test_a_files_vocabulary_is_as_large_as_its_embedding(tmp_path: Path) -> None:
    ends = {f"{KEY}eos_token_id": END, f"{KEY}eot_token_id": 2}
    metadata = {f"{KEY}tokens": TOKENS, "llama.vocab_size": len(TOKENS) + 7, **ends}
    found = read_checkpoint(write_file(tmp_path, metadata, num_embeddings=END))
    assert (found.vocab_size, found.eos_token_ids) == (END, (2,))


NORMAL, CONTROL, USER = 1, 3, 4


@pytest.mark.parametrize(
    ("vocabulary", "ends"),
    [
        ({"<|eot_id|>": CONTROL, "<|eom_id|>": CONTROL}, {"<|eot_id|>", "<|eom_id|>"}),
        ({"<|end|>": CONTROL, "<|user|>": CONTROL}, {"<|end|>"}),
        ({"<end_of_turn>": USER, "<start_of_turn>": CONTROL}, {"<end_of_turn>"}),
        ({"<|im_end|>": CONTROL, "<|im_start|>": CONTROL}, {"<|im_end|>"}),
        (
            {"<\uff5cend▁of▁sentence\uff5c>": CONTROL, "<\uff5cfim▁end\uff5c>": CONTROL},
            {"<\uff5cend▁of▁sentence\uff5c>"},
        ),
        ({"<|END_OF_TURN_TOKEN|>": USER, "<EOT>": NORMAL}, {"<|END_OF_TURN_TOKEN|>"}),
        ({"<|return|>": CONTROL, "<|end|>": CONTROL, "<|call|>": USER}, {"<|return|>", "<|call|>"}),
        ({"<|fim_pad|>": CONTROL, "<|file_sep|>": CONTROL, "<|im_end|>": NORMAL}, set()),
    ],
)
def test_end_of_turn_tokens_of_a_file_are_recognised_by_their_texts(
    vocabulary: dict[str, int], ends: set[str], tmp_path: Path
) -> None:
    tokens = ["a", "</s>", *vocabulary]

    kinds = [NORMAL, CONTROL, *vocabulary.values()]
    base = {f"{KEY}tokens": tokens, f"{KEY}token_type": kinds, f"{KEY}eos_token_id": 1}

    def found(**metadata: Any) -> list[str]:
        path = write_file(tmp_path, base | {f"tokenizer.{k}": v for k, v in metadata.items()})
        return [tokens[i] for i in read_checkpoint(path).eos_token_ids]

    first, *others = found(chat_template="{{ messages[0].content }}")
    assert (first, set(others), len(others)) == ("</s>", ends, len(ends))
    assert found() == ["</s>"]
    assert found(**{"ggml.eos_token_ids": [2, 1]}) == ["</s>", tokens[2]]


@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>"])
def test_an_end_of_turn_marked_as_plain_text_is_one_token_and_ends_turns(
    end: str, tmp_path: Path
) -> None:
    letters = sorted(set(f"ab{end}<EOT>") | {"\u0120"})
    tokens = [*letters, "</s>", end, "<EOT>"]
    metadata = {
        f"{KEY}model": "gpt2",
        f"{KEY}pre": "gpt-2",
        f"{KEY}tokens": tokens,
        f"{KEY}token_type": [*[NORMAL] * len(letters), CONTROL, NORMAL, NORMAL],
        f"{KEY}eos_token_id": len(letters),
        "tokenizer.chat_template": "{{ messages[0].content }}" + end,
    }
    found = read_checkpoint(write_file(tmp_path, metadata))
    assert [tokens[i] for i in found.eos_token_ids] == ["</s>", end]
    tokenizer = build_tokenizer(found)
    ids = tokenizer.encode(f"ab{end}<EOT>", add_special_tokens=False)
    assert [tokens[i] for i in ids] == ["a", "b", end, *"<EOT>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<EOT>"


def test_older_conventions_of_directories_are_read(tmp_path: Path) -> None:
    config = write_directory(tmp_path) / "tokenizer_config.json"
    config.write_bytes(b'\xef\xbb\xbf{"eos_token": "<user>"}')
    (tmp_path / "chat_template.json").write_bytes(msgspec.json.encode({"chat_template": TEMPLATES}))
    texts = {"bos_token": "<|end|>", "eos_token": {"content": "<|end|>"}}
    (tmp_path / "special_tokens_map.json").write_bytes(msgspec.json.encode(texts))
    found = read_checkpoint(tmp_path)
    assert (found.bos_token, found.eos_token) == ("<|end|>", "<|end|>")
    assert (found.chat_template, found.tool_chat_template) == ("a", "b")
    config.write_text('{"eos_token": "<user>", "added_tokens_decoder": {}, "chat_template": "c"}')
    found = read_checkpoint(tmp_path)
    assert (found.bos_token, found.eos_token) == ("", "<user>")
    assert (found.chat_template, found.tool_chat_template) == ("c", None)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("gpt2", {"n_positions": 1024, "vocab_size": 50257}),
        ("bert", {"max_position_embeddings": 512, "vocab_size": 30522}),
        ("t5", {"n_positions": 512, "vocab_size": 32128}),
        ("mamba", {"state_size": 16, "vocab_size": 50280}),
        ("gpt_neox", {"max_position_embeddings": 2048, "vocab_size": 50432}),
        ("gemma", {"max_position_embeddings": 8192, "vocab_size": 256000}),
        (None, {"max_position_embeddings": 32, "vocab_size": 60}),
    ],
)
def test_a_directory_of_another_architecture_is_refused_by_name(
    tmp_path: Path, model_type: str | None, sizes: dict[str, int]
) -> None:
    """The check comes before any key that such a model may lack."""
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"model_type": model_type, **sizes}))
    with pytest.raises(ModelError) as caught:
        read_checkpoint(tmp_path)
    known = f"(supported: {', '.join(SUPPORTED_ARCHITECTURES)})"
    reason = f"architecture {model_type!r} is not supported {known}"
    assert str(caught.value) == f"{tmp_path}/config.json: {reason}"


@pytest.mark.parametrize("architecture", ["gpt2", "bert", "t5", "mamba", "gptneox", "gemma"])
def test_a_file_of_another_architecture_is_refused_by_name(
    tmp_path: Path, architecture: str
) -> None:
    path = write_file(tmp_path, {}, architecture=architecture)
    with pytest.raises(ModelError, match=f"'{architecture}' is not supported .*llama, mistral"):
        read_checkpoint(path)


def test_the_simulator_reads_the_text_of_any_architecture(tmp_path: Path) -> None:
    change(write_directory(tmp_path) / "config.json", model_type="gpt_neox")
    assert read_checkpoint(tmp_path, any_architecture=True).context_length == 32


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write_directory(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError, match=missing):
        read_checkpoint(tmp_path)


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model"):
        read_checkpoint(tmp_path / "gone.gguf")
    broken = replace(small(), gguf_metadata=None, path=tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        build_tokenizer(broken)


MERGED = {f"{KEY}model": "gpt2", f"{KEY}tokens": ["a", "b", "ab", "x y:1", "$A"]}
SCORED = {f"{KEY}model": "llama", f"{KEY}tokens": ["<unk>", "a"], f"{KEY}scores": [0.0, -1.0]}


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (MERGED, f"{KEY}tokens", [1, 2]),
        (MERGED, f"{KEY}merges", [5, 6]),
        (MERGED, f"{KEY}merges", "a b"),
        (MERGED, f"{KEY}token_type", ["x"] * 5),
        (MERGED, f"{KEY}token_type", 3),
        (MERGED, "llama.vocab_size", "zz"),
        (MERGED, "tokenizer.chat_template", 3),
        (MERGED, "tokenizer.chat_template.tool_use", 3),
        (SCORED, f"{KEY}scores", ["x", "y"]),
        (SCORED, f"{KEY}token_type", 3),
    ],
)
def test_a_key_of_the_wrong_type_is_named(
    base: dict[str, Any], key: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=key.removeprefix("llama.")):
        build_tokenizer(read_checkpoint(write_file(tmp_path, {**base, key: value})))


@pytest.mark.parametrize("bos", [3, 4])
def test_a_begin_token_may_have_any_text(bos: int, tmp_path: Path) -> None:
    """The library would parse a blank, colon or dollar in it as template syntax."""
    added = {f"{KEY}bos_token_id": bos, f"{KEY}add_bos_token": True, f"{KEY}merges": ["a b"]}
    built = build_tokenizer(read_checkpoint(write_file(tmp_path, {**MERGED, **added})))
    assert built.encode("ab", add_special_tokens=True) == [bos, 2]


NESTED = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"{name}.json", NESTED) for name in ("config", "tokenizer", "tokenizer_config")),
        ("generation_config.json", NESTED),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_file_of_a_directory_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(name)):
        read_checkpoint(tmp_path)
