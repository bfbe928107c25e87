"""The combinations that the worker refuses are those of a table in docs/gpu.md."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from worker.cli.flags import build_parser, resolve
from worker.config import EngineConfig, SpeculativeConfig
from worker.errors import ConfigError
from worker.executor.start import choose_dtype, choose_kernels, choose_kv_dtype
from worker.ops.backends import TORCH
from worker.tokenizer.checkpoint import Checkpoint

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLAG = re.compile(r"--[a-z-]+")


def rows() -> set[tuple[str, ...]]:
    table = PAGE.read_text().split("## What does not go together")[1].split("\n## ")[0]
    lines = [re.split(r"\s*\|\s*", line)[1:3] for line in table.splitlines() if "`--" in line]
    return {tuple(cell for cell in row if FLAG.search(cell)) for row in lines if len(row) == 2}


def kernels(device: torch.device, **changes: object) -> Callable[[], object]:
    config = EngineConfig("torch", "nowhere", quantization="q8_0", **changes)
    return lambda: choose_kernels(config, device, choose_dtype(config.dtype, CPU, True))


def kv_dtype(name: str, dtype: torch.dtype) -> Callable[[], object]:
    return lambda: choose_kv_dtype(name, CPU, dtype, TORCH)


def offloading(*flags: str) -> Callable[[], object]:
    given = build_parser().parse_args(["--kv-offloading-size", "1", *flags])
    tiny = Checkpoint(Path("/models/tiny.gguf"), "tiny", 2048, 61, (2,), None, "", "")
    return lambda: resolve(given, tiny, {})


REFUSED: dict[tuple[str, str], Callable[[], object]] = {
    ("`--quantization`", "`--device cuda`"): kernels(CUDA),
    ("`--quantization`", "`--dtype bfloat16` or `float16`"): kernels(CPU, dtype="bfloat16"),
    ("`--quantization`", "`--attention-backend`"): kernels(CPU, attention_backend="torch"),
    ("`--quantization`", "`--speculative-config`, method `eagle` or `eagle3`"): kernels(
        CPU, speculative=SpeculativeConfig("eagle3", 3, "m")
    ),
    ("`--kv-cache-dtype fp8`", "`--attention-backend torch`"): kv_dtype("fp8", torch.bfloat16),
    ("`--kv-cache-dtype bfloat16` or `float16`", "another `--dtype`"): kv_dtype(
        "bfloat16", torch.float16
    ),
    ("`--kv-offloading-size`", "`--engine sim`"): offloading("--engine", "sim"),
    ("`--kv-offloading-size`", "`--no-enable-prefix-caching`"): offloading(
        "--no-enable-prefix-caching"
    ),
}


def test_the_table_has_all_that_is_tested_here() -> None:
    assert rows() == REFUSED.keys()


@pytest.mark.parametrize("pair", REFUSED)
def test_a_refusal_names_both_flags_and_a_way_out(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigError) as refused:
        REFUSED[pair]()
    message = str(refused.value)
    for cell in pair:
        named = FLAG.search(cell)
        assert named is not None
        assert named[0] in message
    assert re.search(r"leave|choose|set --|lower|takes --|goes with ", message)
