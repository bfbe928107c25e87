"""The few protobuf shapes that repeat all over a bootstrap."""

from datetime import timedelta

from envoy.config.core.v3 import address_pb2, extension_pb2
from google.protobuf import any_pb2, duration_pb2, wrappers_pb2
from google.protobuf.message import Message

from fleet.envoy.settings import Address, SocketAddress


def packed(message: Message) -> any_pb2.Any:
    wrapped = any_pb2.Any()
    wrapped.Pack(message)
    return wrapped


def extension(name: str, message: Message) -> extension_pb2.TypedExtensionConfig:
    return extension_pb2.TypedExtensionConfig(name=name, typed_config=packed(message))


def seconds(value: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromTimedelta(timedelta(seconds=value))
    return duration


def uint32(value: int) -> wrappers_pb2.UInt32Value:
    return wrappers_pb2.UInt32Value(value=value)


def boolean(value: bool) -> wrappers_pb2.BoolValue:
    return wrappers_pb2.BoolValue(value=value)


def address(value: Address) -> address_pb2.Address:
    """A TCP address or a unix socket that only its owner may open."""
    if isinstance(value, SocketAddress):
        socket = address_pb2.SocketAddress(address=value.host, port_value=value.port)
        return address_pb2.Address(socket_address=socket)
    return address_pb2.Address(pipe=address_pb2.Pipe(path=value.path, mode=0o600))
