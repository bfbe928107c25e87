"""Fields of forms, wherever their part is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.plugins.parsers._form_bodies import (
    MAX_DELIMITERS,
    MAX_FIELD_BYTES,
    MAX_HEADER_BYTES,
    form_field,
)

TYPE = "multipart/form-data; boundary=XyZ"
AUDIO = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav'


def field(value: bytes, name: str = '"model"') -> bytes:
    return b"Content-Disposition: form-data; name=%b\r\n\r\n%b" % (name.encode(), value)


def form(*parts: bytes, end: bytes = b"--") -> bytes:
    return b"".join(b"--XyZ\r\n%b\r\n" % part for part in parts) + b"--XyZ" + end + b"\r\n"


NEARLY = b"\r\n--XyZa\r\n--XyZ1\r\n\r\n--Xy\r\nContent-Disposition: form-data; name=model\r\n\r\nno"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (form(field(b"whisper")), "whisper"),
        (form(AUDIO + b"\r\n\r\n" + bytes(100_000), field(b"whisper")), "whisper"),
        (form(field(b"whisper"), AUDIO + b"\r\n\r\n" + NEARLY), "whisper"),
        (form(field(b"a"), field(b"b")), "b"),
        (form(field(b"")), ""),
        (form(field("größe/x y".encode())), "größe/x y"),
        (form(field(b"m", "model")), "m"),
        (form(field(b"m").replace(b"Content-Disposition: ", b"content-disposition:")), "m"),
        (form(b"Content-Type: text/plain\r\n" + field(b"m")), "m"),
        (b"preamble\r\n" + form(field(b"m")) + b"epilogue", "m"),
        (form(field(b"m")).replace(b"--XyZ\r\n", b"--XyZ \t\r\n"), "m"),
        (form(field(b"a\r\nb")), "a\r\nb"),
        (form(field(b"m", '"models"')), ""),
        (form(field(b"m", '"model"; filename="model"')), ""),
        (form(b"\r\nno head", field(b"m")), "m"),
        (form(field(b"x" * MAX_FIELD_BYTES)), "x" * MAX_FIELD_BYTES),
        (form(field(b"x" * (MAX_FIELD_BYTES + 1))), ""),
        (form(b"a: " + b"x" * MAX_HEADER_BYTES + b"\r\n\r\n", field(b"m")), "m"),
        (form(field(b"m"), *[b"\r\n"] * MAX_DELIMITERS, field(b"n")), "m"),
        (form(field(b"m"), b"\r\n" + b"\r\n--XyZa" * MAX_DELIMITERS, field(b"n")), "m"),
        (form(b"no blank line", field(b"m")), "m"),
        (form(field(b"m")).replace(b"\r\n--XyZ--\r\n", b""), ""),
        (form(field(b"m")).replace(b"\r\n", b"\n"), ""),
        (b'{"model":"m"}', ""),
        (b"", ""),
    ],
)
def test_a_field_is_found(body: bytes, found: str) -> None:
    assert form_field(body, TYPE, "model") == found


@pytest.mark.parametrize(
    ("content_type", "found"),
    [
        ('multipart/form-data; charset=utf-8; boundary="XyZ"', "m"),
        ("Multipart/Form-Data;BOUNDARY=XyZ", "m"),
        ("multipart/form-data; boundary=xyz", ""),
        ("multipart/form-data; boundary=", ""),
        ("multipart/form-data", ""),
    ],
)
def test_the_boundary_is_that_of_the_header(content_type: str, found: str) -> None:
    assert form_field(form(field(b"m")), content_type, "model") == found


@given(st.lists(st.sampled_from([b"--XyZ", b"\r\n", b"--", b"XyZ", *field(b"m").split(b" ")])))
def test_any_bytes_are_accepted(parts: list[bytes]) -> None:
    form_field(b"".join(parts), TYPE, "model")
