"""A progress line shows the share and the time left of a stage, and does not flood a log."""

import io

from worker.training.progress import ProgressLine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_changes() -> None:
    clock, stream = Clock(), Terminal()
    line = ProgressLine(stream, clock)
    line.begin("training", 100)
    clock.now += 60
    line.update(150, 200, "loss 1.5")
    line.end()
    shown = stream.getvalue()
    assert shown.startswith("\r")
    assert shown.count("\n") == 1
    assert "training ██████████████████······  75%  loss 1.5  1:00 left" in shown


def test_the_first_update_is_the_progress_of_earlier_runs() -> None:
    clock, stream = Clock(), Terminal()
    line = ProgressLine(stream, clock)
    line.begin("writing")
    clock.now += 9
    line.update(100, 200)
    clock.now += 60
    line.update(150, 200)
    assert stream.getvalue().endswith("75%    1:00 left")


def test_a_log_has_few_lines() -> None:
    clock, stream = Clock(), io.StringIO()
    line = ProgressLine(stream, clock)
    line.begin("writing")
    for done in range(41):
        line.update(done, 40)
        clock.now += 1
    line.end()
    shares = [part.split()[2] for part in stream.getvalue().splitlines()]
    assert shares == ["0%", "38%", "75%", "100%"]


def test_a_message_has_a_line_of_its_own() -> None:
    stream = Terminal()
    ProgressLine(stream, Clock()).say("wrote it")
    assert stream.getvalue().endswith("wrote it\n")
