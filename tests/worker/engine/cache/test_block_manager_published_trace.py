"""kv-cache-scheduler's published trace gives its published figures on our block manager."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[4] / "benchmarks" / "kv_trace.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kv_trace", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_published_figures_are_reproduced(bench: ModuleType) -> None:
    shared, unshared = (
        bench.run(bench.THEIRS, name, asks)
        for name, asks in zip(("shared", "no sharing"), bench.traces(), strict=True)
    )
    assert (shared.allocations, shared.hit_tokens, shared.steps) == (1643, 299 * 64, 1049)
    assert f"{shared.hit_rate:.3%}" == "69.885%"
    assert f"{shared.utilisation:.3%}" == "12.854%"
    assert f"{shared.fragmentation:.2%}" == "5.69%"
    assert (unshared.allocations, unshared.hit_tokens, unshared.steps) == (2070, 0, 1085)
    assert f"{unshared.utilisation:.3%}" == "16.110%"
    assert f"{unshared.fragmentation:.2%}" == "8.50%"
    assert shared.evictions == unshared.evictions == 0
    assert f"{1 - shared.allocations / unshared.allocations:.1%}" == "20.6%"


def test_our_policy_needs_fewer_blocks_and_hits_as_much_or_more(bench: ModuleType) -> None:
    """No slot for an unread token saves blocks; a hit may end inside a block."""
    theirs, ours = (
        bench.run(policy, "shared", bench.traces()[0]) for policy in (bench.THEIRS, bench.OURS)
    )
    assert ours.allocations < theirs.allocations
    assert ours.hit_tokens >= theirs.hit_tokens
    assert ours.steps == theirs.steps
