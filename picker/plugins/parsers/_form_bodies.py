"""Reads the text of one field from the bodies of forms (`multipart/form-data`, RFC 7578).

Parts are found by their delimiters, so that a file of any size is skipped without a copy.
"""

from collections.abc import Iterator
from email.message import Message
from itertools import pairwise

MAX_DELIMITERS = 1_000  # including lines that begin like one
MAX_HEADER_BYTES = 16 * 1024  # a part has two headers
MAX_FIELD_BYTES = 4 * 1024  # the name of a model is short
_BLANK_LINE = b"\r\n\r\n"
_AFTER_DELIMITER = (b"\r", b"-", b" ", b"\t")  # the line ends, the form ends, or white space


def form_field(body: bytes, content_type: str, name: str) -> str:
    """Return the text of the last field called `name`, "" without one; files are not fields.

    Parts beyond the limits, and the last part of a truncated form, are skipped.
    """
    boundary = _header("content-type", content_type).get_boundary()
    if not boundary:
        return ""
    delimiter, found = b"\r\n--" + boundary.encode("utf-8", "replace"), ""
    for start, end in pairwise(_delimiters(body, delimiter)):
        head = start + len(delimiter)
        # The line break of the next delimiter may also end the head of an empty part.
        head_end = body.find(_BLANK_LINE, head, min(head + MAX_HEADER_BYTES, end + 2))
        text = head_end + len(_BLANK_LINE)
        is_short = head_end >= 0 and end - text <= MAX_FIELD_BYTES
        if is_short and _is_field(body[head:head_end], name):
            found = body[text:end].decode("utf-8", "replace")
    return found


def _delimiters(body: bytes, delimiter: bytes) -> Iterator[int]:
    """Yield where each complete delimiter begins; the first needs no line break before it."""
    at = -2 if body.startswith(delimiter[2:]) else body.find(delimiter)
    # Clients choose the number of delimiters; each costs a search.
    for _ in range(MAX_DELIMITERS):
        if at == -1:
            break
        behind = at + len(delimiter)
        if body[behind : behind + 1] in _AFTER_DELIMITER:
            yield at
        at = body.find(delimiter, behind)


def _is_field(head: bytes, name: str) -> bool:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            said = _header("content-disposition", value.strip())
            is_file = said.get_filename() is not None
            return not is_file and said.get_param("name", header="content-disposition") == name
    return False


def _header(name: str, value: str) -> Message:
    message = Message()
    message[name] = value
    return message
