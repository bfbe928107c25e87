"""Rollouts of a DisaggregatedSet: all stages of a request on one revision.

disaggregatedset-rollout-screener: all stages of a request on one revision of a DisaggregatedSet.
During a rollout, a set has endpoints of two revisions whose KV caches may be incompatible. So:

1. For each header selector of mode `strict` whose header the request has, only the endpoints whose
   label equals it remain; if there are none, the request is refused (503). Selectors of mode
   `prefer` exclude no endpoint: header-label-affinity-scorer prefers by the same header and label.
2. Unless `revisionGating.mode` is `disabled`, only revisions remain that have an endpoint of every
   role in `requireRoles.values`, among the endpoints that `scope.labelSelector` selects.
3. One of these revisions is drawn, and its endpoints remain:

       sum:       weight(revision) = endpoints of all required roles in it
       max-role:  weight(revision) = endpoints in it of the role that most endpoints have, over all
                  these revisions; of equal roles, the first in requireRoles.values

   No revision is drawn when the request has the header of a strict selector for the revision's
   label: then the revision only has to be complete.

Every response reports the labels of the endpoint that it comes from, one header per selector of
either mode, so that a picker of a later stage can be given them. Endpoints are counted among the
request's candidates. (The reference counts the pods of its namespace; where stages have pools of
their own, use mode `disabled` and pass the revision on in its header.)

header-label-affinity-scorer: prefer endpoints whose label equals a request header.

    score = 1.0 if labels[labelKey] = headers[headerName], else 0.0
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Literal

from picker.framework.attributes import Attributes
from picker.framework.interfaces import Flight
from picker.framework.label_selector import LabelSelector
from picker.framework.registry import Parameters, PluginType, Stability
from picker.types import Candidate, Candidates, InferenceRequest, ResponseHead

DEFAULT_REVISION_LABEL = "disaggregatedset.x-k8s.io/revision"
DEFAULT_ROLE_LABEL = "disaggregatedset.x-k8s.io/role"


class RolloutScope(Parameters, frozen=True):
    """`scope`: the endpoints that belong to the set."""

    label_selector: str


class HeaderSelector(Parameters, frozen=True):
    """One entry of `headerSelectors`: a header of requests and responses, and its label."""

    name: str
    header_name: str
    label_key: str
    mode: Literal["strict", "prefer"]


class RequireRoles(Parameters, frozen=True):
    """`revisionGating.requireRoles`: the roles of a complete revision."""

    values: tuple[str, ...] = ()


class RevisionGating(Parameters, frozen=True):
    """`revisionGating`: the choice of a revision."""

    mode: Literal["sum", "max-role", "disabled"]
    revision_label_key: str = DEFAULT_REVISION_LABEL
    role_label_key: str = DEFAULT_ROLE_LABEL
    require_roles: RequireRoles = RequireRoles()


class RolloutScreenerParameters(Parameters, frozen=True):
    scope: RolloutScope
    revision_gating: RevisionGating
    header_selectors: tuple[HeaderSelector, ...] = ()


class DisaggregatedSetRolloutScreener:
    def __init__(self, parameters: RolloutScreenerParameters) -> None:
        self._scope = _scope(parameters.scope)
        self._selectors = tuple(
            _selector(selector, f"headerSelectors[{index}]")
            for index, selector in enumerate(parameters.header_selectors)
        )
        gating = parameters.revision_gating
        self._mode = gating.mode
        self._roles = gating.require_roles.values
        self._revision_label = gating.revision_label_key or DEFAULT_REVISION_LABEL
        self._role_label = gating.role_label_key or DEFAULT_ROLE_LABEL
        if gating.mode != "disabled" and not all((self._roles, *self._roles)):
            raise ValueError(
                f"revisionGating.requireRoles.values must name roles with mode {gating.mode}"
            )

    def screen(self, request: InferenceRequest, candidates: Candidates, rng: Random) -> Candidates:
        wanted = [
            (selector.label_key, request.headers[selector.header_name])
            for selector in self._asked(request)
        ]
        passed = [one for one in candidates if _has_all(one, wanted)]
        if self._mode == "disabled" or not passed:
            return passed
        weights = self._weights(candidates)
        present = {self._revision(one) for one in passed}
        revisions = sorted(revision for revision in weights if revision in present)
        if not revisions:
            return ()
        if any(label == self._revision_label for label, _ in wanted):
            chosen = revisions[0]
        else:
            chosen = rng.choices(revisions, [weights[one] for one in revisions])[0]
        return [one for one in passed if self._revision(one) == chosen]

    def response_head(self, flight: Flight, head: ResponseHead) -> Mapping[str, str] | None:
        """Return the selectors' labels, as far as the chosen endpoint has them."""
        labels = flight.result.endpoints[0].labels
        return {
            selector.header_name: labels[selector.label_key]
            for selector in self._selectors
            if selector.label_key in labels
        }

    @property
    def gating_mode(self) -> str:
        return self._mode

    def revision_shares(self, candidates: Candidates) -> Mapping[str, float]:
        weights = {} if self._mode == "disabled" else self._weights(candidates)
        total = sum(weights.values())
        return {revision: weight / total for revision, weight in weights.items() if total}

    def unmatched_selectors(
        self, request: InferenceRequest, candidates: Candidates
    ) -> Sequence[str]:
        return [
            selector.name
            for selector in self._asked(request)
            if not any(
                _has_all(one, [(selector.label_key, request.headers[selector.header_name])])
                for one in candidates
            )
        ]

    def _asked(self, request: InferenceRequest) -> list[HeaderSelector]:
        """Return the strict selectors whose header the request has."""
        return [
            selector
            for selector in self._selectors
            if selector.mode == "strict" and request.headers.get(selector.header_name)
        ]

    def _revision(self, candidate: Candidate) -> str:
        return candidate.endpoint.labels.get(self._revision_label, "")

    def _weights(self, candidates: Candidates) -> dict[str, int]:
        counts: dict[str, Counter[str]] = {}
        for candidate in candidates:
            revision = self._revision(candidate)
            if revision and self._scope.matches(candidate.endpoint.labels):
                role = candidate.endpoint.labels.get(self._role_label, "")
                counts.setdefault(revision, Counter())[role] += 1
        complete = {
            revision: roles
            for revision, roles in counts.items()
            if all(roles[role] for role in self._roles)
        }
        if self._mode == "sum":
            required = frozenset(self._roles)
            return {
                revision: sum(roles[role] for role in required)
                for revision, roles in complete.items()
            }
        totals = {role: sum(roles[role] for roles in complete.values()) for role in self._roles}
        dominant = max(totals, key=totals.__getitem__)  # of equal roles the first
        return {revision: roles[dominant] for revision, roles in complete.items()}


