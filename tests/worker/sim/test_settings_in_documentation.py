"""The examples in the simulator's documentation are valid, and every setting is documented."""

import re
from pathlib import Path

import pytest

from worker.config import SimConfig
from worker.sim.faults import FAILURES, METRICS_PAGES, SHAPES, Faults, parse_update, show
from worker.sim.settings import BY_NAME, PRESETS, apply
from worker.sim.tokens import OUTPUT_LENGTHS

PAGE = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text()
EXAMPLES = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("body", EXAMPLES)
def test_documented_examples_have_an_effect(body: str) -> None:
    update = parse_update(Faults(), body.encode(), frozenset(BY_NAME))
    changed = apply(SimConfig(), update.settings)
    assert update.faults != Faults() or update.crash or changed != SimConfig()


def test_every_setting_and_value_is_documented() -> None:
    names = {*show(Faults()), "hang", "crash", *BY_NAME} - {"latency-model", "time-scale"}
    values = {*FAILURES, *METRICS_PAGES, *SHAPES, *OUTPUT_LENGTHS, *PRESETS}
    missing = sorted(
        name for name in names | values if f"`{name}`" not in PAGE and not name.endswith("-std-dev")
    )
    assert missing == []
    assert len(EXAMPLES) >= 5
