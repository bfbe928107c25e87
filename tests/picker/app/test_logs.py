"""A log line is text, or one JSON object."""

import json
import logging
import sys

from picker.app.logs import JsonFormatter


def record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("picker.app", logging.WARNING, "f.py", 1, text, arguments, None)


def test_a_line_of_json_has_the_keys_of_the_reference() -> None:
    entry = json.loads(JsonFormatter().format(record("two\nlines of %s", "ü")))
    assert (entry["level"], entry["logger"]) == ("warning", "picker.app")
    assert entry["msg"] == "two\nlines of ü"
    assert entry["ts"].endswith("+00:00")


def test_a_traceback_is_a_member_of_the_object() -> None:
    one = record("failed")
    try:
        raise ValueError("why")
    except ValueError:
        one.exc_info = sys.exc_info()
    text = JsonFormatter().format(one)
    assert "\n" not in text
    assert "ValueError: why" in json.loads(text)["stacktrace"]
