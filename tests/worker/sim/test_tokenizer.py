"""The simulator's tokenizer preserves counts and the identity of text, if not the text."""

from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.sim import tokenizer as sim
from worker.tokenizer.detokenize import decode

TOKENIZER = sim.SimTokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_words_are_distinct_and_one_token_each() -> None:
    assert len(set(sim.WORDS)) == sim.NUM_WORDS == 1024
    ids = list(range(sim.FIRST_WORD_ID, sim.FIRST_WORD_ID + sim.NUM_WORDS))
    assert encode("".join(f" {w}" for w in sim.WORDS)) == ids


@given(st.lists(st.integers(sim.FIRST_WORD_ID, sim.IM_START_ID - 1), max_size=30))
@examples(50)
def test_an_answer_sent_back_has_its_own_ids(ids: list[int]) -> None:
    """The next turn then hits the prefix cache."""
    text = decode(TOKENIZER.token_bytes, ids)
    head = "<|im_start|>assistant\n"
    assert encode(head + text + "<|im_end|>") == [*encode(head), *ids, sim.IM_END_ID]


@given(st.text(max_size=60))
@examples(200)
def test_any_text_has_ids_of_the_vocabulary(text: str) -> None:
    ids = encode(text)
    assert ids == encode(text)
    assert all(0 <= i < sim.VOCAB_SIZE for i in ids)


def test_prose_has_about_one_token_per_word() -> None:
    assert len(encode("The quick brown fox jumps over the lazy dog.")) == 10
    assert len(encode("internationalisation")) == 3
    assert encode("naïve café") != encode("naive cafe")


def test_marks_are_control_tokens() -> None:
    assert encode("<|im_start|>a<|im_end|>")[::2] == [sim.IM_START_ID, sim.IM_END_ID]
    assert TOKENIZER.special_ids == {sim.IM_START_ID, sim.IM_END_ID}
    assert TOKENIZER.token_bytes(sim.IM_END_ID) == b"<|im_end|>"
    assert TOKENIZER.token_bytes(0xE2) == b"\xe2"
