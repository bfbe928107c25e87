"""What can be wrong with the endpoint picker of `mutant_epp`, one thing at a time."""

from __future__ import annotations

from enum import Enum, auto


class Fault(Enum):
    """What is wrong with it."""

    NONE = auto()
    NO_HEADER = auto()
    NO_METADATA = auto()
    SAYS_IT_DIFFERENTLY = auto()
    PICKS_STRANGERS = auto()
    IS_STEERED = auto()
    NAMES_ONE_TWICE = auto()
    NO_BRACKETS = auto()
    NAMES_HOSTS_ONLY = auto()
    KEEPS_ROUTE = auto()
    IGNORES_SUBSET = auto()
    IGNORES_SUBSET_PORTS = auto()
    IGNORES_SUBSET_WITHOUT_BODY = auto()
    OBEYS_OTHER_NAMESPACES = auto()
    IGNORES_SELECTION = auto()
    IGNORES_SELECTION_WITHOUT_BODY = auto()
    TAKES_ALL_FOR_STRANGERS = auto()
    REFUSES_BODILESS = auto()
    REFUSES_WITH_500 = auto()
    FAILS_STREAMS = auto()
    ROUTES_AND_REFUSES = auto()
    SULKS = auto()
    SHEDS_WITH_503 = auto()
    CHOKES_ON_NONSENSE = auto()
    BIG_PIECES = auto()
    LOSES_PIECES = auto()
    EMPTY_PIECE_ENDS = auto()
    ENDS_TWICE = auto()
    BODY_FIRST = auto()
    IGNORES_TRAILERS = auto()
    TAKES_SECOND_END = auto()
    ENDS_AFTER_REQUEST = auto()
    CHANGES_RESPONSES = auto()
    MANGLES_EVENTS = auto()
    IGNORES_RESPONSE_TRAILERS = auto()
    ONE_BUFFER_FOR_ALL = auto()
    FALLS_WITH_A_STREAM = auto()
    DIES_OF_NONSENSE = auto()
    ENDS_WITH_AN_ERROR = auto()
    TELLS_NO_SERVED = auto()
    TELLS_WHAT_IT_PICKED = auto()
    TELLS_ONLY_WITH_BODY = auto()
    NOT_HEALTHY = auto()
    LEAVES_WITH_SERVED = auto()
