"""`pointsman restart` finds the fleet, and sends it the named parts."""

import asyncio
from pathlib import Path

import pytest

from fleet.commands.cli import main
from fleet.errors import FleetError
from fleet.run.control import Control, FleetPart, Order, Say, restart_command
from fleet.run.running_picker import RunningFleet, shown


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
    """Parts without a name are all of them, in a fixed order; status 3 means that requests were
    cut.
    """
    orders: list[Order] = []

    async def obey(order: Order, say: Say) -> int:
        orders.append(order)
        say("done")
        return cut

    path = tmp_path / "control"
    fleet = RunningFleet(1, "http://127.0.0.1:1", 8080, str(path))
    taking_orders = asyncio.ensure_future(Control(str(path), obey).run())
    said: list[str] = []
    with shown(fleet, environment):
        async with asyncio.timeout(120):
            while not path.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            status = await asyncio.to_thread(restart_command, argv, environment, said.append)
    assert status == (3 if cut else 0)
    taking_orders.cancel()
    await asyncio.wait([taking_orders])
    assert [order.restart for order in orders] == [parts]
    assert said == ["done"]


def test_without_a_fleet_the_restart_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(FleetError, match="no fleet runs here: `pointsman up` starts one"):
        restart_command([], environment, print)
    with (
        shown(RunningFleet(1, "http://127.0.0.1:1", 8080, "/run/c"), environment),
        pytest.raises(FleetError, match="no fleet runs here on port 8081"),
    ):
        restart_command(["--port", "8081"], environment, print)


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
            restart_command(["picker"], environment, print)


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["restart", "worker"])
    assert "(choose from 'picker', 'envoy', 'workers', 'all')" in capsys.readouterr().err
