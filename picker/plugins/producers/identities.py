"""Identities that clients send with their requests.

agent-identity: all turns of an agent's session are one flow.

    identity = first non-empty of additionalSessionHeaders, x-claude-code-session-id,
               x-session-affinity, session-id, session_id

It becomes the fairness id of a request that names none, before admission. Other plugins can read it
as a finding, e.g. session affinity with a source `{attribute: agent-identity}`.

session-id-producer: find the session of a request.

    session = headers[headerName]     or     the cookie called cookieName

Session affinity reads the finding with a source `{attribute: SessionID}`.
"""

from msgspec.structs import replace

from picker.framework.attributes import AGENT_IDENTITY, SESSION_ID, Attributes, DataKey
from picker.framework.registry import Parameters, PluginType, Stability
from picker.types import Candidates, InferenceRequest

# Claude Code, OpenCode, Codex, and older Codex.
_AGENT_HEADERS = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
_FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")


class AgentIdentityParameters(Parameters, frozen=True):
    additional_session_headers: tuple[str, ...] = ()


class AgentIdentity:
    def __init__(self, name: str, parameters: AgentIdentityParameters) -> None:
        extra = [header.strip().lower() for header in parameters.additional_session_headers]
        if not all(extra):
            raise ValueError("additionalSessionHeaders must not hold an empty name")
        self._headers = (*extra, *_AGENT_HEADERS)
        self._key: DataKey[str] = DataKey(AGENT_IDENTITY, name)
        self.produces = (self._key,)

    def process(self, request: InferenceRequest) -> InferenceRequest:
        """Use the identity as the fairness id, unless a header names one."""
        if any(request.headers.get(header) for header in _FAIRNESS_HEADERS):
            return request
        identity = self._identity(request)
        return replace(request, fairness_id=identity) if identity else request

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        if identity := self._identity(request):
            attributes[self._key] = identity
        return request

    def _identity(self, request: InferenceRequest) -> str:
        values = (request.headers.get(header, "").strip() for header in self._headers)
        return next(filter(None, values), "")


_COOKIES = "cookie"


class SessionIdProducerParameters(Parameters, frozen=True):
    header_name: str = ""
    cookie_name: str = ""


class SessionIdProducer:
    def __init__(self, name: str, parameters: SessionIdProducerParameters) -> None:
        self._header = parameters.header_name.strip().lower()
        self._cookie = parameters.cookie_name.strip()
        if bool(self._header) == bool(self._cookie):
            raise ValueError("exactly one of headerName and cookieName is needed")
        self._key: DataKey[str] = DataKey(SESSION_ID, name)
        self.produces = (self._key,)

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        if self._header:
            session = request.headers.get(self._header, "").strip()
        else:
            session = cookie(request.headers.get(_COOKIES, ""), self._cookie)
        if session:
            attributes[self._key] = session
        return request


def cookie(header: str, name: str) -> str:
    """Return the first cookie called `name` without its quotes (RFC 6265), "" if there is none."""
    for pair in header.split(";"):
        key, equals, value = pair.partition("=")
        if equals and key.strip() == name:
            value = value.strip()
            is_quoted = len(value) > 1 and value[0] == value[-1] == '"'
            return value[1:-1] if is_quoted else value
    return ""


PLUGINS = (
    PluginType("agent-identity", AgentIdentity, Stability.ALPHA),
    PluginType("session-id-producer", SessionIdProducer),
)
