"""Where rules are from."""

from __future__ import annotations

UPSTREAM = "upstream conformance suite, Gateway profile"
POOL = "InferencePool v1"
PODS = "Kubernetes: what Pods go through"
API = "Kubernetes: API conventions of list and watch"
