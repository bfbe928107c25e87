"""Bytes that all holders together may have."""

from picker.rpc.budget import ByteBudget, ByteShare


def test_a_budget_is_given_out_to_its_last_byte() -> None:
    budget = ByteBudget(10)
    first, second = ByteShare(budget), ByteShare(budget)
    assert first.grow(4)
    assert second.grow(6)
    assert not first.grow(1)
    assert (first.held_bytes, budget.held_bytes) == (4, 10)
    second.release()
    second.release()
    assert (second.held_bytes, budget.held_bytes) == (0, 4)
    assert first.grow(6)
    first.grow_beyond(1)
    assert budget.held_bytes == 11
    first.release()
    assert budget.held_bytes == 0
