"""A Jinja sandbox with a budget: no request can keep a worker busy through its chat template.

Loops are charged through a filter woven into their bodies, output through Jinja's `finalize` hook.
A hostile template can still spend time inside a single operation on its own values.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

from jinja2 import Environment, Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_BUDGET, _STEP, _SIZED = "<budget>", "<step>", "<sized>"  # names no template can write
_STEPS_BETWEEN_CLOCKS = 256
_MAX_WIDTH = 10_000
_MAX_WRAPPED = 1 << 30  # characters to copy; more could take seconds
_WIDE_FORMAT = re.compile(r"\d{5,}|\*")
# Filters whose numbers are values or lengths to cut at, not widths.
_WITHOUT_WIDTHS = frozenset(("default", "d", "truncate", "int", "float", "sum", "round"))
_PADDING_METHODS = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs"))


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """The budget of one render: `chars` bounds the output and the length of any value."""

    steps: int = 1_000_000
    chars: int = 32_000_000
    seconds: float = 5.0
    clock: Callable[[], float] = time.monotonic


class BudgetExceededError(SecurityError): ...


class _Budget:
    """Owns the rest of one render's budget."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._steps = limits.steps
        self._chars = limits.chars
        self._deadline = limits.clock() + limits.seconds

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise BudgetExceededError(f"it takes more than {self._limits.steps} steps")
        if self._steps % _STEPS_BETWEEN_CLOCKS == 0 and self._limits.clock() > self._deadline:
            raise BudgetExceededError(f"it takes more than {self._limits.seconds:g} seconds")

    def charge_output(self, chars: int) -> None:
        self._chars -= chars
        if self._chars < 0:
            raise BudgetExceededError(f"it gives more than {self._limits.chars} characters")


@pass_context
def _step(context: Context, value: None, chars: int) -> bool:
    """Charge a loop iteration with `chars` characters of template text: the woven-in filter."""
    budget: _Budget = context.parent[_BUDGET]
    budget.step()
    budget.charge_output(chars)
    return True


@pass_context
def _charge_output(context: Context, value: Any) -> Any:
    """Charge a value before it becomes output: the `finalize` hook."""
    budget: _Budget = context.parent[_BUDGET]
    budget.charge_output(_text_size(value, {}))
    return value


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates are to be rendered only through `render_within_limits`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, limits: RenderLimits, extensions: Sequence[type[Any]]) -> None:
        super().__init__(
            # As in transformers, for which templates are written.
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=extensions,
            finalize=_charge_output,
        )
        self._limits = limits
        # It generates text of any length.
        del self.globals["lipsum"]
        for name, function in list(self.filters.items()):
            self.filters[name] = self._guarded(name, function)
        self.filters["join"] = self._join
        self.filters[_STEP] = _step
        self.filters[_SIZED] = self._sized

    def render_within_limits(self, template: Template, variables: dict[str, Any]) -> str:
        """Render a template; raise `BudgetExceededError`, or the template's own error."""
        budget = _Budget(self._limits)
        context = template.new_context({**variables, _BUDGET: budget})
        return "".join(template.root_render_func(context))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not supported")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    self._check_size(len(value) * times)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return self._sized(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget: _Budget = context.parent[_BUDGET]
        budget.step()
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps `str.format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            name = method.__name__
            if name == "join" and len(args) == 1:
                return self._join(args[0], owner)
            if name in ("format", "format_map"):
                _check_format(owner)
            if name in _PADDING_METHODS or name in ("format", "format_map"):
                _check_widths(name, (*args, *kwargs.values()))
            if name == "replace":
                self._check_replacement(owner, *args[:2])
        return self._sized(super().call(context, obj, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _SizedConcatenations().visit(tree)
        for loop in tree.find_all(nodes.For):
            chars = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            loop.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(None), _STEP, chars)))
            # Where the test refuses every item, the body never runs.
            if loop.test is not None:
                loop.test = nodes.And(_filtered(nodes.Const(None), _STEP, 0), loop.test)
        # The parser has done it before the new nodes came, and the compiler needs it.
        tree.set_environment(self)
        return tree

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            passed = isinstance(args[0], Context | EvalContext | Environment)
            # Jinja passes its context first to some filters.
            values = (*args[passed:], *kwargs.values())
            if name == "replace":
                self._check_replacement(*values[:3])
            elif name == "format":
                _check_format(str(values[0]))
            elif name == "indent":
                width = next((v for v in values[1:] if isinstance(v, str)), "    ")
                self._check_size(str(values[0]).count("\n") * len(width))
            elif name == "wordwrap":
                _check_wrapping(str(values[0]), *args[passed + 1 :][:1], **kwargs)
            elif name == "string":
                self._check_size(_text_size(values[0], {}))
            if name not in _WITHOUT_WIDTHS:
                _check_widths(name, values[1:])
            return self._sized(function(*args, **kwargs))

        return guarded

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        """Join like Jinja's filter, with a check of the size before each item."""
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        parts, size = [], 0
        for item in value:
            self._check_size(_text_size(item, {}))
            parts.append(str(item))
            size += len(parts[-1]) + len(d)
            self._check_size(size)
        return str(d).join(parts)

    def _check_replacement(self, text: Any, old: Any = "", new: Any = "") -> None:
        text, old, new = str(text), str(old), str(new)
        self._check_size(len(text) + text.count(old) * (len(new) - len(old)))

    def _sized(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple):
            self._check_size(len(value))
        return value

    def _check_size(self, size: int) -> None:
        if size > self._limits.chars:
            raise BudgetExceededError(f"a value is longer than {self._limits.chars}")


class _SizedConcatenations(NodeTransformer):
    """Puts every `a ~ b` through the filter that refuses oversized values."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802  (Jinja's protocol)
        self.generic_visit(node)
        return _filtered(node, _SIZED)


def _filtered(node: nodes.Expr, name: str, *constants: int) -> nodes.Filter:
    return nodes.Filter(node, name, [nodes.Const(c) for c in constants], [], None, None)


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise SecurityError("a format has a width that is too large or not written out")


def _check_wrapping(text: str, width: int = 79, **_: Any) -> None:
    """Refuse a long line, as `textwrap` copies the rest of a word for every piece of it."""
    copied = sum(len(line) ** 2 for line in text.splitlines())
    if copied > _MAX_WRAPPED * max(1, width):
        raise SecurityError("wordwrap: a line is too long for the width")


def _text_size(value: Any, known: dict[int, int]) -> int:
    """Estimate the length of a value's text without building it; `known` has sizes by identity."""
    if isinstance(value, str):
        return len(value)
    parts: Iterable[Any]
    if isinstance(value, Mapping):
        parts = chain(value.keys(), value.values())
    elif isinstance(value, list | tuple | Set):
        parts = value
    elif isinstance(value, Namespace):  # a template sets its attributes
        parts = object.__getattribute__(value, "__dict__").values()
    else:
        return 1
    size = known.get(id(value))
    if size is None:
        size = known[id(value)] = 2 + sum(2 + _text_size(part, known) for part in parts)
    return size


def _check_widths(name: str, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_WIDTH:
            raise SecurityError(f"{name}: {value} is more than {_MAX_WIDTH}")
