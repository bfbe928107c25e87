"""The engine process builds what its config says, and the simulator stays light."""

import asyncio
import re
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.worker.step_driver import steps
from worker.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest, EngineFailed, Vocabulary
from worker.engine.process.__main__ import run
from worker.engine.process.build import build_core
from worker.engine.process.heartbeat import Pulse, StepBudget
from worker.engine.process.server import EngineSocket
from worker.errors import ConfigError
from worker.sim.config import SimConfig
from worker.sim.runner import DEFAULT_SIM_BLOCKS
from worker.types import EngineStats, SamplingParams


def run_out(core: EngineCore) -> tuple[list[int], EngineStats]:
    reported = [*steps(core)]
    core.shutdown()
    return [t for one in reported for o in one.outputs for t in o.token_ids], reported[-1].stats


def test_the_simulator_has_a_default_cache() -> None:
    _, ready = build_core(EngineConfig("sim", None))
    assert (ready.num_blocks, ready.max_model_len) == (DEFAULT_SIM_BLOCKS, 8192)


def test_a_small_pool_lowers_the_length_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The front end learns the length that fits, the operator reads why."""
    limits = SchedulerConfig(max_model_len=100)
    config = EngineConfig("sim", None, block_size=4, num_blocks_override=5, scheduler=limits)
    _, ready = build_core(config)
    assert ready.max_model_len == 20
    assert "20 tokens, fewer than max_model_len 100" in caplog.text


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'abacus'.*'torch' and 'sim'"):
        build_core(EngineConfig("abacus", None))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_an_engine_drafts_as_configured(method: str) -> None:
    sim = SimConfig(mode="echo", time_scale=0.0)
    reported = {}
    for config in (None, SpeculativeConfig(method, 4, prompt_lookup_min=1)):
        core, _ = build_core(EngineConfig("sim", None, sim=sim, speculative=config))
        prompt = [300, 301, 302, 303] * 8
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        core.add(AddRequest("a", prompt, params, 0.0))
        reported[config is None] = run_out(core)
    plain, drafted = reported[True], reported[False]
    assert plain[0] == drafted[0] == [300, 301, 302, 303] * 6
    assert (plain[1].speculation.num_drafts, drafted[1].speculation.num_drafts > 0) == (0, True)
    assert drafted[1].speculation.num_accepted_tokens > 0
    assert drafted[1].scheduler.num_steps < plain[1].scheduler.num_steps


def test_an_engine_without_a_drafter_runs_what_a_grammar_forces_at_once() -> None:
    words = [bytes((byte,)) for byte in range(256)]
    vocabulary = Vocabulary([*words, b"<end>"], [256], [256])
    sim = SimConfig(vocab_size=257, end_token_id=256, time_scale=0.0)
    core, _ = build_core(EngineConfig("sim", None, sim=sim, vocab_size=257, eos_token_ids=(256,)))
    core.take_vocabulary(vocabulary)
    core.add(AddRequest("a", [1, 2], SamplingParams(99, grammar="start: /[ab]longname[cd]/"), 0.0))
    tokens, stats = run_out(core)
    assert re.fullmatch("[ab]longname[cd]", bytes(tokens[:-1]).decode())
    assert (stats.speculation.num_accepted_tokens, stats.scheduler.num_steps) == (8, 3)


class Listener(EngineSocket):
    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def wait(self, timeout_seconds: float | None = None, bell: int | None = None) -> None: ...

    def close(self) -> None: ...


def test_a_users_error_is_reported_without_a_stack_trace(caplog: pytest.LogCaptureFixture) -> None:
    channel = Listener()
    budget = StepBudget(1.0, 1.0, 0.0)
    assert run(EngineConfig("jax", None), channel, budget, Pulse(budget)) == 1
    reason = "unknown engine 'jax'; known are 'torch' and 'sim'"
    assert channel.sent == [EngineFailed(reason)]
    (record,) = caplog.records
    assert (record.message, record.exc_info) == (f"the engine failed: {reason}", None)


async def test_the_engine_process_imports_no_tensor_library() -> None:
    """Ten simulators on a laptop load neither torch nor numpy."""
    script = "import sys, worker.engine.process; print({'torch', 'numpy'} & set(sys.modules))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    stdout, _ = await process.communicate()
    assert stdout.strip() == b"set()"


@pytest.mark.parametrize("length", [None, 10, 0])
async def test_an_orphan_removes_what_its_parent_left(tmp_path: Path, length: int | None) -> None:
    """A killed parent cannot: its end closes standard input, and the engine cleans up, even if it
    has received none or half of its configuration.
    """
    directory = tmp_path / "pointsman-x"
    directory.mkdir()
    sockets = [directory / "engine.sock", directory / "beats.sock"]
    for path in sockets:
        path.touch()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker.engine.process", *(f"ipc://{path}" for path in sockets)),
        stdin=asyncio.subprocess.PIPE,
    )
    config = msgspec.msgpack.encode(EngineConfig("sim", None))
    async with asyncio.timeout(240.0):
        await process.communicate((len(config).to_bytes(4, "little") + config)[:length])
    assert process.returncode == 1
    assert not directory.exists()
