"""The file of `--autoscale`."""

import pytest

from picker.config.findings import InvalidConfigError
from picker.errors import ConfigError
from picker.planner.autoscale_file import groups_of, read_autoscale_file
from picker.planner.capacity import LatencyObjective, Stage, WorkerCapacity
from picker.planner.planner import Mode
from picker.types import Endpoint

CAPACITY = (
    "capacity: {prefillTokensPerSecond: 8000, decodeBaseSeconds: 0.02, "
    "decodePerSequenceSeconds: 0.001}\n"
)
SLO = "slo: {ttftSeconds: 1, share: 0.95}\n"


def test_groups_share_the_settings_of_the_file() -> None:
    text = f"""{SLO}{CAPACITY}intervalSeconds: 30
groups:
- {{deployment: prefillers, stage: prefill, maxReplicas: 4, costPerReplicaHour: 2.5}}
- {{deployment: decoders, namespace: other, stage: decode, {CAPACITY.replace("8000", "1").strip()}}}
"""
    first, second = read_autoscale_file(text.encode(), "a.yaml")
    assert (first.name, first.deployment, first.namespace) == ("prefillers", "prefillers", "")
    assert (first.cost_per_replica_hour, second.namespace) == (2.5, "other")
    scaling = first.scaling
    assert (scaling.mode, scaling.stage) == (Mode.SLO, Stage.PREFILL)
    assert (scaling.interval_seconds, scaling.max_replicas) == (30.0, 4)
    assert scaling.objective == LatencyObjective(ttft_seconds=1.0, share=0.95)
    assert scaling.worker == WorkerCapacity(
        prefill_tokens_per_second=8000, decode_base_seconds=0.02, decode_per_sequence_seconds=0.001
    )
    assert second.scaling.worker is not None
    assert second.scaling.worker.prefill_tokens_per_second == 1


def test_thresholds_need_nothing_else() -> None:
    (group,) = read_autoscale_file(b"mode: thresholds\ngroups: [{}]", "a.yaml")
    assert (group.name, group.scaling.worker) == ("both", None)
    assert group.scaling.thresholds.kv_up == 0.9


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "a.yaml: the file is empty; it needs a list under the key 'groups'"),
        ("mode: thresholds\ngroups: []", "groups: is empty; name at least one group"),
        (f"{SLO}groups: [{{}}]", "capacity: mode slo needs the speeds of a worker"),
        (f"{CAPACITY}groups: [{{}}]", "slo: mode slo needs ttftSeconds or itlSeconds"),
        (f"{CAPACITY}slo: {{}}\ngroups: [{{}}]", "slo: mode slo needs ttftSeconds"),
        (f"{SLO}{CAPACITY}groups: [{{minReplicas: 9}}]", "is 9, more than maxReplicas \\(8\\)"),
        ("mode: thresholds\ngroups: [{maxReplicas: 10001}]", "maxReplicas: .* 10000"),
        ("mode: thresholds\ngroups: [{}, {}]", "has the name 'both' of another group"),
        ("mode: thresholds\ngroups: [{deploymnt: a}]", "did you mean 'deployment'"),
        ("mode: thresholds\ngroups: [{deployment: A_}]", "groups\\[0\\].deployment"),
        ("mode: thresholds\nintervalSeconds: 1\ngroups: [{}]", "intervalSeconds"),
        (SLO.replace("0.95", "1.5") + "groups: [{}]", "slo.share"),
    ],
)
def test_mistakes_are_named(text: str, error: str) -> None:
    with pytest.raises(InvalidConfigError, match=error):
        read_autoscale_file(text.encode(), "a.yaml")


@pytest.mark.parametrize(
    ("role", "stage"),
    [
        (None, "both"),
        ("both", "both"),
        ("prefill-decode", "both"),
        ("prefill", "prefill"),
        ("encode-prefill", "prefill"),
        ("decode", "decode"),
    ],
)
def test_a_worker_belongs_to_the_group_of_its_role(role: str | None, stage: str) -> None:
    text = "mode: thresholds\ngroups: [{}, {stage: prefill}, {stage: decode}]"
    labels = {} if role is None else {"llm-d.ai/role": role}
    worker = Endpoint("w", "10.0.0.1", 8000, labels=labels)
    groups = read_autoscale_file(text.encode(), "a.yaml")
    assert [group.name for group in groups if group.has(worker)] == [stage]


def test_each_pool_has_the_groups_that_name_it() -> None:
    text = "mode: thresholds\ngroups: [{pool: a}, {pool: b}, {pool: a, stage: decode}, {name: c}]"
    *named, unnamed = read_autoscale_file(text.encode(), "a.yaml")
    a, b, decoders = named
    assert groups_of("a", ("a", "b", "c"), named, "a.yaml") == (a, decoders)
    assert groups_of("b", ("a", "b", "c"), named, "a.yaml") == (b,)
    assert groups_of("c", ("a", "b", "c"), named, "a.yaml") == ()
    assert groups_of("a", ("a",), (a, unnamed), "a.yaml") == (a, unnamed)
    with pytest.raises(ConfigError, match=r"^a.yaml: group 'c' needs the key pool, one of a, b$"):
        groups_of("a", ("a", "b"), (*named, unnamed), "a.yaml")
    with pytest.raises(ConfigError, match=r"group 'both' has the pool 'b', which is none of a$"):
        groups_of("a", ("a",), named, "a.yaml")
