"""`pointsman top` as users run it."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from fleet.http_client import HttpAnswer
from fleet.picker_views import NoPickerError, PickerViews
from tests.support.fleet.terminal import LIMIT_SECONDS, Terminal, terminal
from tests.support.local_ports import free_port
from tests.support.picker.admin_scene import Scene, busy_scene, serving

TOP = ("-m", "fleet.commands.cli", "top")
BEGIN, END = "\x1b[?1049h", "\x1b[?1049l"  # of the alternate screen


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with serving(await busy_scene(), port=free_port()) as one:
        yield one


async def _run(*flags: str, **environment: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *TOP, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": "", **environment},
    )
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_SECONDS)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("flags", [(), ("--once",)])
async def test_one_picture_is_plain_text(scene: Scene, flags: tuple[str, ...]) -> None:
    status, out, err = await _run("--picker", scene.url, *flags)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    lines = out.splitlines()
    assert sum(line.startswith("worker-") for line in lines) == 10
    assert max(map(len, lines)) <= 80
    assert "batch-tenant 75%, small-tenant 25%" in out
    assert "queue full 429" in out


async def test_queues_are_those_of_the_sample_that_is_drawn(scene: Scene) -> None:
    scene.source.queues_view = replace(scene.source.queues_view, queued_requests=77)
    _, out, _ = await _run("--picker", scene.url)
    assert "queued 14/5000" in out


async def test_a_terminal_without_the_characters_gets_others(scene: Scene) -> None:
    status, out, _ = await _run("--picker", scene.url, PYTHONIOENCODING="ascii")
    assert status == 0
    assert out.isascii()
    assert "x ejected" in out


async def test_a_missing_picker_is_one_line() -> None:
    status, out, err = await _run("--once", "--picker", "http://127.0.0.1:1")
    assert (status, out) == (1, "")
    assert err.startswith("pointsman: no picker answers at http://127.0.0.1:1: ")
    assert err.count("\n") == 1


async def _watched(screen: Terminal) -> None:
    await screen.until(lambda output: "9 of 10 endpoints usable" in output)


@pytest.mark.parametrize("way", ["q", "Q", "Ctrl-C", "SIGTERM", "SIGHUP"])
async def test_every_way_out_leaves_the_terminal_as_it_was(scene: Scene, way: str) -> None:
    async with terminal(*TOP, "--picker", scene.url) as screen:
        await _watched(screen)
        assert screen.modes() != screen.modes_before
        if way.startswith("SIG"):
            screen.process.send_signal(signal.Signals[way])
        else:
            screen.press(b"\x03" if way == "Ctrl-C" else way.encode())
        assert await asyncio.wait_for(screen.process.wait(), LIMIT_SECONDS) == 0
        await screen.until(lambda output: END in output)
        assert screen.output.startswith(BEGIN)
        assert "\x1b[?25h" in screen.output
        assert "Traceback" not in screen.output
        assert screen.modes() == screen.modes_before


async def test_no_color_removes_colours(scene: Scene) -> None:
    async with terminal(*TOP, "--picker", scene.url, NO_COLOR="1") as screen:
        await _watched(screen)
        assert not [code for code in (31, 33, 36) if f"\x1b[{code}m" in screen.output]
    async with terminal(*TOP, "--picker", scene.url) as screen:
        await screen.until(lambda output: "\x1b[36m" in output)


async def test_a_picker_that_stops_and_returns_is_awaited(scene: Scene) -> None:
    port = int(scene.url.rsplit(":", 1)[1])
    async with terminal(*TOP, "--picker", scene.url) as screen:
        await _watched(screen)
        await scene.server.stop()
        await screen.until(
            lambda output: "worker-10" in output.partition("does not answer since")[2]
        )
        scene.pool("another")
        await scene.server.start("127.0.0.1", port)
        await screen.until(lambda output: "1 of 1 endpoints usable" in output)


async def test_a_picker_may_start_later(scene: Scene) -> None:
    port = int(scene.url.rsplit(":", 1)[1])
    await scene.server.stop()
    async with terminal(*TOP, "--picker", scene.url) as screen:
        await screen.until(lambda output: "does not answer since" in output)
        await scene.server.start("127.0.0.1", port)
        await _watched(screen)


async def test_the_whole_screen_is_drawn_and_no_more(scene: Scene) -> None:
    async with terminal(*TOP, "--picker", scene.url) as screen:
        await _watched(screen)
        await screen.until(lambda output: output.count("AT       OUTCOME") >= 2)
        pictures = screen.output.split("\x1b[H")
        assert max(picture.count("\n") for picture in pictures) == 23


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (HttpAnswer(200, b"<html>"), "is not this picker"),
        (HttpAnswer(200, b'{"endpoints": 7}'), "is not this picker"),
        (HttpAnswer(404, b"nothing"), "/endpoints?history=5 answers 404"),
    ],
)
def test_another_server_is_not_taken_for_a_picker(answer: HttpAnswer, words: str) -> None:
    views = PickerViews("http://127.0.0.1:9090", lambda _: answer)
    with pytest.raises(NoPickerError) as caught:
        views.look(5, 5)
    assert words in str(caught.value)


async def test_a_request_is_explained_where_it_is_marked(scene: Scene) -> None:
    async with terminal(*TOP, "--picker", scene.url) as screen:
        await _watched(screen)
        screen.press(b"\x1b[B")
        screen.press(b"\x1b[B")
        screen.press(b"\r")
        await screen.until(lambda output: "request chosen" in output)
        await screen.until(lambda output: "worker-4 tied with" in output)
        seen = len(screen.output)
        screen.press(b"\x1b")
        await screen.until(lambda output: "endpoints usable" in output[seen:])
        screen.press(b"p")
        await screen.until(lambda output: "PAUSED" in output)
        scene.pool("another")
        screen.press(b"p")
        await screen.until(lambda output: "1 of 1 endpoints usable" in output)
