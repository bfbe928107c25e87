"""The assignment of GPUs and their memory to workers."""

import subprocess
from pathlib import Path

import pytest

from fleet.errors import FleetError
from fleet.run.devices import Gpu, choose, described, find, place
from fleet.run.layout import FleetOptions, FleetPlan, Site

MODEL = Path("/m/model.gguf")
LISTED = """0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559
1, GPU-bb22, NVIDIA H100 80GB HBM3, 81559
2, GPU-bb33, NVIDIA A2, Limited, 15356
"""


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(i, f"GPU-{i}", "H100", 80 * 1024) for i in range(count))


def flag(argv: tuple[str, ...], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None


def placed(workers: int, there: int, **options: object) -> list[tuple[str | None, str | None]]:
    ports = tuple(range(11, 11 + workers))
    site = Site(Path("/run/x"), 9, (1, 2, 3), ports, 4, Path("/bin/envoy"), gpus=gpus(there))
    plan = FleetPlan(FleetOptions(workers=workers, **options), site, MODEL)  # type: ignore[arg-type]
    programs = [worker.program for worker in plan.workers]
    return [
        (
            dict(one.environment).get("CUDA_VISIBLE_DEVICES"),
            flag(one.argv, "--gpu-memory-utilization"),
        )
        for one in programs
    ]


@pytest.mark.parametrize(
    ("workers", "there", "expected"),
    [
        (2, 0, [(None, "0.25")] * 2),
        (1, 1, [("GPU-0", "0.92")]),
        (2, 1, [("GPU-0", "0.46")] * 2),
        (2, 2, [("GPU-0", "0.92"), ("GPU-1", "0.92")]),
        (3, 2, [("GPU-0", "0.46"), ("GPU-1", "0.92"), ("GPU-0", "0.46")]),
        (2, 8, [("GPU-0", "0.92"), ("GPU-1", "0.92")]),
        (8, 8, [(f"GPU-{i}", "0.92") for i in range(8)]),
    ],
)
def test_workers_are_spread_over_the_gpus(
    workers: int, there: int, expected: list[tuple[str | None, str | None]]
) -> None:
    assert placed(workers, there) == expected


def test_a_tensor_parallel_worker_has_several() -> None:
    two = ("--tensor-parallel-size", "2")
    assert placed(2, 4, worker_args=two) == [("GPU-0,GPU-1", "0.92"), ("GPU-2,GPU-3", "0.92")]
    assert placed(2, 3, worker_args=("--tensor-parallel-size=2",)) == [
        ("GPU-0,GPU-1", "0.46"),
        ("GPU-2,GPU-0", "0.46"),
    ]
    for odd in ("3", "x", "0"):
        assert placed(2, 2, worker_args=("--tensor-parallel-size", odd)) == [(None, "0.25")] * 2
    assert placed(2, 2, worker_args=("--device", "cpu")) == [(None, "0.25")] * 2


def test_the_replacement_of_the_only_worker_is_on_another_gpu() -> None:
    """The old worker holds most of the memory of its GPU."""
    for there in (1, 2):
        site = Site(Path("/run/x"), 9, (1, 2, 3), (11,), 4, Path("/bin/envoy"), gpus=gpus(there))
        plan = FleetPlan(FleetOptions(workers=1), site, MODEL)
        if there == 1:
            with pytest.raises(FleetError, match="worker-1 is the only worker, and no GPU is free"):
                plan.worker(0, 12, beside=plan.workers[0])
            continue
        second = plan.worker(0, 12, beside=plan.workers[0])
        assert second.program.environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"
        third = plan.worker(0, 13, beside=second)
        assert third.program.environment["CUDA_VISIBLE_DEVICES"] == "GPU-0"


def test_workers_can_run_without_gpus() -> None:
    assert placed(2, 0, devices="cpu") == [("", "0.25")] * 2


def test_numbers_mean_the_same_gpus_to_us_and_to_the_workers() -> None:
    """Workers get names of GPUs, and unnamed ones have the order of nvidia-smi."""
    found = find({"CUDA_VISIBLE_DEVICES": "2,1"}, lambda: LISTED)
    site = Site(Path("/run/x"), 9, (1, 2, 3), (11, 12), 4, Path("/bin/envoy"), gpus=tuple(found))
    for worker, gpu in zip(
        FleetPlan(FleetOptions(workers=2), site, MODEL).workers, found, strict=True
    ):
        assert worker.program.environment["CUDA_VISIBLE_DEVICES"] == gpu.uuid
    unplaced = FleetPlan(FleetOptions(workers=1, worker_args=("--device", "cuda")), site, MODEL)
    for plan in (unplaced, FleetPlan(FleetOptions(workers=1), site, MODEL)):
        assert plan.workers[0].program.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_the_user_sees_the_workers_of_each_gpu() -> None:
    assert described(place(3, gpus(2))) == [
        "GPU 0 (H100, 80 GiB): worker-1, worker-3, 46% of its memory each",
        "GPU 1 (H100, 80 GiB): worker-2, 92% of its memory",
    ]
    assert described(place(2, [])) == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-bb33,GPU-aa11", [2, 0]),
        ("GPU-aa", [0]),
        ("GPU-bb", []),  # ambiguous: CUDA takes it for invalid
        ("1,7,0", [1]),
        ("1,1,0", [1]),
        ("-1", []),
        ("", []),
    ],
)
def test_gpus_hidden_from_cuda_are_not_used(environment: str | None, expected: list[int]) -> None:
    """The variable has numbers or names, and ends at the first invalid one."""
    variables = {} if environment is None else {"CUDA_VISIBLE_DEVICES": environment}
    assert [gpu.index for gpu in find(variables, lambda: LISTED)] == expected


def test_a_gpu_is_read_as_it_is_listed() -> None:
    found = find({}, lambda: LISTED)
    assert found[2] == Gpu(2, "GPU-bb33", "NVIDIA A2, Limited", 15356)
    assert str(found[0]) == "GPU 0 (NVIDIA H100 80GB HBM3, 80 GiB)"


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 20),
    ],
)
def test_a_machine_without_gpus_has_none(error: Exception) -> None:
    def query() -> str:
        raise error

    assert find({}, query) == []
    assert find({}, lambda: "No devices were found\n") == []


def test_gpus_are_chosen_by_number() -> None:
    there = gpus(3)
    assert choose("all", there) == list(there)
    assert choose("cpu", there) == []
    assert choose("2, 0", there) == [there[2], there[0]]
    for wanted in ("3", "0,x", "", "0,,1", "-1"):
        with pytest.raises(FleetError, match=r"--devices .* no GPU .* numbers such as 0,2"):
            choose(wanted, there)
    with pytest.raises(FleetError, match="twice"):
        choose("1,1", there)
