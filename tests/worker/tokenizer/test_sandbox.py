"""Templates cannot exceed their budget, and ordinary templates are unaffected."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.ext import loopcontrols

from worker.tokenizer.sandbox import BudgetedEnvironment, BudgetExceededError, RenderLimits


def render(source: str, limits: RenderLimits | None = None, **variables: Any) -> str:
    environment = BudgetedEnvironment(limits or RenderLimits(), [loopcontrols])
    return environment.render_within_limits(environment.from_string(source), variables)


SMALL = RenderLimits(steps=1000, chars=10_000)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100) %}{% for j in range(100) %}{% endfor %}{% endfor %}",
        "{% for i in range(2000) if i < 0 %}{% endfor %}",
        "{% for x in xs recursive %}{% if loop.depth < 9 %}{{ loop(xs) }}{% endif %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(12) }}",
    ],
)
def test_loop_iterations_and_calls_are_counted(source: str) -> None:
    with pytest.raises(BudgetExceededError, match="1000 steps"):
        render(source, SMALL, xs=[1, 2, 3, 4, 5, 6, 7, 8, 9])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(200) %}{{ 'x' * 100 }}{% endfor %}",
        "{% for i in range(200) %}" + "x" * 100 + "{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(40) %}"
        "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
        "{% set n = namespace(s='x') %}"
        "{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}"
        "{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}"
        "{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ [1] * 1000000000 }}",
        "{{ ('x' * 5000).replace('x', 'y' * 5000) }}",
        "{{ ('x' * 5000) | replace('x', 'y' * 5000) }}",
        "{{ (['x' * 5000] * 100) | join }}",
        "{{ ('y' * 5000).join(['x'] * 100) }}",
        "{{ ([{'a': 'x' * 5000}] * 100) | join(attribute='a') }}",
        "{{ ('x\n' * 2000) | indent('y' * 2000) }}",
        "{{ [[[0] * 100] * 100] * 100 }}",
        "{{ ([[[0] * 100] * 100] * 100) | string | length }}",
        "{{ [[[[0] * 100] * 100] * 100] | join | length }}",
        "{{ {'a': ['x' * 5000] * 5} }}",
        "{{ namespace(a=['x' * 5000] * 5) }}",
        "{% set n = namespace(s=[1]) %}"
        "{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    ],
)
def test_text_cannot_grow_without_bound(source: str) -> None:
    with pytest.raises(BudgetExceededError):
        render(source, SMALL)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10 ** 10 ** 10 }}",
        "{{ ('a' * 200000) | wordwrap(1) }}",
        "{{ ('a' * 200000) | wordwrap(break_long_words=true, width=2) }}",
        "{{ (' ' * 200000) | wordwrap(-1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 'x'.center(1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x'.zfill(1000000000) }}",
        "{{ [1] | batch(1000000000, 'x') | list }}",
        "{{ 'x\n' | indent(1000000000) }}",
        "{{ lipsum(n=1000000) }}",
    ],
)
def test_huge_widths_and_powers_are_refused(source: str) -> None:
    with pytest.raises((SecurityError, UndefinedError)) as caught:
        render(source)
    assert not isinstance(caught.value, BudgetExceededError)  # refused before any work


def test_time_is_bounded() -> None:
    ticks: Iterator[int] = count()
    limits = RenderLimits(seconds=3.0, clock=lambda: next(ticks))
    with pytest.raises(BudgetExceededError, match="3 seconds"):
        render("{% for i in range(90000) %}{% endfor %}", limits)


def test_every_render_has_the_whole_budget() -> None:
    environment = BudgetedEnvironment(SMALL, [])
    template = environment.from_string("{% for i in range(900) %}{% endfor %}ok")
    assert [environment.render_within_limits(template, {}) for _ in range(3)] == ["ok"] * 3


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for x in xs %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}",
         "1/2False 2/2True "),
        ("{% for x in xs if x > 1 %}{{ x }}{% else %}none{% endfor %}", "2"),
        ("{% for x in [] %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% for k, v in d.items() %}{{ k ~ '=' ~ v }}{% endfor %}", "a=1"),
        ("{{ 'a-b'.replace('-', '+') }}{{ 'a b'.split(' ') | join('|', attribute=0) }}", "a+ba|b"),
        ("{{ '%s %05.1f' % ('x', 2.5) }} {{ '{} {:>3}'.format('x', 1) }}", "x 002.5 x   1"),
        ("{{ xs | sum }} {{ xs | map('string') | join(',') }}", "3 1,2"),
        ("{{ 'x' | center(5) }}|", "  x  |"),
        ("{{ 'line\nline' | indent(2) }} {{ undefined is defined }}", "line\n  line False"),
        ("{{ xs[::-1] + [0] }}{{ ('ab' * 2).upper() }}", "[2, 1, 0]ABAB"),
    ],
)  # fmt: skip
def test_ordinary_templates_are_unaffected(source: str, expected: str) -> None:
    assert render(source, xs=[1, 2], d={"a": 1}) == expected


def test_values_within_the_limits_render_as_in_plain_jinja() -> None:
    source = "{{ xs }} {{ xs | string }} {{ [xs] | join }} {{ ('ab ' * 3) | wordwrap(width=5) }}"
    nested = [1, "a", {"b": (None, True)}]
    assert render(source, SMALL, xs=nested) == f"{nested} {nested} {nested} ab ab\nab"
