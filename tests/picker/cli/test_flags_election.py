"""The flags of leader election."""

import re

import pytest

from picker.cli.flags import build_parser, options_of
from picker.cli.options import Options
from picker.errors import ConfigError
from picker.k8s.elector import Timings

ELECTS = ("--pool-name=pool", "--pool-namespace=team", "--ha-enable-leader-election")


def _parsed(*argv: str) -> Options:
    return options_of(build_parser().parse_args(argv))


def test_no_leader_is_elected_without_the_flag() -> None:
    assert _parsed("--pool-name=pool").election is None
    assert _parsed("--pool-name=pool", "--ha-enable-leader-election=false").election is None


def test_the_lease_has_the_name_that_the_reference_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POD_NAME", "picker-abc-xyz")
    first, second = _parsed(*ELECTS).election, _parsed(*ELECTS).election
    assert str(first.lease) == "team/epp-team-pool.llm-d.ai"
    assert first.timings == Timings(15.0, 10.0, 2.0)
    assert re.fullmatch(r"picker-abc-xyz_[0-9a-f-]{36}", first.identity)
    assert first.identity != second.identity


def test_the_lease_of_selected_pods_has_the_name_of_the_deployment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POD_NAME", "picker-abc-xyz")
    pods = ("--endpoint-selector=app=x", "--endpoint-target-ports=8000", "--pool-namespace=team")
    election = _parsed(*pods, "--ha-enable-leader-election").election
    assert election.lease.name == "epp-team-picker.llm-d.ai"


def test_timings_are_durations() -> None:
    election = _parsed(
        *ELECTS,
        "--leader-election-lease-duration=4s",
        "--leader-election-renew-deadline=3s",
        "--leader-election-retry-period=500ms",
    ).election
    assert election.timings == Timings(4.0, 3.0, 0.5)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--ha-enable-leader-election"], "--pool-name"),
        (["--endpoints-file=x", "--ha-enable-leader-election"], "without --endpoints-file"),
        (["--pool-name=x", "--leader-election-retry-period=1s"], "no effect without --ha-enable"),
        ([*ELECTS, "--leader-election-lease-duration=1500ms"], "whole seconds"),
        ([*ELECTS, "--leader-election-lease-duration=10m"], "1 to 120"),
        ([*ELECTS, "--leader-election-renew-deadline=15s"], "two replicas would lead"),
        ([*ELECTS, "--leader-election-retry-period=9s"], "well below the 10s"),
        ([*ELECTS, "--leader-election-retry-period=10ms"], "at least 0.1s"),
        (["--pool-namespace=a", "--ha-enable-leader-election", f"--pool-name={'x' * 250}"], "253"),
    ],
)
def test_a_contradiction_is_refused(argv: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        _parsed(*argv)
