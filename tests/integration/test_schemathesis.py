"""Requests made up from the OpenAPI document, right ones and wrong ones, against a real worker."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.worker.sim_worker import sim_worker

pytestmark = pytest.mark.full

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection"
)
FLAGS = ("--max-model-len", "256", "--enable-admin-routes", "--enable-tokenizer-info-endpoint")
FLAGS += ("--strict-fields",)  # the document has no others
# They stop the engine, so that what generates would wait for ever.
STOPPING = ("/pause", "/sleep")
WAKING = ("/resume", "/wake_up", "/is_paused", "/is_sleeping", "/reset_prefix_cache")
# About a minute of a core. What multiplies them (a phase, more examples) is a choice to be made.
MAX_CASES = 18_000


@pytest.mark.parametrize(
    "selection",
    [
        pytest.param(
            [word for path in STOPPING for word in ("--exclude-path", path)], marks=pytest.mark.soak
        ),
        [word for path in (*STOPPING, *WAKING) for word in ("--include-path", path)],
    ],
    ids=["serving", "stopping"],
)
def test_schemathesis_finds_nothing(selection: list[str], tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("schemathesis")
    with sim_worker(*FLAGS) as worker:
        result = subprocess.run(
            [
                *(str(program), "run", f"{worker.url}/openapi.json", "--checks", CHECKS),
                *("--phases", "coverage,fuzzing", "--max-examples", "3", "--warnings", "off"),
                # The same requests every time, however busy the machine is.
                *("--generation-deterministic", "--suppress-health-check", "all"),
                *selection,
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert worker.process.poll() is None
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "No issues found" in result.stdout
    made = re.search(r"(\d+) generated", result.stdout)
    assert 0 < int(made[1]) <= MAX_CASES
