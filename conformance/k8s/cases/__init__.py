"""All cases through a Kubernetes API, in the order in which they run."""

from conformance.case import Case
from conformance.k8s.cases import extension, following, outages, pods, upstream
from conformance.k8s.scene import ClusterScene

ALL: tuple[Case[ClusterScene], ...] = (
    *upstream.CASES,
    *following.CASES,
    *pods.CASES,
    *outages.CASES,
    *extension.CASES,
)
