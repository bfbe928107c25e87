"""The documents that rules are from."""

UPSTREAM = "upstream conformance suite, Gateway profile"
POOL = "InferencePool v1"
PODS = "Kubernetes: what Pods go through"
EXTENSION = "extension: one picker for several InferencePools"
API = "Kubernetes: API conventions of list and watch"
