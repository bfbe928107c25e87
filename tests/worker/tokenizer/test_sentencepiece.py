"""SentencePiece vocabularies encode as in the sentencepiece library."""

import io
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.errors import ModelError
from worker.tokenizer.checkpoint import Checkpoint, read_checkpoint
from worker.tokenizer.detokenize import Detokenizer
from worker.tokenizer.sentencepiece import (
    BYTE,
    CONTROL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    ScoredPiece,
    SentencePieceOptions,
    SentencePieceTokenizer,
    read_sentencepiece,
)
from worker.tokenizer.tokenizer import Tokenizer, build_tokenizer

spm = pytest.importorskip("sentencepiece")

BYTES = [ScoredPiece(f"<0x{b:02X}>", 0.0, BYTE) for b in range(256)]
HEAD = [
    ScoredPiece("<unk>", 0.0, UNKNOWN),
    ScoredPiece("<s>", 0.0, CONTROL),
    ScoredPiece("</s>", 0.0, CONTROL),
]
BOS, EOS = 1, 2


def tokenizer(
    *pieces: ScoredPiece, options: SentencePieceOptions | None = None, byte_pieces: bool = True
) -> SentencePieceTokenizer:
    scored = [ScoredPiece(p.text, p.score or -float(n), p.kind) for n, p in enumerate(pieces)]
    return SentencePieceTokenizer(
        "x.gguf", [*HEAD, *(BYTES if byte_pieces else []), *scored], options
    )


