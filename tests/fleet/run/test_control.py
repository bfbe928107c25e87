"""Orders to a running fleet over a real socket, and `pointsman restart`, which sends them."""

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleet.command_lines import parser_of
from fleet.errors import FleetError
from fleet.run.control import Control, FleetPart, Obey, Order, Say, give, restart_command
from fleet.run.running_picker import RunningFleet, shown

parse = parser_of("restart").parse_args
ORDER = Order((FleetPart.PICKER, FleetPart.WORKERS))


@contextlib.asynccontextmanager
async def taking_orders(path: Path, obey: Obey) -> AsyncIterator[asyncio.Task[None]]:
    serving = asyncio.ensure_future(Control(str(path), obey).run())
    async with asyncio.timeout(120):
        while not path.exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)
    yield serving
    serving.cancel()
    await asyncio.wait([serving])


async def given(path: Path, lines: list[str]) -> int:
    return await asyncio.wait_for(asyncio.to_thread(give, ORDER, str(path), lines.append), 120)


async def test_an_order_reports_line_by_line(tmp_path: Path) -> None:
    orders: list[Order] = []

    async def obey(order: Order, say: Say) -> int:
        orders.append(order)
        say("picker: done")
        say("workers: done")
        return 2

    lines: list[str] = []
    async with taking_orders(tmp_path / "c", obey):
        assert await given(tmp_path / "c", lines) == 2
    assert orders == [ORDER]
    assert lines == ["picker: done", "workers: done"]
    assert not (tmp_path / "c").exists()


async def never(order: Order, say: Say) -> int:
    raise AssertionError


async def test_other_users_may_not_give_orders(tmp_path: Path) -> None:
    async with taking_orders(tmp_path / "c", never):
        assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o600


async def test_a_failure_is_the_clients_error(tmp_path: Path) -> None:
    async def obey(order: Order, say: Say) -> int:
        say("picker: starting")
        raise FleetError("it did not come")

    async with taking_orders(tmp_path / "c", obey):
        for _ in range(2):
            lines: list[str] = []
            with pytest.raises(FleetError, match="it did not come"):
                await given(tmp_path / "c", lines)
            assert lines == ["picker: starting"]


@pytest.mark.parametrize(
    "line", [b"{}\n", b'{"restart": ["all"]}\n', b"nonsense\n", b"x" * 70_000 + b"\n", b""]
)
async def test_an_invalid_order_is_refused(tmp_path: Path, line: bytes) -> None:
    async with taking_orders(tmp_path / "c", never):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "c"))
        writer.write(line)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 120)
        writer.close()
    assert b'"failure":"not an order' in answer


async def test_the_end_of_the_fleet_ends_an_order(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def obey(order: Order, say: Say) -> int:
        begun.set()
        await asyncio.Event().wait()

    async with taking_orders(tmp_path / "c", obey) as serving:
        waiting = asyncio.ensure_future(given(tmp_path / "c", []))
        await asyncio.wait_for(begun.wait(), 120)
        serving.cancel()
        with pytest.raises(FleetError, match="the fleet stops"):
            await waiting


async def test_a_disconnected_client_stops_nothing(tmp_path: Path) -> None:
    begun, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def obey(order: Order, say: Say) -> int:
        begun.set()
        await go_on.wait()
        say("nobody hears this")
        done.set()

    async with taking_orders(tmp_path / "c", obey):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "c"))
            client.sendall(b'{"restart": ["envoy"]}\n')
            await asyncio.wait_for(begun.wait(), 120)
        go_on.set()
        await asyncio.wait_for(done.wait(), 120)


def test_a_missing_fleet_takes_no_orders(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="not ready yet, or about to end"):
        give(ORDER, str(tmp_path / "c"), print)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.mark.parametrize(
    ("argv", "parts", "cut"),
    [
        ([], tuple(FleetPart), 0),
        (["all"], (FleetPart.PICKER, FleetPart.ENVOY, FleetPart.WORKERS), 2),
        (["envoy", "--port", "8080"], (FleetPart.ENVOY,), 0),
    ],
)
async def test_named_parts_are_restarted(
    environment: dict[str, str],
    tmp_path: Path,
    argv: list[str],
    parts: tuple[FleetPart, ...],
    cut: int,
) -> None:
    """Without a name all parts are restarted; status 3 means that requests were cut."""
    orders: list[Order] = []

    async def obey(order: Order, say: Say) -> int:
        orders.append(order)
        say("done")
        return cut

    path, said = tmp_path / "control", list[str]()
    fleet = RunningFleet(1, "http://127.0.0.1:1", 8080, str(path))
    with shown(fleet, environment):
        async with taking_orders(path, obey), asyncio.timeout(120):
            status = await asyncio.to_thread(restart_command, parse(argv), environment, said.append)
    assert status == (3 if cut else 0)
    assert [order.restart for order in orders] == [parts]
    assert said == ["done"]


def test_without_a_fleet_the_restart_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(FleetError, match="no fleet runs here: `pointsman up` starts one"):
        restart_command(parse([]), environment, print)
    with (
        shown(RunningFleet(1, "http://127.0.0.1:1", 8080, "/run/c"), environment),
        pytest.raises(FleetError, match="no fleet runs here on port 8081"),
    ):
        restart_command(parse(["--port", "8081"]), environment, print)


def test_one_of_several_fleets_has_to_be_chosen(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest one is not taken silently."""
    with shown(RunningFleet(1, "http://127.0.0.1:1", 8080, "/run/c"), environment):
        monkeypatch.setattr("os.getpid", lambda: 2)
        with (
            shown(RunningFleet(2, "http://127.0.0.1:2", 8180, "/run/d"), environment),
            pytest.raises(FleetError, match=r"2 fleets run here; choose one with --port \(8"),
        ):
            restart_command(parse(["picker"]), environment, print)
