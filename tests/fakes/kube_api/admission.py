"""What a real server refuses in a ValidatingAdmissionPolicy and in a binding, by values.

Their OpenAPI has no enumerations, so that a schema alone lets these through. Policies are checked
here as they are written, and not applied to requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import cel
from crd_rules import DUPLICATE, INVALID, NOT_SUPPORTED, REQUIRED, FieldError

Object: TypeAlias = dict[str, Any]
# "Unauthorized" is in the API's description, but its validation does not accept it.
_REASONS = ("Forbidden", "Invalid", "RequestEntityTooLarge")
_POLICIES = ("Fail", "Ignore")
_OPERATIONS = ("*", "CONNECT", "CREATE", "DELETE", "UPDATE")
_SCOPES = ("*", "Cluster", "Namespaced")
_ACTIONS = ("Audit", "Deny", "Warn")


def policy_errors(policy: Object) -> Iterator[FieldError]:
    """All that is wrong with a ValidatingAdmissionPolicy."""
    spec = policy.get("spec") or {}
    yield from _supported("spec.failurePolicy", spec.get("failurePolicy", "Fail"), _POLICIES)
    rules = (spec.get("matchConstraints") or {}).get("resourceRules")
    if not rules:
        yield _required("spec.matchConstraints.resourceRules")
    for index, rule in enumerate(rules or ()):
        yield from _rule_errors(f"spec.matchConstraints.resourceRules[{index}]", rule)
    validations = spec.get("validations")
    if not validations and not spec.get("auditAnnotations"):
        yield _required("spec.validations")
    for index, validation in enumerate(validations or ()):
        yield from _validation_errors(f"spec.validations[{index}]", validation)


def binding_errors(binding: Object) -> Iterator[FieldError]:
    """All that is wrong with a ValidatingAdmissionPolicyBinding."""
    spec = binding.get("spec") or {}
    if not spec.get("policyName"):
        yield _required("spec.policyName")
    path, actions = "spec.validationActions", spec.get("validationActions")
    if not actions:
        yield _required(path)
    for index, action in enumerate(actions or ()):
        place = f"{path}[{index}]"
        yield from _supported(place, action, _ACTIONS)
        if action in actions[:index]:
            yield FieldError(place, DUPLICATE, f'Duplicate value: "{action}"')
    if {"Deny", "Warn"} <= set(actions or ()):
        yield FieldError(path, INVALID, "Invalid value: must not contain both Deny and Warn")


def _rule_errors(path: str, rule: Object) -> Iterator[FieldError]:
    for field in ("apiGroups", "apiVersions", "operations", "resources"):
        if not rule.get(field):
            yield _required(f"{path}.{field}")
    for index, operation in enumerate(rule.get("operations") or ()):
        yield from _supported(f"{path}.operations[{index}]", operation, _OPERATIONS)
    yield from _supported(f"{path}.scope", rule.get("scope", "*"), _SCOPES)


def _validation_errors(path: str, validation: Object) -> Iterator[FieldError]:
    expression = validation.get("expression", "").strip()
    if not expression:
        yield _required(f"{path}.expression")
    else:
        try:
            cel.compile(expression)
        except ValueError as error:
            yield FieldError(f"{path}.expression", INVALID, f"Invalid value: {error}")
    message = validation.get("message", "")
    if message and not message.strip():
        text = "Invalid value: message must be non-empty if specified"
        yield FieldError(f"{path}.message", INVALID, text)
    elif "\n" in message.strip():
        text = "Invalid value: message must not contain line breaks"
        yield FieldError(f"{path}.message", INVALID, text)
    elif not message and "\n" in expression:
        text = "Required value: message must be specified if expression contains line breaks"
        yield FieldError(f"{path}.message", REQUIRED, text)
    if (reason := validation.get("reason")) is not None:
        yield from _supported(f"{path}.reason", reason, _REASONS)


def _supported(path: str, value: str, values: Sequence[str]) -> Iterator[FieldError]:
    if value not in values:
        listed = ", ".join(f'"{one}"' for one in values)
        text = f'Unsupported value: "{value}": supported values: {listed}'
        yield FieldError(path, NOT_SUPPORTED, text)


def _required(path: str) -> FieldError:
    return FieldError(path, REQUIRED, "Required value")
