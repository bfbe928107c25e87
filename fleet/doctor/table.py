"""The names of the checks, and the file `checks.txt` with the texts of their findings.

An unindented line of the file is a check: its name, and what it ensures. An entry below it is a
finding: severity (`either` if the judge decides) and key, then what is seen; `why` is what that
costs, `fix` a command or YAML to paste. A finding without one of them has that of the finding
before it. An error loses or misdirects requests, now or on the next bad day; a warning costs
something, or may be intended. `$name` is a value from the judge, `$FILTER` is `FILTER`.
"""

import re
from pathlib import Path
from typing import Final

TABLE: Final = Path(__file__).with_name("checks.txt").read_text(encoding="utf-8")
CHECK_NAMES: Final = tuple(re.findall(r"^([a-z0-9-]+) ", TABLE, re.MULTILINE))
FILTER: Final = "in the typed_config of the filter envoy.filters.http.ext_proc"
