"""Black-box conformance suites for endpoint pickers.

Nothing here imports the picker, the worker or the fleet: what is tested is started by its command
line, or is an address. `python -m conformance.epp` needs no cluster; `python -m conformance.k8s`
goes through a Kubernetes API; `conformance/kind/run.sh` runs the upstream suite on a kind cluster.
"""
