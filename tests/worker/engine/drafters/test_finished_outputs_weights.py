"""MaxHeap returns the name of the largest weight, whatever has changed in between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.engine.drafters.finished_outputs import MaxHeap
from worker.errors import IntegrityError


@examples(150)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(-9, 9)), max_size=60))
def test_the_largest_is_the_name_of_the_largest_weight(changes: list[tuple[str, int]]) -> None:
    """Among equal weights, the one that was changed least recently counts."""
    weights: MaxHeap[str] = MaxHeap()
    model: dict[str, tuple[int, int]] = {}
    for number, (name, change) in enumerate(changes):
        weight = model.get(name, (0, 0))[0] + change
        if weight < 0:
            with pytest.raises(IntegrityError, match="weighs"):
                weights.add(name, change)
            continue
        weights.add(name, change)
        model[name] = (weight, -number)
        if not weight:
            del model[name]
        assert len(weights) == len(model)
        assert weights.of(name) == weight
        if model:
            assert weights.largest() == max(model, key=lambda n: model[n])
        assert len(weights._heap) <= 2 * 5 + 1
