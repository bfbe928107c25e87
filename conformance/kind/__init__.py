"""The upstream conformance suite on a kind cluster, with this repository's picker: `run.sh`."""
