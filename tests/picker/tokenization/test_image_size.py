"""The first bytes of an image file give its size."""

import base64
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.tokenization.image_size import base64_image_size, data_url_image_size, image_size


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + pack(">I4sII", 13, b"IHDR", width, height) + bytes(16)


def jpeg(width: int, height: int, *segments: bytes, frame: int = 0xC0) -> bytes:
    parts = (b"\xff\xe0" + pack(">H", len(data) + 2) + data for data in segments)
    header = b"\xff" + bytes([frame]) + pack(">HBHHB", 17, 8, height, width, 3)
    return b"\xff\xd8" + b"".join(parts) + header + bytes(9)


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + pack("<HH", width, height) + bytes(20)


def webp(kind: bytes, data: bytes) -> bytes:
    return b"RIFF" + bytes(4) + b"WEBP" + kind + bytes(4) + data + bytes(16)


def lossy(width: int, height: int) -> bytes:
    """Return a lossy WebP file; the two high bits of a size are a scale."""
    return webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + pack("<HH", width | 0x4000, height))


def lossless(width: int, height: int) -> bytes:
    return webp(b"VP8L", b"\x2f" + pack("<I", width - 1 | height - 1 << 14))


def extended(width: int, height: int) -> bytes:
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return webp(b"VP8X", bytes(4) + sizes)


FILES = {
    "png": png(640, 361),
    "gif": gif(640, 361),
    "jpeg": jpeg(640, 361),
    "progressive jpeg": jpeg(640, 361, b"JFIF" * 9, b"\0" * 60000, frame=0xC2),
    "lossy webp": lossy(640, 361),
    "lossless webp": lossless(640, 361),
    "extended webp": extended(640, 361),
}


@pytest.mark.parametrize("kind", FILES)
def test_each_format_has_its_size_read(kind: str) -> None:
    data = FILES[kind]
    text = base64.b64encode(data).decode()
    assert image_size(data) == (640, 361)
    assert base64_image_size(text) == (640, 361)
    assert data_url_image_size(f"data:image/x;base64,{text}") == (640, 361)


def test_tables_and_fill_bytes_of_a_jpeg_are_skipped() -> None:
    """The marker of a Huffman table is among those of frames."""
    table = b"\xff\xc4" + pack(">H", 12) + bytes(10)
    data = b"\xff\xd8\xff\x01\xff\xd0" + table + b"\xff\xff" + jpeg(5, 7)[3:]
    assert image_size(data) == (5, 7)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "https://example.org/i.png",
        "data:image/png;base64",
        "data:image/png,%89PNG",
        "data:" + "x" * 300 + ";base64," + base64.b64encode(png(1, 1)).decode(),
        "data:image/png;base64,",
        "data:image/png;base64,!!!!",
        "data:image/png;base64,éééé",
        "data:image/png;base64," + base64.b64encode(png(1, 1)[:20]).decode(),
        "data:image/png;base64," + base64.b64encode(png(0, 5)).decode(),
        "data:image/png;base64," + base64.b64encode(png(5, 0)).decode(),
        "data:image/jpeg;base64," + base64.b64encode(jpeg(0, 5)).decode(),
        "data:image/jpeg;base64," + base64.b64encode(b"\xff\xd8\xff\xe0\0\1" + bytes(9)).decode(),
        "data:image/jpeg;base64,"
        + base64.b64encode(jpeg(5, 5, bytes(65000), bytes(65000))).decode(),
        "data:image/webp;base64," + base64.b64encode(webp(b"ALPH", bytes(9))).decode(),
        "data:image/bmp;base64," + base64.b64encode(b"BM" + bytes(50)).decode(),
    ],
)
def test_other_urls_have_no_size(url: str) -> None:
    assert data_url_image_size(url) is None


@given(st.sampled_from(["", *map(str, FILES)]), st.binary(max_size=80), st.integers(0, 40))
def test_any_bytes_have_a_size_or_none(kind: str, noise: bytes, prefix: int) -> None:
    data = FILES.get(kind, b"")[:prefix] + noise
    for text in (base64.b64encode(data).decode(), noise.decode("latin-1")):
        size = base64_image_size(text)
        assert size is None or min(size) > 0


@pytest.mark.parametrize("filler", [b"\xff", b"\xff\xd0", b"\xff\xe0\0\2"])
def test_the_search_for_the_size_of_a_jpeg_is_bounded(filler: bytes) -> None:
    """A body may contain hundreds of files that consist of filler."""
    picture = jpeg(640, 361)
    few, many = (picture[:2] + filler * number + picture[2:] for number in (500, 2000))
    assert image_size(few) == (640, 361)
    assert image_size(many) is None
