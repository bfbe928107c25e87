"""Calls in each format, and reasoning, are parsed whole, cut at each character, and in pieces."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.api.tools.answer import (
    TOOL_FORMATS,
    AnswerForm,
    begins_with_reasoning,
    format_of_template,
)

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": ["string", "null"]},
            "where": {"anyOf": [{"type": "object"}, {"type": "string"}]},
            "metric": {"type": "boolean"},
            "at": {"type": "array"},
        },
    },
    "now": {},
}


@dataclass
class Parsed:
    content: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)

    @property
    def good(self) -> list[tuple[str, Any]]:
        whole = [call for index, call in self.calls.items() if index not in self.broken]
        return [(name, json.loads(arguments)) for name, arguments in whole]


def parse(
    pieces: Iterable[str],
    tool_format: str | None,
    *,
    truncated: bool = False,
    stopped: bool = False,
    **form: Any,
) -> Parsed:
    numbers = count()
    parser = AnswerForm(
        lambda: f"call-{next(numbers)}", **{"schemas": SCHEMAS, "tool_format": tool_format, **form}
    ).parser()
    parsed = Parsed()
    said = [parser.feed(piece) for piece in pieces]
    complete = not truncated and not stopped
    for part in [*said, parser.finish(complete=complete, truncated=truncated)]:
        parsed.content += part.content
        parsed.reasoning += part.reasoning
        for call in part.calls:
            if call.name is not None:
                assert call.index not in parsed.calls
                assert call.id == f"call-{call.index}"
                parsed.calls[call.index] = [call.name, ""]
            parsed.calls[call.index][1] += call.arguments
            parsed.broken |= {call.index} if call.broken else set()
    assert parser.num_calls == len(parsed.calls) - len(parsed.broken)
    return parsed


class Case(NamedTuple):
    tool_format: str
    text: str
    calls: list[tuple[str, Any]]
    content: str = ""


PARIS = {"city": "Paris", "days": 3}
TRICKY = {"city": 'a "q" \\ </tool_call><tool_call> [TOOL_CALLS] }]} 你好 🙂\n', "days": -1}
TRICKY_JSON = json.dumps(TRICKY, ensure_ascii=False)
HERMES_PARIS = '<tool_call>\n{"name": "get_weather", "arguments": ' + json.dumps(PARIS) + "}"

CASES = {
    "hermes, text around two": Case(
        "hermes",
        f"Let me look.\n\n{HERMES_PARIS}\n</tool_call>\n"
        '<tool_call>{"arguments": {}, "name": "now"}</tool_call>\nThat is all.\n',
        [("get_weather", PARIS), ("now", {})],
        "Let me look.\n\n\n\nThat is all.",
    ),
    "hermes, marks in strings": Case(
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {TRICKY_JSON}}}</tool_call>',
        [("get_weather", TRICKY)],
    ),
    "hermes, escapes": Case(
        "qwen3",
        '<tool_call>{"name": "get\\u005fweather", "arguments": {"city": "\\ud83d\\ude42\\t\\/"}}'
        "</tool_call>",
        [("get_weather", {"city": "🙂\t/"})],
    ),
    "hermes, a line break in a string": Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb\t"}}</tool_call>',
        [("get_weather", {"city": "a\nb\t"})],
    ),
    "hermes, no arguments": Case(
        "hermes",
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": null}'
        '</tool_call><tool_call>{"id": [1, {}], "arguments": null, "name": "now"}</tool_call>',
        [("now", {})] * 3,
    ),
    "hermes, deep": Case(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": [{"b": [[], {}, [1.5e3, -0, true]]}]}}'
        "</tool_call>",
        [("now", {"a": [{"b": [[], {}, [1500.0, 0, True]]}]})],
    ),
    "hermes, unknown function": Case(
        "hermes", '<tool_call>{"name": "nope", "arguments": {}}</tool_call>', [("nope", {})]
    ),
    "hermes, only text": Case("hermes", " a < b, <tool> \n", [], " a < b, <tool> \n"),
    "hermes, no brackets": Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "at": [1, {"x": [null'
        '\n</tool_call>\n<tool_call>{"name": "now", "arguments": {<tool_call>\n{"name": "now"}',
        [("get_weather", {"city": "Oslo", "at": [1, {"x": [None]}]}), ("now", {}), ("now", {})],
    ),
    "hermes, too many brackets": Case(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": [{}]}}]}\n}</tool_call> so',
        [("now", {"a": [{}]})],
        "so",
    ),
    "hermes, two calls between marks": Case(
        "hermes",
        '<tool_call>\n{"name": "now"}\n{"name": "get_weather", "arguments": {"days": 2}}\n'
        "</tool_call>",
        [("now", {}), ("get_weather", {"days": 2})],
    ),
    "hermes, arguments as text": Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Z\\\\u00fcrich\\"}"}'
        '</tool_call><tool_call>{"arguments": " {\\n}\\n", "name": "now"}</tool_call>'
        '<tool_call>{"name": "now", "arguments": ""}</tool_call>',
        [("get_weather", {"city": "Zürich"}), ("now", {}), ("now", {})],
    ),
    "llama3, one call": Case(
        "llama3_json",
        '{"name": "get_weather", "parameters": ' + TRICKY_JSON + "}",
        [("get_weather", TRICKY)],
    ),
    "llama3, tag, several": Case(
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
        '{"name": "get_weather", "parameters": {"days": 3}}',
        [("now", {}), ("get_weather", {"days": 3})],
    ),
    "llama3, text": Case("llama3_json", 'It is {"name": "now"}.', [], 'It is {"name": "now"}.'),
    "llama3, another object": Case("llama3_json", '{"name": "Bob"} ', [], '{"name": "Bob"} '),
    "llama3, parameters as text, no brackets": Case(
        "llama3_json",
        '{"name": "get_weather", "parameters": "{\\"days\\": 4}"; '
        '{"name": "now", "parameters": {"a": {"b": "}"}<|python_tag|>'
        '{"name": "get_weather", "parameters": {"at": [[2.5, true',
        [
            ("get_weather", {"days": 4}),
            ("now", {"a": {"b": "}"}}),
            ("get_weather", {"at": [[2.5, True]]}),
        ],
    ),
    "mistral, no brackets": Case(
        "mistral",
        '[TOOL_CALLS]now[ARGS]{"a": [["[TOOL_CALLS]"[TOOL_CALLS]now[ARGS]"{\\"b\\": []}"'
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"days": 0',
        [("now", {"a": [["[TOOL_CALLS]"]]}), ("now", {"b": []}), ("get_weather", {"days": 0})],
    ),
    "mistral, list": Case(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + TRICKY_JSON + "}, "
        '{"name": "now", "arguments": {}}]',
        [("get_weather", TRICKY), ("now", {})],
    ),
    "mistral, names": Case(
        "mistral",
        "Looking. [TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]"
        + TRICKY_JSON
        + "[TOOL_CALLS]now{}",
        [("get_weather", TRICKY), ("now", {})],
        "Looking.",
    ),
    "mistral, list with a bad one": Case(
        "mistral",
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"nome": 1}]',
        [("now", {})],
        ', {"nome": 1}]',
    ),
    "json, object": Case(
        "json",
        ' {"name": "get_weather", "arguments": {"days": 1}}\n',
        [("get_weather", {"days": 1})],
    ),
    "json, another list": Case("json", "[1, 2]", [], "[1, 2]"),
    "json, something more in it": Case(
        "json", '{"name": "now", "age": 3}', [], '{"name": "now", "age": 3}'
    ),
    "pythonic, no brackets": Case(
        "pythonic",
        "[now(), get_weather(at=[1, {'x': (2, 3",
        [("now", {}), ("get_weather", {"at": [1, {"x": [2, 3]}]})],
    ),
    "pythonic, only the last mark": Case(
        "pythonic",
        "<|python_start|>[now(a=None), now(b=2<|python_end|>",
        [("now", {"a": None}), ("now", {"b": 2})],
    ),
    "pythonic": Case(
        "pythonic",
        "[get_weather(city='It\\'s \"x\", (y]', days=-3, where={'a': [None, True, 1.5]}), now()]",
        [
            (
                "get_weather",
                {"city": 'It\'s "x", (y]', "days": -3, "where": {"a": [None, True, 1.5]}},
            ),
            ("now", {}),
        ],
    ),
    "pythonic, marked": Case(
        "pythonic",
        '<|python_start|>[get_weather(city="你好",at=(1, 2,), metric=false)]<|python_end|>',
        [("get_weather", {"city": "你好", "at": [1, 2], "metric": False})],
    ),
    "pythonic, positional": Case("pythonic", "[get_weather('x')]", [], "[get_weather('x')]"),
    "pythonic, an expression": Case(
        "pythonic", "[get_weather(days=1+2)]", [], "[get_weather(days=1+2)]"
    ),
    "pythonic, a list": Case("pythonic", "[first, second]", [], "[first, second]"),
    "qwen3_coder": Case(
        "qwen3_coder",
        'I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nÅ "b" \\ </param>\n'
        "\tline\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=where>\n"
        '{"a": [1]}\n</parameter>\n<parameter=units>\nnull\n</parameter>\n<parameter=metric>True'
        "</parameter>\n<parameter=at>\n['x', 1]\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [
            (
                "get_weather",
                {
                    "city": 'Å "b" \\ </param>\n\tline',
                    "days": 3,
                    "where": {"a": [1]},
                    "units": None,
                    "metric": True,
                    "at": ["x", 1],
                },
            ),
            ("now", {}),
        ],
        "I look.",
    ),
    "qwen3_coder, no end of a parameter": Case(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n2\n<parameter=city>\nOslo\n"
        "</function>\n</tool_call>\nDone.",
        [("get_weather", {"days": 2, "city": "Oslo"})],
        "Done.",
    ),
    "qwen3_coder, no end of a function": Case(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n\n</tool_call>\n"
        "<tool_call><function=get_weather><parameter=metric>false</parameter>"
        "<tool_call>\n<function=now>\n</tool_call>",
        [("get_weather", {"city": "Bern\n"}), ("get_weather", {"metric": False}), ("now", {})],
    ),
    "qwen3_coder, no end at all": Case(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=at>\n[1]\n<function=get_weather>\n<parameter=city>\n"
        "a <b>\n\tc<tool_call>\n<function=get_weather><parameter=where>{'x': 1}\n",
        [
            ("get_weather", {"at": [1]}),
            ("get_weather", {"city": "a <b>\n\tc"}),
            ("get_weather", {"where": "{'x': 1}"}),
        ],
    ),
    "qwen3_coder, no outer marks": Case(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=days>\nthree\n</parameter>\n<parameter=other>\n5\n"
        "</parameter>\n<parameter=where>\nhere\n</parameter></function>",
        [("get_weather", {"days": "three", "other": "5", "where": "here"})],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_parsed_alike_however_they_are_cut(name: str) -> None:
    case = CASES[name]
    text = case.text
    whole = parse([text], case.tool_format)
    assert (whole.good, whole.content) == (case.calls, case.content)
    assert parse(text, case.tool_format) == whole
    assert parse([text[i : i + 3] for i in range(0, len(text), 3)], case.tool_format) == whole
    for at in range(len(text) + 1):
        assert parse([text[:at], text[at:]], case.tool_format) == whole


@pytest.mark.parametrize("name", CASES)
def test_an_answer_may_end_anywhere(name: str) -> None:
    case = CASES[name]
    for end in range(len(case.text)):
        text = case.text[:end]
        for how in ({"truncated": True}, {"stopped": True}, {}):
            ended = parse([text], case.tool_format, **how)
            assert parse(text, case.tool_format, **how) == ended
            if "stopped" in how:
                assert ended.good == case.calls[: len(ended.good)]
            if "truncated" not in how and not ended.good:
                assert ended.content == text
        assert ended.good[:-1] == case.calls[: max(0, len(ended.good) - 1)]
        assert all(isinstance(arguments, dict) for _, arguments in ended.good)


_PARTS = ("<tool_call>", "</tool_call>", "<function=now>", "<parameter=city>", "</parameter>",
    "</function>", "[TOOL_CALLS]", "[ARGS]", "now", '{"name": "now"', '"arguments": ',
    "{", "}", "[", "]", "(", ")", ",", ":", '"', "\\", "'", "\n", " ", "=", "1", "null", "é", "🙂",
    "<think>", "</think>", "city", "\\u12", "<|python_tag|>")  # fmt: skip


@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.lists(st.sampled_from(_PARTS) | st.text(max_size=3), max_size=30).map("".join),
    st.data(),
    st.sampled_from([None, False, True]),
    st.booleans(),
)
@examples(400)
def test_any_text_is_parsed_alike_however_it_is_cut(
    tool_format: str, text: str, data: st.DataObject, reasons: bool | None, truncated: bool
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]
    asked: dict[str, Any] = {"reasons": reasons, "truncated": truncated}
    whole = parse([text], tool_format, **asked)
    assert parse(pieces, tool_format, **asked) == whole
    assert parse(text, tool_format, **asked) == whole
    if len(whole.calls) == len(whole.broken) and reasons is None:
        assert whole.content == text


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
))  # fmt: skip
@examples(150)
def test_any_arguments_arrive_as_they_were_written(value: object) -> None:
    for ascii_only in (True, False):
        written = json.dumps({"where": value}, ensure_ascii=ascii_only)
        text = f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>'
        parsed = parse(text, "hermes")
        assert parsed.calls == {0: ["now", written]}
    assert parse([f"[now(where={value!r})]"], "pythonic").good == [("now", {"where": value})]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", "<tool_call>get_weather</tool_call> "),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'now'}</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 70),
        ("mistral", "[TOOL_CALLS]now[ARGS](1)"),
        ("mistral", "[TOOL_CALLS][]"),
        ("llama3_json", '{"name": "now", "parameters": {"a": }}'),
        ("json", "[]"),
        ("pythonic", "[now(a=1, a=2)]"),
        ("pythonic", "[now(a=f(1))]"),
        ("pythonic", "[now(a=b'x')]"),
        ("pythonic", "[now(a={1: 2})]"),
        ("pythonic", "[now(a=1e999)]"),
        ("pythonic", "[now(a=[)]"),
        ("pythonic", "[now(a=" + "[" * 200),
        ("qwen3_coder", "<tool_call><function=now>text</function></tool_call>"),
        ("qwen3_coder", "<function=now><parameter=a>1</parameter><parameter=a>2</parameter>"),
        ("qwen3_coder", "<function=now><parameter=a>1</parameter><parameter=unfinished"),
        ("qwen3_coder", "<function=now"),
        ("hermes", '<tool_call>{"name": "now", "arguments": "[1]"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{}{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1,</tool_call>'),
        ("mistral", '[TOOL_CALLS]now"here"'),
        ("pythonic", "[now(a=[1, 2<b"),
    ],
)
def test_a_malformed_call_is_content(tool_format: str, text: str) -> None:
    parsed = parse([text], tool_format)
    assert parsed.good == []
    assert parsed.content == text
    assert parse(text, tool_format) == parsed


def test_a_call_in_python_is_sent_once_it_is_certain() -> None:
    for text in ("[now('x')]", "[now(a=1, 'x')]", "[now(a=1, b=c)]"):
        assert parse(text, "pythonic") == Parsed(content=text)
    cut = parse("[now(a=1, b=[2", "pythonic", truncated=True)
    assert (cut.calls, cut.content) == ({0: ["now", '{"a": 1']}, "")


def test_a_stop_string_within_a_call_leaves_no_call() -> None:
    for tool_format, text in (
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1'),
        ("qwen3_coder", "<function=now><parameter=a>1"),
        ("pythonic", "[now(a=1"),
    ):
        stopped = parse(text, tool_format, stopped=True)
        assert (stopped.good, stopped.content) == ([], text)


CALL = st.tuples(
    st.just("get_weather"),
    st.fixed_dictionaries(
        {},
        optional={
            "city": st.text("ab \"'\\é🙂,:", min_size=1),
            "days": st.integers(-9, 99),
            "at": st.lists(st.integers(0, 9) | st.lists(st.none() | st.booleans(), max_size=2)),
            "metric": st.booleans(),
        },
    ),
)


def written(
    tool_format: str, calls: list[tuple[str, dict[str, Any]]], as_text: bool
) -> list[list[str]]:
    """Return each call's text and the pieces that close it (only the last call's if unmarked)."""
    found: list[list[str]] = []
    for place, (name, arguments) in enumerate(calls):
        is_last = place == len(calls) - 1
        said = json.dumps(arguments, ensure_ascii=False)
        inner = list(said[len(said.rstrip("}]")) :])
        said = said.rstrip("}]")
        if as_text:
            said, inner = json.dumps(json.dumps(arguments)), []
        if tool_format in ("hermes", "qwen3"):
            call = f'<tool_call>\n{{"name": "{name}", "arguments": {said}'
            found.append([call, *inner, "}", "\n</tool_call>\n"])
        elif tool_format == "llama3_json":
            call = f'<|python_tag|>{{"name": "{name}", "parameters": {said}'
            found.append([call, *inner, "}"])
        elif tool_format == "mistral":
            found.append([f"[TOOL_CALLS]{name}[ARGS]{said}", *inner])
        elif tool_format == "json":
            call = ("[" if not place else ", ") + f'{{"name": "{name}", "parameters": {said}'
            ends = [*inner, "}"]
            found.append([call, *ends, "]"] if is_last else [call + "".join(ends)])
        elif tool_format == "pythonic":
            pairs = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            call = ("[" if not place else ", ") + f"{name}({pairs}"
            found.append([call, ")", "]"] if is_last else [f"{call})"])
        else:
            call = f"<tool_call>\n<function={name}>\n"
            for key, value in arguments.items():
                shown = value if isinstance(value, str) else json.dumps(value)
                call += f"<parameter={key}>\n{shown}\n</parameter>\n"
            call, end = call.removesuffix("</parameter>\n"), "</parameter>\n"
            found.append([call, *([end] if arguments else []), "</function>\n", "</tool_call>\n"])
    return found


@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.lists(st.just(("now", {})) | CALL, min_size=1, max_size=3),
    st.booleans(),
    st.data(),
)
@examples(400)
def test_calls_are_complete_whatever_closes_them(
    tool_format: str, calls: list[tuple[str, dict[str, Any]]], as_text: bool, data: st.DataObject
) -> None:
    """Marks at the end of each call may be missing; what came is whole calls, or content."""
    parts = written(tool_format, calls, as_text)
    left = [data.draw(st.integers(1, len(part)), "left") for part in parts]
    text = "".join("".join(part[:number]) for part, number in zip(parts, left, strict=True))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    whole = parse([text], tool_format)
    assert (whole.good, whole.broken, whole.content.strip()) == (calls, set(), "")
    assert parse([text[i:j] for i, j in pairwise([0, *cuts, len(text)])], tool_format) == whole
    for end in cuts:
        ended = parse([text[:end]], tool_format)
        assert parse(text[:end], tool_format) == ended
        assert ended.good[:-1] == calls[: max(0, len(ended.good) - 1)]
        assert all(isinstance(arguments, dict) for _, arguments in ended.good)
        assert ended.good or ended.content == text[:end]
        assert not ended.broken or ended.content


def test_a_call_after_a_malformed_one_is_found() -> None:
    text = '<tool_call>oh <tool_call>{"name": <tool_call>{"name": "now"}</tool_call>'
    parsed = parse([text], "hermes")
    assert parsed.good == [("now", {})]
    assert parsed.content == '<tool_call>oh <tool_call>{"name":'


def test_a_call_that_a_limit_cuts_off_stays_as_far_as_it_goes() -> None:
    text = 'Yes.\n<tool_call>{"name": "now", "arguments": {"a": "b'
    cut = parse(text, "hermes", truncated=True)
    assert (cut.content, cut.calls, cut.broken) == ("Yes.", {0: ["now", '{"a": "b']}, set())
    text = 'Yes.\n<tool_call>{"name": "now", '
    assert parse(text, "hermes", truncated=True).content == text


def test_arguments_come_as_they_are_written() -> None:
    parser = AnswerForm(lambda: "x", SCHEMAS, "hermes").parser()
    assert not parser.feed('<tool_call>{"name": "now", "arguments": ').calls
    first = parser.feed('{"a": "one')
    assert [(c.name, c.arguments) for c in first.calls] == [("now", ""), (None, '{'), (None, '"'),
        (None, "a"), (None, '"'), (None, ":"), (None, " "), (None, '"'), (None, "one")]  # fmt: skip
    assert "".join(c.arguments for c in parser.feed(" two").calls) == " two"
    assert parser.num_calls == 0


def test_only_the_first_call_is_returned_without_parallel_calls() -> None:
    text = CASES["hermes, text around two"].text
    parsed = parse(text, "hermes", only_one=True)
    assert parsed.good == [("get_weather", PARIS)]
    assert parsed.content == CASES["hermes, text around two"].content


def test_a_named_function_is_answered_with_its_arguments() -> None:
    parsed = parse(' {"city": "x}"} .', "json", named="get_weather")
    assert (parsed.good, parsed.content) == ([("get_weather", {"city": "x}"})], ".")
    assert parse(["no"], "json", named="get_weather") == Parsed(content="no")


def test_control_tokens_are_no_content() -> None:
    hidden = ("<tool_call>", "</tool_call>")
    text = 'a <tool_call>b</tool_call> <tool_call>{"name": "now", "arguments": 1}</tool_call>'
    parsed = parse([text], "hermes", hidden=hidden)
    assert parsed.content == 'a b {"name": "now", "arguments": 1}'
    assert parse(text, "hermes", hidden=hidden) == parsed


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for t in tools %}<function=name>… <tool_call>", "qwen3_coder"),
        ("{% if tools %}… within <tool_call></tool_call> XML tags", "hermes"),
        ("{{ '[AVAILABLE_TOOLS]' + tools }} [TOOL_CALLS]", "mistral"),
        ("{% if tools %}<|python_tag|>", "llama3_json"),
        ('tools … {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("tools: [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ tools | tojson }}", None),
    ],
)
def test_a_template_shows_the_format(source: str, expected: str | None) -> None:
    assert format_of_template(source) == expected


@pytest.mark.parametrize(
    ("text", "has_begun", "reasoning", "content"),
    [
        (
            "<think>\nLet me see. \n\n 1 < 2\n</think>\n\nTwo. ",
            False,
            "Let me see. \n\n 1 < 2",
            "Two. ",
        ),
        ("\n<think></think>Two.", False, "", "Two."),
        ("hm\n</think>\n\nTwo.", True, "hm", "Two."),
        ("<think>hm</think>Two <think>.", True, "hm", "Two <think>."),
        ("  Two.\n", False, "", "  Two.\n"),
        ("never <think>to an end", True, "never <think>to an end", ""),
        ("<think>cut </thin", False, "cut </thin", ""),
        ("<th", False, "", "<th"),
        ("hm</think>\n ", True, "hm", ""),
    ],
)
def test_reasoning_is_taken_out(text: str, has_begun: bool, reasoning: str, content: str) -> None:
    expected = Parsed(content, reasoning)
    assert parse(text, None, reasons=has_begun) == expected
    for at in range(len(text) + 1):
        assert parse([text[:at], text[at:]], None, reasons=has_begun) == expected


def test_calls_come_after_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>I could {call}</think>\n\n{call}"
    for pieces in ([text], text):
        parsed = parse(pieces, "hermes", reasons=False)
        assert (parsed.reasoning, parsed.content) == (f"I could {call}", "")
        assert parsed.good == [("f", {})]


def test_reasoning_can_be_left_out() -> None:
    parsed = parse("<think>hm</think>Two.", None, reasons=False, shows_reasoning=False)
    assert parsed == Parsed("Two.")


@pytest.mark.parametrize(
    ("prompt", "opens", "deepseek", "qwen"),
    [
        ("<|im_start|>assistant\n", True, True, False),
        ("<|im_start|>assistant\n<think>\n", True, True, True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", True, False, False),
        ("say <think> please<|im_end|>\n<|im_start|>assistant\n", True, True, False),
        ("<|im_start|>assistant\nOnce upon", False, False, False),
    ],
)
def test_the_prompt_shows_whether_reasoning_has_begun(
    prompt: str, opens: bool, deepseek: bool, qwen: bool
) -> None:
    assert begins_with_reasoning("deepseek_r1", prompt, opens_a_turn=opens) is deepseek
    assert begins_with_reasoning("qwen3", prompt, opens_a_turn=opens) is qwen
