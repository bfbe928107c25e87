"""Reading before drafts: who may begin, what it costs, and when it is tried again."""

from __future__ import annotations

from worker.engine.drafters.catch_ups import CatchUps
from worker.engine.drafters.probing import Account


def read(catch_ups: CatchUps, seq_id: int, seconds: float, *, is_through: bool, now: int) -> None:
    """One step in which a sequence is asked for drafts; a plain step takes a second."""
    catch_ups.asked([seq_id])
    catch_ups.observe(seconds, [seq_id] if is_through else [], now)
    catch_ups.charge(1.0)


def test_who_was_read_goes_on_whatever_it_cost() -> None:
    """Reading is spent: the sequence drafts on, others wait until it has come back."""
    account = Account()
    catch_ups = CatchUps(account)
    read(catch_ups, 1, 8.0, is_through=True, now=1)
    known, new = catch_ups.leaves([1, 2], 2)
    assert (known.to_ask, known.to_probe) == (True, True)
    assert (new.to_ask, new.to_probe) == (False, False)
    assert account.balance == 1.0
    account.settle(4.0)
    new = catch_ups.leaves([2], 3)[0]
    assert (new.to_ask, new.to_probe) == (True, False)
    account.settle(2.0)
    assert catch_ups.leaves([2], 4)[0].to_probe


def test_what_has_begun_is_read_to_its_end_before_others_begin() -> None:
    """A sequence that waits for its drafts goes on; it alone."""
    catch_ups = CatchUps(Account())
    read(catch_ups, 1, 0.1, is_through=False, now=1)
    begun, new = catch_ups.leaves([1, 2], 2)
    assert (begun.to_ask, begun.is_unfinished, new.to_ask) == (True, True, False)
    read(catch_ups, 1, 0.1, is_through=True, now=2)
    begun, new = catch_ups.leaves([1, 2], 3)
    assert (begun.to_ask, begun.is_unfinished, new.to_ask) == (True, False, True)


def test_one_that_stopped_or_ended_half_read_holds_nobody_up() -> None:
    """After a while, or at once if it has ended, the next one begins."""
    catch_ups = CatchUps(Account())
    read(catch_ups, 1, 0.1, is_through=False, now=1)
    assert not catch_ups.leaves([2], 60)[0].to_ask
    assert catch_ups.leaves([2], 80)[0].to_ask
    catch_ups.forget(1)
    assert catch_ups.leaves([2], 2)[0].to_ask


def test_a_debt_is_bounded_and_so_is_the_time_without_probes() -> None:
    """However long reading took, the income of some thousand steps pays for it."""
    account = Account()
    catch_ups = CatchUps(account)
    read(catch_ups, 1, 1e6, is_through=True, now=1)
    assert not catch_ups.leaves([2], 2)[0].to_probe
    for _ in range(3300):
        account.earn()
    assert catch_ups.leaves([2], 3400)[0].to_probe
