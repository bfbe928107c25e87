"""A table of text becomes flags: names, values, bounds, choices, defaults, exclusions."""

import argparse
from dataclasses import dataclass
from typing import Any

import pytest

from base.flags import Dialect, Parser, add_flags, configured, defaults_of, refuse

TABLE = """
--json                        print JSON
or --csv                      print CSV

server
--port PORT = 8080            port to bind,
                              on every address
--retries, -r N[0..5] = 2     further attempts
--share NUMBER(0..1] = 0.5    part of the load
--level debug|info = info     least severe message
--label TEXT …                one or more
--[no-]watch = true           follow the file
--size SIZE                   read by the program
"""


def parser(dialect: Dialect | None = None, table: str = TABLE) -> Parser:
    made = Parser(prog="pointsman test")
    add_flags(made, table, dialect)
    return made


def parsed(*argv: str, dialect: Dialect | None = None) -> dict[str, Any]:
    return vars(parser(dialect).parse_args(argv))


def test_defaults_are_those_of_the_table_else_of_the_program() -> None:
    assert parsed(dialect=Dialect(defaults={"size": 7, "port": 1})) == {
        "json": False,
        "csv": False,
        "port": 8080,
        "retries": 2,
        "share": 0.5,
        "level": "info",
        "label": [],
        "watch": True,
        "size": 7,
    }


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ("-r 5", "retries", 5),
        ("--share 1", "share", 1.0),
        ("--level debug", "level", "debug"),
        ("--label a b --label c", "label", ["a", "b", "c"]),
        ("--no-watch", "watch", False),
        ("--csv", "csv", True),
    ],
)
def test_a_value_is_read_as_the_table_says(argv: str, name: str, value: object) -> None:
    assert parsed(*argv.split())[name] == value


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("--retries 6", "argument --retries/-r: takes a whole number from 0 to 5, not '6'"),
        ("--retries 1.5", "takes a whole number from 0 to 5, not '1.5'"),
        ("--port 0", "argument --port: takes a whole number from 1 to 65535, not '0'"),
        ("--share 0", "takes a number from 0 to 1, not '0'"),
        ("--share nan", "takes a number from 0 to 1, not 'nan'"),
        ("--level inf", "did you mean info?"),
        ("--labels a", "did you mean --label?"),
        ("--lab a", "unrecognized arguments"),
        ("--json --csv", "not allowed with argument --json"),
        ("--size 1", "argument --size: too small"),
        ("--size 2", "argument --size: unlucky"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_status_2(
    argv: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(text: str) -> int:
        raise {"1": ValueError("too small"), "2": LookupError("unlucky")}[text]

    dialect = Dialect(readers={"SIZE": read}, errors=(LookupError,))
    with pytest.raises(SystemExit) as ended:
        parsed(*argv.split(), dialect=dialect)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert reason in said
    assert said.startswith("pointsman test: ")
    assert said.endswith("(see pointsman test --help)\n")
    assert said.count("\n") == 1


def test_help_has_groups_texts_and_every_default() -> None:
    text = " ".join(parser().format_help().split())
    assert "server: --port PORT port to bind, on every address (default 8080)" in text
    assert "-r N further attempts (default 2)" in text
    assert "{debug,info} least severe message (default info)" in text


def test_arguments_are_required_optional_or_any_number() -> None:
    table = "<file> FILE  read\n[level] low|high = low  pressure\n[rest …] NAME  others"
    parse = parser(table=table).parse_args
    assert vars(parse(["f"])) == {"file": "f", "level": "low", "rest": []}
    assert vars(parse(["f", "high", "a", "b"])) == {
        "file": "f",
        "level": "high",
        "rest": ["a", "b"],
    }
    with pytest.raises(SystemExit):
        parse([])


def test_a_switch_takes_a_truth_where_the_dialect_does() -> None:
    made = parser(Dialect(takes_truth=True), "--secure = ?\n--fast")
    assert vars(made.parse_args([])) == {"secure": None, "fast": False}
    assert vars(made.parse_args(["--secure", "--fast=F"])) == {"secure": True, "fast": False}
    with pytest.raises(SystemExit):
        made.parse_args(["--fast=maybe"])


def test_a_refused_flag_gives_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    made = parser(table="")
    refuse(made, {"--processes": ("is gone", ("1",))})
    assert made.parse_args(["--processes=1"]) == argparse.Namespace(processes="1")
    with pytest.raises(SystemExit):
        made.parse_args(["--processes=2"])
    assert "argument --processes: is gone" in capsys.readouterr().err
    assert "processes" not in made.format_help()


@pytest.mark.parametrize(
    ("table", "dialect"),
    [("--Port N", Dialect()), ("--port N", Dialect(fields={"--prot": "port"}))],
)
def test_a_mistake_in_a_table_is_an_error(table: str, dialect: Dialect) -> None:
    with pytest.raises(ValueError, match="the table of flags"):
        parser(dialect, table)


def test_flags_fill_a_dataclass() -> None:
    @dataclass(frozen=True)
    class Options:
        port: int
        retry_limit: int = 9
        other: str = "o"

    dialect = Dialect(defaults=defaults_of(Options), fields={"--retries": "retry_limit"})
    made = parser(dialect, "--port PORT\n--retries N")
    given = made.parse_args(["--port", "1"])
    assert configured(Options, given) == Options(1)
    assert configured(Options, given, other="p") == Options(1, 9, "p")