def _scope(scope: RolloutScope) -> LabelSelector:
    try:
        if not scope.label_selector.strip():
            raise ValueError("must not be empty")
        return LabelSelector.parse(scope.label_selector)
    except ValueError as error:
        raise ValueError(f"scope.labelSelector: {error}") from None


def _selector(selector: HeaderSelector, where: str) -> HeaderSelector:
    for word, value in (
        ("name", selector.name),
        ("headerName", selector.header_name),
        ("labelKey", selector.label_key),
    ):
        if not value.strip():
            raise ValueError(f"{where}.{word} must not be empty")
    header = selector.header_name.strip().lower()
    return HeaderSelector(selector.name, header, selector.label_key.strip(), selector.mode)


def _has_all(candidate: Candidate, labels: Sequence[tuple[str, str]]) -> bool:
    own = candidate.endpoint.labels
    return all(own.get(key) == value for key, value in labels)


class HeaderLabelAffinityParameters(Parameters, frozen=True):
    header_name: str
    label_key: str


class HeaderLabelAffinityScorer:
    def __init__(self, parameters: HeaderLabelAffinityParameters) -> None:
        if not parameters.header_name.strip():
            raise ValueError("headerName must not be empty")
        if not parameters.label_key.strip():
            raise ValueError("labelKey must not be empty")
        self._header = parameters.header_name.strip().lower()
        self._label = parameters.label_key.strip()

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        wanted = request.headers.get(self._header)
        if wanted is None:
            return [0.0] * len(candidates)
        label = self._label
        return [float(candidate.endpoint.labels.get(label) == wanted) for candidate in candidates]


PLUGINS = (
    PluginType(
        "disaggregatedset-rollout-screener", DisaggregatedSetRolloutScreener, Stability.ALPHA
    ),
    PluginType("header-label-affinity-scorer", HeaderLabelAffinityScorer, Stability.ALPHA),
)
