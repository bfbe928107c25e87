"""Kubernetes: what stands in the cluster, read into the picker's own values."""
