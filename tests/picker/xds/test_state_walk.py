"""Clients of both variants over a slow line, in any order of events.

Once nothing moves any more, a client has the current state, and every response was answered
exactly once. A client refuses a response with any content that begins with `!`.
"""

from collections import deque
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from picker.xds.state import delta, sotw
from picker.xds.state.cache import Cache, XdsResource, resource_of
from picker.xds.state.delta import DeltaSession
from picker.xds.state.sotw import SotwSession
from picker.xds.state.subscription import Acknowledgement
from tests.depth import examples

NAMES = ("a", "b", "c")
A_NAME = st.sampled_from(NAMES)
CONTENTS = st.sampled_from(["1", "2", "3", "!"])
SETS = st.dictionaries(A_NAME, CONTENTS)


def is_refused(resources: tuple[XdsResource, ...]) -> bool:
    return any(one.body.startswith(b"!") for one in resources)


class Walk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()
        self.wanted: set[str] = set()
        self.view: dict[str, str] = {}  # what the client has, "" and absence are the same
        self.versions: dict[str, str] = {}
        self.held: set[str] = set()  # names of which an earlier stream has sent last
        self.connect()

    def connect(self) -> None:
        self.session: Any = self.new_session()
        self.to_server: deque[Any] = deque()
        self.to_client: deque[Any] = deque()
        self.sent = self.answered = 0
        self.nonce = ""
        self.has_asked = False
        self.held = set(self.view)

    def new_session(self) -> Any:
        raise NotImplementedError

    def send_first(self) -> None:
        raise NotImplementedError

    def take(self, response: Any) -> None:
        raise NotImplementedError

    def change(self, name: str, is_wanted: bool) -> None:
        raise NotImplementedError

    def store(self, resources: tuple[XdsResource, ...]) -> None:
        for one in resources:
            if one.name in self.wanted:
                self.view[one.name] = one.body.decode()
                self.versions[one.name] = one.version
                self.held.discard(one.name)

    @initialize(names=st.sets(A_NAME, min_size=1))
    def begin(self, names: set[str]) -> None:
        self.wanted = set(names)

    @rule(contents=SETS)
    def publish(self, contents: dict[str, str]) -> None:
        self.cache.publish(resource_of(name, text.encode()) for name, text in contents.items())

    @precondition(lambda self: not self.has_asked)
    @rule()
    def ask(self) -> None:
        self.has_asked = True
        self.send_first()

    @precondition(lambda self: self.has_asked)
    @rule(name=A_NAME)
    def want(self, name: str) -> None:
        if name not in self.wanted:
            self.wanted.add(name)
            self.change(name, is_wanted=True)

    @precondition(lambda self: self.has_asked and len(self.wanted) > 1)
    @rule(name=A_NAME)
    def give_up(self, name: str) -> None:
        if name in self.wanted:
            self.wanted.discard(name)
            for known in (self.view, self.versions):
                known.pop(name, None)
            self.held.discard(name)
            self.change(name, is_wanted=False)

    @precondition(lambda self: self.to_server)
    @rule()
    def server_reads(self) -> None:
        acknowledged = self.session.receive(self.to_server.popleft())
        self.answered += acknowledged in (Acknowledgement.ACK, Acknowledgement.NACK)

    @rule()
    def server_writes(self) -> None:
        response = self.session.poll(self.cache.current)
        if response is not None:
            self.sent += 1
            self.to_client.append(response)

    @precondition(lambda self: self.to_client)
    @rule()
    def client_reads(self) -> None:
        self.take(self.to_client.popleft())

    @precondition(lambda self: self.has_asked)
    @rule()
    def line_breaks(self) -> None:
        self.connect()

    @invariant()
    def at_most_one_is_unanswered(self) -> None:
        assert len(self.to_client) <= 1
        assert 0 <= self.sent - self.answered <= 1

    @rule()
    def all_comes_to_rest(self) -> None:
        if not self.has_asked:
            self.ask()
        for _ in range(100):
            before = self.sent
            while self.to_server:
                self.server_reads()
            self.server_writes()
            while self.to_client:
                self.client_reads()
            if self.sent == before and not self.to_server:
                break
        else:
            pytest.fail("it never came to rest")
        assert self.sent == self.answered
        self.knows_what_there_is()

    def knows_what_there_is(self) -> None:
        current = self.cache.current
        if current is None:
            return
        there = {n: r.body.decode() for n, r in current.resources.items() if n in self.wanted}
        if any(text.startswith("!") for text in there.values()):
            return  # it has refused that, and with it what came along
        known = {n: text for n, text in self.view.items() if text and self.counts(n, there)}
        assert known == there

    def counts(self, name: str, there: dict[str, str]) -> bool:
        return True


class SotwWalk(Walk):
    def new_session(self) -> SotwSession:
        return SotwSession(lambda name: resource_of(name, b""))

    def request(self, problem: str | None = None) -> None:
        self.to_server.append(sotw.SotwRequest(tuple(sorted(self.wanted)), self.nonce, problem))

    def send_first(self) -> None:
        self.nonce = ""
        self.request()

    def change(self, name: str, is_wanted: bool) -> None:
        self.request()

    def take(self, response: sotw.SotwResponse) -> None:
        self.nonce = response.nonce
        refused = is_refused(response.resources)
        if not refused:
            self.store(response.resources)
        self.request("no" if refused else None)

    def counts(self, name: str, there: dict[str, str]) -> bool:
        """A name that only an earlier stream has sent stays."""
        return name in there or name not in self.held


class DeltaWalk(Walk):
    def new_session(self) -> DeltaSession:
        return DeltaSession()

    def send_first(self) -> None:
        self.to_server.append(
            delta.DeltaRequest(tuple(sorted(self.wanted)), initial_versions=dict(self.versions))
        )

    def change(self, name: str, is_wanted: bool) -> None:
        names = (name,)
        self.to_server.append(
            delta.DeltaRequest(names) if is_wanted else delta.DeltaRequest((), names)
        )

    def take(self, response: delta.DeltaResponse) -> None:
        refused = is_refused(response.resources)
        if not refused:
            self.store(response.resources)
            for name in response.removed:
                self.view.pop(name, None)
                self.versions.pop(name, None)
        problem = "no" if refused else None
        self.to_server.append(delta.DeltaRequest(nonce=response.nonce, problem=problem))


@pytest.mark.parametrize("walk", [SotwWalk, DeltaWalk])
def test_a_client_ends_with_the_current_state(walk: type[Walk]) -> None:
    chosen = examples(60, stateful_step_count=40)
    run_state_machine_as_test(walk, settings=chosen)