def spelled(built: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[str]:
    return [built.token_text(i) for i in built.encode(text, add_special_tokens=add_special_tokens)]


LETTERS = [ScoredPiece(c, -100.0) for c in "▁abc"]


@pytest.mark.parametrize(
    ("pieces", "text", "expected"),
    [
        ([ScoredPiece("ab"), ScoredPiece("bc"), *LETTERS], "abc", ["▁", "ab", "c"]),
        ([ScoredPiece("bc"), ScoredPiece("ab"), *LETTERS], "abc", ["▁", "a", "bc"]),
        ([ScoredPiece("▁a"), ScoredPiece("▁ab"), *LETTERS], "ab b", ["▁ab", "▁", "b"]),
        ([ScoredPiece("aa"), *LETTERS], "aaa", ["▁", "aa", "a"]),
        ([ScoredPiece("aa", -1), ScoredPiece("aaa", -2), *LETTERS], "aaaa", ["▁", "aa", "aa"]),
        ([ScoredPiece("▁▁"), *LETTERS], "   a", ["▁▁", "▁▁", "a"]),
        ([ScoredPiece("b▁a"), ScoredPiece("▁a"), ScoredPiece("b▁"), *LETTERS], "b a", ["▁", "b▁a"]),
        ([ScoredPiece("▁a"), ScoredPiece("b▁"), *LETTERS], "b a", ["▁", "b", "▁a"]),
        (LETTERS, "aé", ["▁", "a", "<0xC3>", "<0xA9>"]),
        (LETTERS, "", []),
        (LETTERS, "a</s>b", ["▁", "a", "</s>", "▁", "b"]),
        ([ScoredPiece("ab", kind=UNUSED), ScoredPiece("abc"), *LETTERS], "ab", ["▁", "a", "b"]),
        ([ScoredPiece("ab", kind=UNUSED), ScoredPiece("abc"), *LETTERS], "abc", ["▁", "abc"]),
        (
            [ScoredPiece("bc", kind=USER_DEFINED), ScoredPiece("ab"), *LETTERS],
            "abc",
            ["▁", "a", "bc"],
        ),
    ],
)
def test_the_best_scored_neighbours_are_joined_first(
    pieces: list[ScoredPiece], text: str, expected: list[str]
) -> None:
    assert spelled(tokenizer(*pieces), text) == expected


def test_unknown_characters_are_one_unknown_piece_without_byte_pieces() -> None:
    built = tokenizer(*LETTERS, byte_pieces=False)
    assert spelled(built, "aéßb") == ["▁", "a", "<unk>", "b"]
    assert built.encode_with_offsets("aéßb", add_special_tokens=False)[1][2] == (1, 3)


def test_a_vocabulary_without_byte_pieces_and_unknown_piece_is_refused() -> None:
    with pytest.raises(ModelError, match=r"x\.gguf.*byte pieces"):
        SentencePieceTokenizer("x.gguf", LETTERS)


def test_additions_around_a_text_follow_the_options() -> None:
    options = SentencePieceOptions(BOS, EOS, add_space_prefix=False)
    built = tokenizer(*LETTERS, options=options)
    assert spelled(built, "a", add_special_tokens=True) == ["<s>", "a", "</s>"]
    assert spelled(built, "a", add_special_tokens=False) == ["a"]
    once = SentencePieceOptions(space_after_marks=False)
    assert spelled(tokenizer(*LETTERS, options=once), "a<s>b") == ["▁", "a", "<s>", "b"]


def test_a_mark_can_absorb_the_blanks_beside_it() -> None:
    mark = ScoredPiece("<m>", 0.0, USER_DEFINED, strips_left=True, strips_right=True)
    built = SentencePieceTokenizer("x", [*HEAD, *LETTERS, mark])
    ids, offsets = built.encode_with_offsets("a  <m> \nb", add_special_tokens=False)
    assert [built.token_text(i) for i in ids] == ["▁", "a", "<m>", "▁", "b"]
    assert offsets == [(0, 0), (0, 1), (1, 8), (8, 8), (8, 9)]


@pytest.mark.timeout(240)  # a search that begins at every blank would take many minutes
def test_a_long_run_of_blanks_is_searched_once() -> None:
    absorbing = ScoredPiece("<m>", 0.0, USER_DEFINED, strips_left=True)
    built = SentencePieceTokenizer("x", [*HEAD, *LETTERS, absorbing])
    ids = built.encode(" " * 500_000 + "a" + " " * 500_000 + "<m>", add_special_tokens=False)
    assert (len(ids), built.token_text(ids[-1])) == (500_003, "<m>")


@given(st.text("ab cé🙂", max_size=30), st.booleans())
@examples(100)
def test_offsets_cover_the_text_in_order(text: str, add: bool) -> None:
    options = SentencePieceOptions(BOS, EOS)
    built = tokenizer(ScoredPiece("ab"), ScoredPiece("▁a"), *LETTERS, options=options)
    ids, offsets = built.encode_with_offsets(text, add_special_tokens=add)
    assert ids == built.encode(text, add_special_tokens=add)
    covered = sorted({o for o in offsets if o[0] < o[1]})
    assert "".join(text[a:b] for a, b in covered) == text


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    root = Path(__file__).parents[3]
    lines = [line for file in sorted(root.glob("*.md")) for line in file.read_text().splitlines()]
    return [line for line in lines if line.strip()][:600]


USER_SYMBOLS = ("==", "the")  # at the beginning the library alone has a space before them
TRAININGS: dict[str, dict[str, Any]] = {
    "byte pieces": {"byte_fallback": True},
    "no byte pieces": {"byte_fallback": False},
    "no space in front": {"byte_fallback": True, "add_dummy_prefix": False},
    "pieces across words": {"byte_fallback": True, "split_by_whitespace": False},
    "user symbols": {"byte_fallback": True, "user_defined_symbols": [*USER_SYMBOLS]},
}


@pytest.fixture(scope="module", params=TRAININGS)
def trained(
    request: pytest.FixtureRequest, corpus: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=written,
        vocab_size=700,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **TRAININGS[request.param],
    )
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    path.write_bytes(written.getvalue())
    return spm.SentencePieceProcessor(model_proto=written.getvalue()), path


def of_file(path: Path) -> SentencePieceTokenizer:
    file = read_sentencepiece(path)
    options = SentencePieceOptions(add_space_prefix=file.add_space_prefix, space_after_marks=False)
    return SentencePieceTokenizer(str(path), file.pieces, options)


def test_real_text_encodes_as_in_the_library(trained: tuple[Any, Path], corpus: list[str]) -> None:
    library, path = trained
    ours = of_file(path)
    for text in [*corpus[:200], "\n".join(corpus[:50])]:
        if text.startswith(USER_SYMBOLS):
            continue
        ids = library.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids
        if library.unk_id() not in ids:
            assert ours.decode(ids, skip_special_tokens=True) == library.decode(ids)


@given(text=st.text("theTHE ==\n\téé🙂aa", max_size=40) | st.text(max_size=20))
@examples(60)
def test_any_text_encodes_as_in_the_library(trained: tuple[Any, Path], text: str) -> None:
    library, path = trained
    if any(mark in text for mark in ("<s>", "</s>", "<unk>", "\0")):
        return
    if text.startswith(USER_SYMBOLS):
        return
    assert of_file(path).encode(text, add_special_tokens=False) == library.encode(text)


@given(text=st.text(max_size=30))
@examples(60)
def test_text_survives_the_round_trip(trained: tuple[Any, Path], text: str) -> None:
    _, path = trained
    ours = of_file(path)
    text = text.replace("▁", "")  # the library's own sign for a space
    ids = ours.encode(text, add_special_tokens=False)
    if 0 in ids:
        return  # no byte pieces
    assert ours.decode(ids, skip_special_tokens=False) == text
    stream = Detokenizer(ours.token_bytes, strip_space=ours.strips_leading_space)
    assert "".join([stream.feed([i]) for i in ids]) + stream.finish() == text


def test_transformers_conversion_agrees_on_real_text(
    trained: tuple[Any, Path], corpus: list[str], tmp_path: Path
) -> None:
    library, path = trained
    if not library.is_byte(3):
        pytest.skip("transformers' conversion needs byte pieces")
    converted = converted_json(library, tmp_path)
    ours, theirs = of_file(path), build_tokenizer(converted)
    for text in corpus[:100]:
        if "<s>" in text or text[0] == " ":  # transformers puts no second space in front
            continue
        ids = ours.encode(text, add_special_tokens=False)
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert theirs.decode(ids, skip_special_tokens=False) == text
    assert [theirs.token_bytes(i) for i in range(700)] == [ours.token_bytes(i) for i in range(700)]


def converted_json(library: Any, folder: Path) -> Checkpoint:
    from transformers import LlamaTokenizer

    pieces = [library.id_to_piece(i) for i in range(library.get_piece_size())]
    known = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (library.get_score(i), (piece[:cut], piece[cut:]))
        for i, piece in enumerate(pieces)
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known and not library.is_byte(i)
    ]
    ranked = [pair for _, pair in sorted(merges, key=lambda merge: -merge[0])]
    prefix = library.encode("x", out_type=str)[0].startswith("▁")
    built = LlamaTokenizer(vocab=known, merges=ranked, add_prefix_space=prefix)
    built.save_pretrained(folder)
    config = {"max_position_embeddings": 64, "vocab_size": len(pieces), "model_type": "llama"}
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return read_checkpoint(folder)


