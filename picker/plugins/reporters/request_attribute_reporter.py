"""request-attribute-reporter: tell the proxy a number computed from what a response cost.

    metadata[key.namespace][key.name] = expression(usage)   if condition(usage), with the last piece

`expression` (a whole number) and `condition` (true or false; empty: always) are CEL over `usage`,
e.g. `usage.prompt_tokens + usage.completion_tokens`; see `picker.framework.cel` for its fields.
Exactly one entry in `attributes`. Nothing is reported for the value 0, for a response that does not
tell its usage, and when an expression fails on it, which is logged. Expressions are tried on a
sample when the configuration is read. Needs the extra `cel`.
"""

from __future__ import annotations

import logging

from picker.framework.cel import ExpressionError, UsageExpression
from picker.framework.interfaces import Flight
from picker.framework.registry import Parameters, PluginType
from picker.types import Metadata, ResponseProgress

log = logging.getLogger(__name__)

DEFAULT_NAMESPACE = "envoy.lb"


class AttributeKey(Parameters, frozen=True):
    """`key`: where in the proxy's dynamic metadata the number goes."""

    name: str
    namespace: str = DEFAULT_NAMESPACE


class ReportedAttribute(Parameters, frozen=True):
    """One entry of `attributes`."""

    key: AttributeKey
    expression: str
    condition: str = ""


class RequestAttributeReporterParameters(Parameters, frozen=True):
    """`parameters` of a request-attribute-reporter."""

    attributes: tuple[ReportedAttribute, ...]


class RequestAttributeReporter:
    """Reports one number. Stateless."""

    def __init__(self, parameters: RequestAttributeReporterParameters) -> None:
        """Raises `ValueError` unless there is one attribute, with a name and expressions that work;
        and when the library for expressions is not installed.
        """
        if len(parameters.attributes) != 1:
            raise ValueError(
                f"attributes needs exactly one entry, got {len(parameters.attributes)}"
            )
        attribute = parameters.attributes[0]
        if not attribute.key.name:
            raise ValueError("attributes[0].key.name must not be empty")
        self._name = attribute.key.name
        self._namespace = attribute.key.namespace or DEFAULT_NAMESPACE
        where = "attributes[0].expression"
        self._expression = UsageExpression(attribute.expression, int, where=where)
        self._condition = None
        if attribute.condition.strip():
            where = "attributes[0].condition"
            self._condition = UsageExpression(attribute.condition, bool, where=where)

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> Metadata | None:
        """The number, with the last piece."""
        usage = progress.usage
        if not progress.is_last or usage is None:
            return None
        try:
            if self._condition is not None and self._condition.evaluate(usage) is not True:
                return None
            value = self._expression.evaluate(usage)
        except ExpressionError as error:
            log.warning("no attribute is reported for %s: %s", flight.request.request_id, error)
            return None
        if type(value) is not int or not value:
            return None
        return {self._namespace: {self._name: value}}


PLUGIN = PluginType(
    "request-attribute-reporter",
    RequestAttributeReporterParameters,
    lambda _name, parameters, _services: RequestAttributeReporter(parameters),
)
