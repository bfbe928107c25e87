"""Long work runs in a thread, short work on the loop."""

import threading

import pytest

from worker.api.http.off_loop import INLINE, off_loop_when_large


@pytest.mark.parametrize(("size", "stays"), [(INLINE, True), (INLINE + 1, False)])
async def test_large_work_leaves_the_event_loop(size: int, stays: bool) -> None:
    worker = await off_loop_when_large(size, threading.get_ident)
    assert (worker == threading.get_ident()) is stays


@pytest.mark.parametrize("size", [1, INLINE + 1])
async def test_an_error_of_the_work_is_raised(size: int) -> None:
    with pytest.raises(ZeroDivisionError):
        await off_loop_when_large(size, lambda: 1 // 0)
