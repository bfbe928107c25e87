"""The modes in which a proxy shows responses to the picker."""

from enum import Enum


class ResponseBodies(Enum):
    """The parts of responses that a proxy shows to the picker.

    OFF: headers and the end. USAGE: also the time of the first token and the text that reports the
    usage, once at the end. ALL: every piece.
    """

    OFF = "off"
    USAGE = "usage"
    ALL = "all"
