"""The protocol by which one engine takes KV from another. No sockets here.

A frame is a length (4 bytes, little-endian), a body (msgpack) and a MAC of 32 bytes:

    taker                                    keeper
    Hello(version, nonce)              →
                                       ←     Challenge(nonce)
    Fetch(which, of what, from where)  →
                                       ←     Reply(error, or size), the bytes, Tag

A question to the exporter's caches (`worker.kv.asked`) follows the `Fetch`, with its tag. A reply
may name memory, which the taker maps, or reads by NIXL; it says whether it could (`Mapped`), and
bytes and tag follow if not. Of a device's memory, the taker says so when it has copied all, and an
empty tag confirms that it was held until then; if it could not, another reply follows. A MAC is
HMAC-SHA256 over the kind of frame, both nonces and the body (`Hello`: its own nonce alone), so what
was recorded of one connection is worth nothing on another. Bytes are encrypted by AES-256-GCM under
a key made of key and nonces; what NIXL reads is not, but has the same tag (GMAC).
"""

import hmac
import secrets
from typing import TypeVar

import msgspec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from worker.errors import KvTransferError
from worker.kv.content import KvShape

VERSION = 6
NONCE_BYTES = 16
MAC_BYTES = 32
LENGTH_BYTES = 4
MAX_BODY_BYTES = 1 << 16


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    version: int
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    nonce: bytes


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Asks for the KV of tokens `start` to `num_tokens` − 1 of the export that `digest` names,
    which ends then; if both are the same, for none of it. `maps`: memory of this machine will do.
    `waits`: the reply, without bytes, is to come as soon as the KV is exported. `engine_id` None:
    whichever engine this is. `reads`: the taker has NIXL.

    With `asked`: for the cached KV of `num_tokens` tokens, from `start` on; a question of `asked`
    bytes follows. `transfer_id` is then a promise to be redeemed, or empty.
    """

    engine_id: str | None
    transfer_id: str
    digest: bytes
    start: int
    num_tokens: int
    shape: KvShape
    maps: bool = False
    waits: bool = False
    reads: bool = False
    asked: int | None = None


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """Memory that process `pid` has open as file `fd` under a random name."""

    pid: int
    fd: int
    name: str


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """Memory at an address of the process whose NIXL agent's metadata this is, or of the device's
    memory with this handle.
    """

    metadata: bytes
    address: int


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """`error` says why no bytes follow; else `num_bytes` do, or are in memory that is named."""

    error: str | None
    num_bytes: int = 0
    shared: Shared | None = None
    lent: Lent | None = None
    pooled: Lent | None = None


class Mapped(msgspec.Struct, frozen=True, array_like=True, tag="mapped"):
    """The taker's answer to memory that was named: whether it has it."""

    ok: bool


class Tag(msgspec.Struct, frozen=True, array_like=True, tag="tag"):
    """The tag of all bytes: detects damaged, missing, mixed-up or replaced ones."""

    tag: bytes


Sent = Hello | Challenge | Fetch | Reply | Mapped | Tag
Frame = TypeVar("Frame", Hello, Challenge, Fetch, Reply, Mapped, Tag)


class Seal:
    """Makes and checks the frames of one connection. Owns the nonces that it has seen."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonces = b""
        self._num_ciphers = 0

    @staticmethod
    def nonce() -> bytes:
        return secrets.token_bytes(NONCE_BYTES)

    def encode(self, frame: Sent) -> bytes:
        body = msgspec.msgpack.encode(frame)
        self._note(frame)
        return len(body).to_bytes(LENGTH_BYTES, "little") + body + self._mac(body)

    def decode(self, data: bytes, kind: type[Frame]) -> Frame:
        """Return the frame in a body and its MAC. Raises `KvTransferError` if it is invalid."""
        body, mac = data[:-MAC_BYTES], data[-MAC_BYTES:]
        try:
            frame = msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise KvTransferError(f"the other end says what is no {kind.__name__}") from error
        # Before the check: the MAC of Hello and Challenge covers their own nonce.
        self._note(frame)
        if not hmac.compare_digest(mac, self._mac(body)):
            raise KvTransferError("the other end has another key")
        return frame

    def data_cipher(self) -> Cipher[GCM]:
        """Return the cipher of the next bytes, each with its own nonce, after the handshake."""
        key = hmac.digest(self._key, self._nonces + b"data", "sha256")
        # GCM forbids a second use of a nonce; both ends count the transfers of a connection alike.
        nonce = self._num_ciphers.to_bytes(12, "little")
        self._num_ciphers += 1
        return Cipher(AES(key), GCM(nonce))

    def _note(self, frame: object) -> None:
        if isinstance(frame, Hello | Challenge):
            if len(frame.nonce) != NONCE_BYTES:
                raise KvTransferError("the other end sent a nonce of the wrong size")
            self._nonces += frame.nonce

    def _mac(self, body: bytes) -> bytes:
        # The body begins with its tag, and the nonces have a fixed size at each stage.
        return hmac.digest(self._key, self._nonces + body, "sha256")


def body_size(prefix: bytes) -> int:
    """Return the number of bytes after the length, MAC included. Raises `KvTransferError`."""
    size = int.from_bytes(prefix, "little")
    if size > MAX_BODY_BYTES:
        raise KvTransferError("the other end speaks another protocol")
    return size + MAC_BYTES
