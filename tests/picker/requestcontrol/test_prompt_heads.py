"""Endpoints that send headers with the first piece are known by their last streamed answer."""

from picker.requestcontrol.prompt_heads import MAX_ADDRESSES, PromptHeads


def test_the_last_answer_decides() -> None:
    heads = PromptHeads()
    heads.learn("10.0.0.1:80", 0.0002)
    heads.learn("10.0.0.2:80", 0.0501)
    assert heads.addresses == {"10.0.0.1:80"}
    heads.learn("10.0.0.1:80", 0.02)
    heads.learn("10.0.0.2:80", 0.0)
    assert heads.addresses == {"10.0.0.2:80"}


def test_addresses_that_come_and_go_take_bounded_memory() -> None:
    heads = PromptHeads()
    for number in range(3 * MAX_ADDRESSES):
        heads.learn(f"10.0.0.1:{number}", 0.0)
        assert len(heads.addresses) <= MAX_ADDRESSES
    assert f"10.0.0.1:{3 * MAX_ADDRESSES - 1}" in heads.addresses
