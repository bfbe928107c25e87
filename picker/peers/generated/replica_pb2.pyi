# Written by scripts/gen-protos from proto/pointsman/replica/v1/replica.proto; edits are lost.
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Report(_message.Message):
    __slots__ = ("hello", "batch", "loads", "seed", "age_milliseconds", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    AGE_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    batch: Batch
    loads: Loads
    seed: Seed
    age_milliseconds: int
    goodbye: bool
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., loads: _Optional[_Union[Loads, _Mapping]] = ..., seed: _Optional[_Union[Seed, _Mapping]] = ..., age_milliseconds: _Optional[int] = ..., goodbye: _Optional[bool] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("replica_id", "last_sequence", "seed")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    replica_id: bytes
    last_sequence: int
    seed: Seed
    def __init__(self, replica_id: _Optional[bytes] = ..., last_sequence: _Optional[int] = ..., seed: _Optional[_Union[Seed, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "replica_id", "pool", "seed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    version: int
    replica_id: bytes
    pool: str
    seed: Seed
    def __init__(self, version: _Optional[int] = ..., replica_id: _Optional[bytes] = ..., pool: _Optional[str] = ..., seed: _Optional[_Union[Seed, _Mapping]] = ...) -> None: ...

class Seed(_message.Message):
    __slots__ = ("fingerprint", "value", "is_settled", "chosen_at_milliseconds", "chosen_by")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    IS_SETTLED_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_AT_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_BY_FIELD_NUMBER: _ClassVar[int]
    fingerprint: int
    value: int
    is_settled: bool
    chosen_at_milliseconds: int
    chosen_by: bytes
    def __init__(self, fingerprint: _Optional[int] = ..., value: _Optional[int] = ..., is_settled: _Optional[bool] = ..., chosen_at_milliseconds: _Optional[int] = ..., chosen_by: _Optional[bytes] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("sequence", "endpoints", "plugins", "placements", "bindings")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    plugins: _containers.RepeatedCompositeFieldContainer[Plugin]
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    bindings: _containers.RepeatedCompositeFieldContainer[Binding]
    def __init__(self, sequence: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., plugins: _Optional[_Iterable[_Union[Plugin, _Mapping]]] = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., bindings: _Optional[_Iterable[_Union[Binding, _Mapping]]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("key", "host_port", "incarnation")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HOST_PORT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    key: str
    host_port: str
    incarnation: str
    def __init__(self, key: _Optional[str] = ..., host_port: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Plugin(_message.Message):
    __slots__ = ("name", "seed_fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    seed_fingerprint: int
    def __init__(self, name: _Optional[str] = ..., seed_fingerprint: _Optional[int] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("plugin", "endpoint", "capacity", "hashes")
    PLUGIN_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    plugin: int
    endpoint: int
    capacity: int
    hashes: bytes
    def __init__(self, plugin: _Optional[int] = ..., endpoint: _Optional[int] = ..., capacity: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class Binding(_message.Message):
    __slots__ = ("plugin", "endpoint", "session", "moves")
    PLUGIN_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    plugin: int
    endpoint: int
    session: str
    moves: int
    def __init__(self, plugin: _Optional[int] = ..., endpoint: _Optional[int] = ..., session: _Optional[str] = ..., moves: _Optional[int] = ...) -> None: ...

class Loads(_message.Message):
    __slots__ = ("version", "is_whole", "loads")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    version: int
    is_whole: bool
    loads: _containers.RepeatedCompositeFieldContainer[Load]
    def __init__(self, version: _Optional[int] = ..., is_whole: _Optional[bool] = ..., loads: _Optional[_Iterable[_Union[Load, _Mapping]]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("plugin", "endpoint", "requests", "tokens")
    PLUGIN_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    plugin: str
    endpoint: str
    requests: int
    tokens: int
    def __init__(self, plugin: _Optional[str] = ..., endpoint: _Optional[str] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...
