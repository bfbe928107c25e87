"""Pickers that follow an InferencePool, through a Kubernetes API: `python -m conformance.k8s`."""
