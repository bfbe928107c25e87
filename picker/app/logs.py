"""Logging, as lines of text or with one JSON object per line."""

import json
import logging
import sys
from datetime import UTC, datetime

DEBUG_LEVEL = 4
QUIET_LEVEL = 1  # below it only errors are logged


class JsonFormatter(logging.Formatter):
    """Formats each record as one line of JSON, with the keys of the reference picker's logs."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, str] = {
            "level": record.levelname.lower(),
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            entry["stacktrace"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logging(verbosity: int, *, as_json: bool) -> None:
    """Log to standard error; a `verbosity` of 0 means errors only, 2 is normal, 4 adds details."""
    target = logging.StreamHandler(sys.stderr)
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    target.setFormatter(JsonFormatter() if as_json else logging.Formatter(text))
    level = logging.INFO if verbosity >= QUIET_LEVEL else logging.ERROR
    level = logging.DEBUG if verbosity >= DEBUG_LEVEL else level
    logging.basicConfig(handlers=[target], level=level)
