"""Rules of a schema that compare several values: in CEL for the API server, in Python for us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Rule:
    """`cel` in the words of an API server, `message` its answer when the rule does not hold.

    `holds` decides the same about a value that is right by itself and has its defaults; `fix` is
    what to do when it does not.
    """

    cel: str
    message: str
    fix: str
    holds: Callable[[Any], bool]

    def schema(self) -> dict[str, Any]:
        """The rule alone, as `extra_json_schema`."""
        return {"x-kubernetes-validations": [{"message": self.message, "rule": self.cel}]}


def _are_unique(ports: Any) -> bool:
    numbers = [port["number"] for port in ports]
    return len(numbers) == len(set(numbers))


def _has_port(reference: Any) -> bool:
    return reference["kind"] != "Service" or "port" in reference


UNIQUE_PORTS: Final = Rule(
    cel="self.all(p1, self.exists_one(p2, p1.number==p2.number))",
    message="port number must be unique",
    fix="name each port once",
    holds=_are_unique,
)
SERVICE_HAS_PORT: Final = Rule(
    cel="self.kind != 'Service' || has(self.port)",
    message="port is required when kind is 'Service' or unspecified (defaults to 'Service')",
    fix="add 'port: {number: 9002}', or what port the picker's Service has",
    holds=_has_port,
)
RULES: Final = {rule.cel: rule for rule in (UNIQUE_PORTS, SERVICE_HAS_PORT)}
