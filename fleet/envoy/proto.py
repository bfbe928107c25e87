"""The shapes that repeat all over a bootstrap, in protobuf's JSON with Envoy's own field names."""

from typing import Any, TypeAlias

from fleet.envoy.settings import Address, SocketAddress

Json: TypeAlias = dict[str, Any]


def packed(kind: str, **fields: Any) -> Json:
    return {"@type": f"type.googleapis.com/{kind}", **fields}


def extension(name: str, kind: str, **fields: Any) -> Json:
    return {"name": name, "typed_config": packed(kind, **fields)}


def seconds(value: float) -> str:
    return f"{value:.6f}s"


def address(value: Address) -> Json:
    """Return the JSON of a TCP address, or of a unix socket that only its owner may open."""
    if isinstance(value, SocketAddress):
        return {"socket_address": {"address": value.host, "port_value": value.port}}
    return {"pipe": {"path": value.path, "mode": 0o600}}
