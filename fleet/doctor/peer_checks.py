"""Whether a picker hears the other replicas, by its series and by who they are said to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fleet.doctor.cluster_facts import ClusterFacts
from fleet.doctor.cluster_view import flag_in, flag_of, is_ready, picker_pods
from fleet.doctor.facts import Facts, PickerFacts
from fleet.doctor.findings import Check, Finding, warning
from fleet.doctor.picker_flags import PEER_FLAGS, serving_of

_CONNECTED, _HEARD = "pointsman_peers_connected", "pointsman_peers_heard"


def _peers(facts: Facts) -> Iterator[Finding]:
    picker = facts.picker
    if picker is None or picker.problem is not None:
        return
    told, heard = (
        picker.metrics.get(_CONNECTED),
        picker.metrics.get(_HEARD),
    )
    if told is None or heard is None:
        return
    named = max(_named(picker, picker.words), _replicas(facts.cluster))
    others = max(named, int(told), int(heard))
    if min(told, heard) < others:
        yield warning(
            f"{picker.url}: of {others} other replicas it hears {heard:g} and tells {told:g}",
            "what it does not hear of is not there for it: prompts are computed again elsewhere, "
            "and endpoints are overrun",
            "its log says `peer at …` with the reason; see names and port of --peers, "
            "--peer-service or --peer-slices, NetworkPolicies, and the certificates of "
            "--peer-cert-path (docs/high-availability.md)",
        )


def _named(picker: PickerFacts, words: Sequence[str]) -> int:
    """The other replicas that a command line names one by one; it may name this one as well, and
    one of them twice, which only calls tell.
    """
    text = flag_in(list(words), "--peers") or ""
    named = len({one.strip() for one in text.split(",") if one.strip()})
    if picker.peer_calls.get("known"):
        return 0
    return max(named - (1 if picker.peer_calls.get("self") else 0), 0)


def _replicas(cluster: ClusterFacts | None) -> int:
    """The other ones that are ready in the cluster, and exchange what they know of the pool."""
    if cluster is None:
        return 0
    pool = cluster.namespace, cluster.pool_name
    found = 0
    for pod in picker_pods(cluster):
        serving = serving_of(pod)
        is_of_pool = serving is None or serving.find(*pool) is not None
        if is_ready(pod) and is_of_pool and any(flag_of(pod, flag) for flag in PEER_FLAGS):
            found += 1
    return max(found - 1, 0)


CHECKS = (Check("picker-peers", "it hears the other replicas", _peers),)
