"""global-strict-fairness-policy: the best head of all flows."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from picker.plugins.fairness_policies.global_strict_fairness_policy import GlobalStrictBand
from tests.depth import examples
from tests.support.picker.plugin_scenes import queued


def test_the_first_of_equal_ranks_goes_first() -> None:
    band = GlobalStrictBand()
    first, second = queued("z"), queued("a")
    band.head_changed("a", second, (1.0,))
    band.head_changed("z", first, (1.0,))
    assert band.select(0.0) == "z"
    band.head_changed("z", None, ())
    assert band.select(0.0) == "a"


@examples(60)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(0, 5)), max_size=60
    )
)
def test_a_selection_equals_a_search_of_all_heads(changes: list[tuple[str, int | None]]) -> None:
    band, heads = GlobalStrictBand(), dict[str, Any]()
    for flow, rank in changes:
        if rank is None:
            heads.pop(flow, None)
            band.head_changed(flow, None, ())
        else:
            head = queued(flow)
            heads[flow] = ((float(rank),), head.sequence)
            band.head_changed(flow, head, (float(rank),))
        assert band.select(0.0) == min(heads, key=heads.__getitem__, default=None)
