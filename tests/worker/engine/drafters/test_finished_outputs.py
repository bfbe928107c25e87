"""Drafts from what other requests answered, and the weights that scale them."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.engine.drafters.finished_outputs import MAX_OUTPUT_TOKENS, FinishedOutputs, OutputText
from worker.engine.drafters.texts import spell
from worker.errors import IntegrityError

HERE, SALTED, THERE = ("here", ""), ("here", "salt"), ("there", "salt")
GROUPS = (HERE, SALTED, THERE)
ALL = 1 << 20


class Model:
    def __init__(self, max_outputs: int, max_tokens: int) -> None:
        self.limits = (max_outputs, max_tokens)
        self.outputs: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.changed: dict[str | tuple[str, str], int] = {}
        self.num_changes = 0

    def all(self, tenant: str | None = None) -> list[str]:
        of = (g for g in self.outputs if tenant in (None, g[0]))
        return [output for group in of for output in self.outputs[group]]

    def weight(self, outputs: list[str]) -> int:
        max_outputs, max_tokens = self.limits
        return sum(map(len, outputs)) * max_outputs + len(outputs) * max_tokens

    def note(self, group: tuple[str, str]) -> None:
        self.num_changes += 1
        self.changed[group] = self.changed[group[0]] = self.num_changes

    def add(self, group: tuple[str, str], output: str) -> None:
        self.outputs[group].append(output)
        self.note(group)
        max_outputs, max_tokens = self.limits
        while len(self.all()) > max_outputs or sum(map(len, self.all())) > max_tokens:
            tenants = {g[0] for g in self.outputs}
            most = max(tenants, key=lambda t: (self.weight(self.all(t)), -self.changed.get(t, 0)))
            groups = [g for g in self.outputs if g[0] == most and self.outputs[g]]
            largest = max(
                groups, key=lambda g: (self.weight(self.outputs[g]), -self.changed.get(g, 0))
            )
            del self.outputs[largest][0]
            self.note(largest)


@examples(150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(GROUPS),
            st.lists(st.integers(0, 3), max_size=14),
            st.sampled_from([0, 1, 3, 9, ALL]),
        ),
        max_size=40,
    ),
    st.integers(0, 6),
    st.integers(0, 40),
)
def test_stored_outputs_fit_the_limits_and_no_others_are_found(
    added: list[tuple[tuple[str, str], list[int], int]], max_outputs: int, max_tokens: int
) -> None:
    finished = FinishedOutputs(max_outputs, max_tokens)
    model = Model(max_outputs, max_tokens)
    for group, token_ids, num_learnt in added:
        finished.add(group, token_ids)
        finished.check_integrity()
        finished.learn(num_learnt)
        finished.check_integrity()
        if token_ids and max_outputs and max_tokens:
            model.add(group, spell(token_ids[-max_tokens:]))
        assert finished.num_outputs == len(model.all())
        assert finished.num_tokens == sum(map(len, model.all()))
        for one in GROUPS:
            text = finished.of(one)
            assert (text.outputs if text else []) == model.outputs[one]
    finished.learn(ALL)
    finished.check_integrity()
    for one in GROUPS:
        text = finished.of(one)
        # Text that is gone is cut off before there is more of it than of what is left.
        if text:
            stored = len(text.text) + sum(len(output) + 1 for output in text._coming)
            assert stored <= 2 * sum(len(o) + 1 for o in text.outputs)
            assert all(text.places(output[:1]) for output in text.outputs)


def test_no_tenant_empties_another_ones_memory() -> None:
    """A flood evicts its own outputs, in any number of salts; within a tenant, those of the
    largest.
    """
    finished = FinishedOutputs(100, 1000)
    for _ in range(3):
        finished.add(THERE, [1, 2, 3])
    finished.add(SALTED, [4, 5, 6])
    for number in range(1000):
        finished.add(HERE if number % 2 else ("here", str(number)), [7] * 20)
        finished.learn(10)
    finished.check_integrity()
    for group, num_stored in ((THERE, 3), (SALTED, 1)):
        text = finished.of(group)
        assert len(text.outputs) == num_stored


def test_no_more_is_indexed_than_is_stored_and_learnt_at_a_time() -> None:
    finished = FinishedOutputs(100, 300)
    for number in range(60):
        for group in GROUPS:
            finished.add(group, range(number * 100, number * 100 + 50))
        finished.learn(20)
        texts = finished._groups.values()
        assert sum(len(text._latest[1]) for text in texts) <= 300 + 20


def test_only_the_end_of_a_long_output_is_stored() -> None:
    finished = FinishedOutputs(10, 10 * MAX_OUTPUT_TOKENS)
    finished.add(HERE, list(range(MAX_OUTPUT_TOKENS + 5)))
    finished.learn(ALL)
    text = finished.of(HERE)
    assert finished.num_tokens == MAX_OUTPUT_TOKENS
    assert text.places(spell([4])) == []
    assert text.places(spell([5])) == [1]


def test_integrity_is_lost_when_something_gone_can_be_found() -> None:
    """The check sees a name that outlived its output, and a chain that skips a place."""
    text = OutputText()
    text.append(spell([1, 2, 1, 3]))
    text.index(5)
    text.check_integrity()
    text._latest[1][spell([6])] = 1
    with pytest.raises(IntegrityError, match="other outputs"):
        text.check_integrity()
    del text._latest[1][spell([6])]
    text._before[1][2] = 0
    with pytest.raises(IntegrityError, match="are not those in the stored outputs"):
        text.check_integrity()
