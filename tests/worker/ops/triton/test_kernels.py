"""The Triton kernels do what torch does: on a GPU, or in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.depth import by_depth

HERE = Path(__file__).parent
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider")
# Files, and which of their tests: none of the runs is long, and each takes seconds to import torch.
MERGING = "split or share or long or alone"
ALL_RUNS = [
    (["parity_attention.py"], MERGING),
    (["parity_attention.py"], f"not ({MERGING})"),
    (["parity_draws.py"], ""),
    (["parity_dense.py"], ""),
    (["parity_experts.py", "parity_fused.py"], ""),
    (["parity_lora.py"], ""),
    (["parity_models.py"], ""),
    *(
        (["parity_engine.py"], ways)
        for ways in ("alone or batched", "chunked or drafts", "graphs or eight")
    ),
    (["parity_planes.py"], ""),
    (["parity_quantized.py"], ""),
]
# Models and engines run the same kernels again.
KERNELS = [
    f"parity_{name}.py"
    for name in ("dense", "draws", "experts", "fused", "lora", "planes", "quantized")
]
RUNS = by_depth([(["parity_attention.py"], ""), (KERNELS, "")], ALL_RUNS)


@pytest.mark.timeout(1800)  # minutes of interpreted kernels, on a core that others may use
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("parities", "expression"), RUNS)
def test_kernels_agree_with_torch(parities: list[str], expression: str) -> None:
    """The interpreter must be chosen before Triton is imported, so the tests have their own
    process.
    """
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, *PYTEST, "-k", expression, *(str(HERE / name) for name in parities)],
        env={**os.environ, **interpret, "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


def test_every_parity_file_is_run() -> None:
    files = {path.name for path in HERE.glob("parity_*.py")}
    assert files == {name for parities, _ in ALL_RUNS for name in parities}