def write_directory(folder: Path, model: Path, **tokenizer_config: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(model.read_bytes())
    config = {
        "model_type": "llama",
        "max_position_embeddings": 64,
        "vocab_size": 702,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(tokenizer_config))
    return folder


def test_a_directory_may_have_only_a_tokenizer_model(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    library, path = trained
    added = {
        "700": {"content": "<|im_start|>", "special": True},
        "701": {"content": "<tool>", "special": False, "rstrip": True},
    }
    folder = write_directory(
        tmp_path, path, added_tokens_decoder=added, add_bos_token=True, bos_token="<s>"
    )
    checkpoint = read_checkpoint(folder)
    built = build_tokenizer(checkpoint)
    assert (checkpoint.bos_token_id, checkpoint.eos_token_ids) == (None, (2,))
    ids = built.encode("abc<|im_start|>", add_special_tokens=True)
    assert ids == [1, *library.encode("abc"), 700]
    assert built.encode("<tool>  ", add_special_tokens=False) == [701]
    assert built.vocab_size == 702
    assert 700 in built.special_ids
    assert 701 not in built.special_ids


def test_older_directories_list_added_tokens_in_a_separate_file(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    folder = write_directory(tmp_path, trained[1])
    files = {
        "added_tokens.json": {"<|im_end|>": 700, "<tool>": 701, "<|sep|>": 702},
        "special_tokens_map.json": {
            "eos_token": {"content": "<|im_end|>"},
            "additional_special_tokens": ["<|sep|>"],
        },
    }
    for name, content in files.items():
        (folder / name).write_bytes(msgspec.json.encode(content))
    checkpoint = read_checkpoint(folder)
    built = build_tokenizer(checkpoint)
    assert (checkpoint.eos_token, checkpoint.eos_token_ids) == ("<|im_end|>", (2, 700))
    assert built.encode("<tool><|im_end|><|sep|>", add_special_tokens=False) == [701, 700, 702]
    assert {700, 701, 702} & built.special_ids == {700, 702}


def test_gguf_metadata_gives_the_same_tokenizer(
    trained: tuple[Any, Path], corpus: list[str]
) -> None:
    library, path = trained
    file = read_sentencepiece(path)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [p.text for p in file.pieces],
        "tokenizer.ggml.scores": [p.score for p in file.pieces],
        "tokenizer.ggml.token_type": [p.kind for p in file.pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": file.add_space_prefix,
    }
    built = build_tokenizer(
        Checkpoint(Path("x.gguf"), "x", 64, 700, (2,), None, "<s>", "</s>", metadata)
    )
    for text in corpus[:50]:
        if "==" in text or "the" in text:  # a user symbol takes a space here
            continue
        assert built.encode(text, add_special_tokens=True) == [1, *library.encode(text)]


def proto(*fields: tuple[int, bytes | int]) -> bytes:
    return b"".join(
        bytes((number << 3, value)) if isinstance(value, int)
        else bytes((number << 3 | 2, len(value))) + value
        for number, value in fields
    )  # fmt: skip


PIECE = (1, proto((1, b"a")) + b"\x15" + struct.pack("<f", -1.0))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it has no pieces"),
        (b"\xff\xff", "not a SentencePiece model"),
        (b"IQ== 0\nIg== 1\n", "needs its tokenizer.json"),
        (proto(PIECE, (2, proto((3, 1)))), "'unigram' is not supported"),
        (proto(PIECE), "'unigram' is not supported"),
        (proto(PIECE, (2, proto((3, 2)))), "normalizer rewrites text"),
        (proto(PIECE, (2, proto((3, 2))), (3, proto((2, b"x"), (4, 0)))), "normalizer"),
        (proto((1, proto((1, b"\xff")))), "not a SentencePiece model"),
        (proto((1, proto((3, 9)))), "unknown type 9"),
    ],
)
def test_damaged_and_unsupported_files_are_refused_by_name(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"(?s)tokenizer\.model.*{reason}"):
        read_sentencepiece(path)


@given(data=st.data())
@examples(100)
def test_a_damaged_file_is_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(proto(PIECE, PIECE, (2, proto((3, 2))), (3, proto((3, 1), (4, 0)))))
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("fuzz") / "tokenizer.model"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        assert read_sentencepiece(path).pieces
    except ModelError:
        return
