"""Event sequences that bring a stream machine into each of its states."""

from msgspec.structs import replace

from picker.errors import Code, DropReason, RefusedError
from picker.extproc.machine.messages import (
    Action,
    BodyMode,
    Closed,
    Ending,
    RequestBody,
    RequestHeaders,
    ResponseHeaders,
)
from picker.extproc.machine.stream import State, StreamMachine
from picker.types import RouteDecision

HEADERS = {":path": "/v1/completions", ":method": "POST"}
DECISION = RouteDecision("10.0.0.1:8000")
SKIPPING = RouteDecision("10.0.0.1:8000", skip_response=True)
REFUSAL = RefusedError(Code.SERVICE_UNAVAILABLE, "nobody there", DropReason.NO_ENDPOINTS)


def feed(machine: StreamMachine, *events: object) -> list[Action]:
    actions: list[Action] = []
    for event in events:
        if isinstance(event, RouteDecision):
            actions = machine.routed(event)
        elif isinstance(event, RefusedError):
            actions = machine.dropped(event)
        elif isinstance(event, DropReason):
            actions = machine.evicted(event)
        else:
            actions = machine.receive(event)  # type: ignore[arg-type]
    return actions


def fed(*events: object) -> StreamMachine:
    machine = StreamMachine()
    feed(machine, *events)
    return machine


BUFFERED_HEADERS = RequestHeaders(HEADERS, request_body=BodyMode.BUFFERED)


def ways(begun: State, headers: RequestHeaders) -> dict[State, tuple[object, ...]]:
    body_done = (headers, RequestBody(b"{}", end_of_stream=True))
    return {
        State.START: (),
        begun: (headers,),
        State.ROUTING: body_done,
        State.ROUTED: (*body_done, DECISION),
        State.RESPONDING: (*body_done, DECISION, ResponseHeaders(200)),
        State.DONE: (*body_done, DECISION, ResponseHeaders(204, end_of_stream=True)),
        State.REFUSED: (*body_done, REFUSAL),
        State.SKIPPED: (replace(headers, response_body=BodyMode.ABSENT), *body_done[1:], SKIPPING),
        State.OBSERVING: (replace(headers, only_observes=True),),
        State.CLOSED: (Closed(Ending.CANCELLED),),
    }


WAY_TO = ways(State.RECEIVING, RequestHeaders(HEADERS))
WAY_TO_BUFFERED = ways(State.AWAITING_BODY, BUFFERED_HEADERS)
# Where the proxy has answered the client before it showed a request.
WAY_WITHOUT_REQUEST: dict[State, tuple[object, ...]] = {
    State.RESPONDING: (ResponseHeaders(401),),
    State.DONE: (ResponseHeaders(401, end_of_stream=True),),
    State.OBSERVING: (ResponseHeaders(401, only_observes=True),),
}
