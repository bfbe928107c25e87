"""The documents that rules are from."""

from __future__ import annotations

SPEC_VERSION = "1.0.0"
_PROTOCOL = f"Endpoint Picker Protocol {SPEC_VERSION}"
STREAMING = f"{_PROTOCOL}: ext_proc in full-duplex streaming mode"
DESTINATION = f"{_PROTOCOL}: destination endpoint"
FALLBACK = f"{_PROTOCOL}: fallback endpoints (since 0.4.0)"
SUBSET = f"{_PROTOCOL}: candidate subset"
SERVED = f"{_PROTOCOL}: served endpoint (since 1.0.0)"
ERRORS = f"{_PROTOCOL}: errors"
HEALTH = f"{_PROTOCOL}: health services"
FAILURE_MODE = "InferencePool v1: endpointPickerRef.failureMode"
EXT_PROC = "Envoy: envoy.service.ext_proc.v3"
EPP_ROLE = "upstream conformance suite: what an EPP under test does"
