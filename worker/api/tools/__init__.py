"""Parsers of an answer's text, as it comes: tool calls and reasoning. Pure: no tokens, no requests,
no JSON bodies.

`answer` reads an answer by the formats in `json_calls`, `python_calls` and `xml_calls`, which read
from a `scanner` and write to a `writer`.
"""
