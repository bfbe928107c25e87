"""Label keys, which the schema of an InferencePool does not check, and selectors that lost a label.

Source: Kubernetes' rules of label syntax. An API server takes a pool whose selector has a key that
is none, and then refuses every list of Pods by that selector.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from picker.k8s.objects.findings import ObjectFinding, Place, error, warning
from picker.pool.object_parts import DNS_NAME

LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
MAX_PREFIX_LENGTH: Final = 253

_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]")
_PREFIX = re.compile(DNS_NAME)
_FIX = (
    "write at most 63 letters, digits, '-', '_' and '.' that begin and end with a letter or digit, "
    "perhaps behind a DNS name and '/'"
)


def is_label_key(text: str) -> bool:
    """Whether a label of an object can have this key."""
    prefix, slash, name = text.rpartition("/")
    if slash and (len(prefix) > MAX_PREFIX_LENGTH or not _PREFIX.fullmatch(prefix)):
        return False
    return _NAME.fullmatch(name) is not None


def selector_problems(selector: Mapping[str, Any], at: Place) -> Iterator[ObjectFinding]:
    """What is wrong with a selector beyond its schema."""
    if not selector:
        text = "is empty and would take every Pod of the namespace"
        yield error(at, selector, text, "write the labels of the pool's Pods")
    for key in selector:
        if not is_label_key(key):
            yield error((*at, key), key, "the key is no label key, so no Pod can have it", _FIX)


def dropped_labels(annotations: Any, at: Place, selector: Iterable[str]) -> Iterator[ObjectFinding]:
    """Labels whose null the API server dropped from the selector at `at`: it now takes more Pods
    than its author may think. What `kubectl apply` was given tells of them.
    """
    applied = annotations.get(LAST_APPLIED) if isinstance(annotations, dict) else None
    try:
        given: Any = msgspec.json.decode(applied) if isinstance(applied, str) else None
    except (msgspec.DecodeError, RecursionError):
        return
    for step in at:
        given = given.get(step) if isinstance(given, dict) else None
    kept = set(selector)
    for key, value in given.items() if isinstance(given, dict) else ():
        if value is None and key not in kept:
            text = "was applied without a value and dropped, so the selector takes more Pods"
            yield warning((*at, key), None, text, "write a value, or leave the key out")
