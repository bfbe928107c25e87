"""A removable heap agrees with a sorted list and frees removed entries."""

from hypothesis import given
from hypothesis import strategies as st

from picker.flowcontrol.removable_heap import RemovableHeap
from tests.depth import examples

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 5)),
        st.tuples(st.just("remove"), st.integers(0, 300)),
        st.tuples(st.just("pop"), st.just(0)),
    ),
    max_size=300,
)


@examples(100)
@given(STEPS)
def test_a_heap_agrees_with_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    heap: RemovableHeap[int, str] = RemovableHeap()
    model: dict[int, tuple[int, int, str]] = {}
    for sequence, (step, value) in enumerate(steps):
        if step == "push":
            heap.push(value, sequence, f"#{sequence}")
            model[sequence] = (value, sequence, f"#{sequence}")
        elif step == "remove":
            assert heap.remove(value) is (model.pop(value, None) is not None)
        else:
            least = min(model.values(), default=None)
            if least is not None:
                del model[least[1]]
            assert heap.pop() == (None if least is None else least[2])
        least = min(model.values(), default=None)
        assert heap.first() == (None if least is None else (least[0], least[2]))
        assert (len(heap), set(heap)) == (len(model), {one[2] for one in model.values()})
        assert len(heap._places) <= 2 * len(heap) + 33


def test_removed_entries_take_no_memory() -> None:
    heap: RemovableHeap[int, int] = RemovableHeap()
    heap.push(0, 0, 0)
    for sequence in range(1, 10_000):
        heap.push(1, sequence, sequence)
        heap.remove(sequence)
    assert len(heap._places) < 50
    heap.clear()
    assert heap.first() is None
