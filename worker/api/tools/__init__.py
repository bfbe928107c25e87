"""Parsers that find tool calls and reasoning in an answer's text as it comes. Pure: they know no
tokens, requests or JSON bodies.

`answer` reads an answer by the formats in `json_calls`, `python_calls` and `xml_calls`, which read
from a `scanner` and write to a `writer`.
"""
