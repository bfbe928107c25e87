"""The Endpoint Picker Protocol, case by case, over loopback: `python -m conformance.epp`."""
