"""A new engine pauses and sleeps as the one before it did."""

import pytest

from worker.engine.messages import Command, Pause, ResetPrefixCache, Resume, Sleep, WakeUp
from worker.engine.process.client import Halts


@pytest.mark.parametrize(
    ("reported", "again"),
    [
        ([], []),
        ([ResetPrefixCache(1)], []),
        ([Pause(1, "wait")], [Pause(0, "keep")]),
        ([Pause(1), Resume(2)], []),
        ([Sleep(1, 0, "abort")], [Sleep(0, 0, "keep")]),
        ([Sleep(1, 0), WakeUp(2, ["weights"])], []),
        ([Sleep(1, 2), Sleep(2, 1)], [Sleep(0, 2, "keep")]),
        ([Sleep(1, 1), WakeUp(2)], []),
        ([Sleep(1, 1), WakeUp(2, ["weights"])], [Sleep(0, 1, "keep"), WakeUp(0, ["weights"])]),
        ([Sleep(1, 1), WakeUp(2, ["weights"]), WakeUp(3, ["kv_cache"])], []),
        ([Sleep(1, 1), WakeUp(2, ["weights"]), Sleep(3, 1)], [Sleep(0, 1, "keep")]),
        ([WakeUp(1, ["weights"])], []),
        ([Sleep(1, 1), Resume(2)], [Sleep(0, 1, "keep")]),
        ([Pause(1), Sleep(2, 1), WakeUp(3)], [Pause(0, "keep")]),
    ],
)
def test_commands_that_hold_are_repeated_and_undone_ones_are_not(
    reported: list[Command], again: list[Command]
) -> None:
    halts = Halts()
    for command in reported:
        halts.note(command)
    assert halts.commands() == again
    assert halts.is_halted is bool(again)
    levels = [command.level for command in again if isinstance(command, Sleep)]
    assert [halts.sleep_level] == (levels or [None])
