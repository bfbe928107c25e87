"""session-id-producer: find the session of a request.

    session = headers[headerName]     or     the cookie called cookieName

Exactly one of the two parameters is required. Blanks around the value are removed; an empty value
is no session, and then nothing is written. The session affinity plugins read the finding with a
source `{attribute: SessionID}`.
"""

from picker.framework.attributes import Attributes, session_id_key
from picker.framework.registry import Parameters, PluginType
from picker.types import Candidates, InferenceRequest

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
        self._key = session_id_key(name)
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
    """Return the first cookie called `name`, "" without one, without its quotes (RFC 6265)."""
    for pair in header.split(";"):
        key, equals, value = pair.partition("=")
        if equals and key.strip() == name:
            value = value.strip()
            is_quoted = len(value) > 1 and value[0] == value[-1] == '"'
            return value[1:-1] if is_quoted else value
    return ""


PLUGIN = PluginType("session-id-producer", SessionIdProducer)
