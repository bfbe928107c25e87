"""Reads the size of a PNG, GIF, JPEG or WebP image from a fixed number of bytes of its header."""

import binascii
from struct import Struct

Size = tuple[int, int]

_URL_HEAD_CHARACTERS = 256
_HEADER_CHARACTERS = 64
_JPEG_CHARACTERS = 128 * 1024  # up to 64 KiB of metadata may precede the size
_PNG = b"\x89PNG\r\n\x1a\n"
_BIG_ENDIAN_UINT32S = Struct(">II")
_BIG_ENDIAN_UINT16S = Struct(">HH")
_LITTLE_ENDIAN_UINT16S = Struct("<HH")
_MAX_JPEG_STEPS = 1024  # far more segments and fill bytes than a camera writes before the size
_NO_FRAME = frozenset((0xC4, 0xC8, 0xCC))  # Huffman tables and other non-frames among 0xC0..0xCF
_STANDALONE = frozenset((0x01, *range(0xD0, 0xD8)))


def data_url_image_size(url: str) -> Size | None:
    """Read the width and height in pixels of an image in a base64 `data:` URL; None if unknown."""
    if not url.startswith("data:"):
        return None
    comma = url.find(",", 0, _URL_HEAD_CHARACTERS)
    if comma < 0 or not url[:comma].endswith(";base64"):
        return None
    return base64_image_size(url, comma + 1)


def base64_image_size(text: str, begin: int = 0) -> Size | None:
    header = _decoded(text, begin, _HEADER_CHARACTERS)
    if header.startswith(b"\xff\xd8"):
        return _known(_jpeg(_decoded(text, begin, _JPEG_CHARACTERS)))
    return _known(image_size(header))


def image_size(data: bytes) -> Size | None:
    """Read width and height; `data` is at least the first 32 bytes, or all headers of a JPEG."""
    if data.startswith(_PNG) and len(data) >= 24:
        return _BIG_ENDIAN_UINT32S.unpack_from(data, 16)
    if data.startswith((b"GIF87a", b"GIF89a")) and len(data) >= 10:
        return _LITTLE_ENDIAN_UINT16S.unpack_from(data, 6)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP" and len(data) >= 30:
        return _webp(data)
    if data.startswith(b"\xff\xd8"):
        return _jpeg(data)
    return None


def _known(size: Size | None) -> Size | None:
    return size if size is not None and size[0] > 0 and size[1] > 0 else None


def _decoded(text: str, begin: int, num_characters: int) -> bytes:
    piece = text[begin : begin + num_characters]
    try:
        return binascii.a2b_base64(piece[: len(piece) - len(piece) % 4])
    except ValueError:  # characters beyond ASCII, or a broken end
        return b""


def _webp(data: bytes) -> Size | None:
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = data[24:27], data[27:30]
        return int.from_bytes(width, "little") + 1, int.from_bytes(height, "little") + 1
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width16, height16 = _LITTLE_ENDIAN_UINT16S.unpack_from(data, 26)
        return width16 & 0x3FFF, height16 & 0x3FFF
    return None


def _jpeg(data: bytes) -> Size | None:
    """Walk the segments to the first frame header; bounded, because a step may be one byte."""
    at = 2
    for _ in range(_MAX_JPEG_STEPS):
        if at + 9 > len(data) or data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker in _STANDALONE:
            at += 2
        elif 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            height, width = _BIG_ENDIAN_UINT16S.unpack_from(data, at + 5)
            return width, height
        else:
            length = int.from_bytes(data[at + 2 : at + 4], "big")
            if length < 2:
                return None
            at += 2 + length
    return None
