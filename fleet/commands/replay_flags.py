"""The command line of `pointsman replay`."""

from pathlib import Path

from base.flags import Dialect, Parser, add_flags

_FLAGS = """
--config NEW                  repeat the decisions with this configuration, and report what changes
--json                        print one JSON object
--limit N[0..] = 10           rows and differences to list at most
--allow-experimental-plugins  allow alpha plugin types in --config; always on if they were allowed
                              for the recording
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman replay",
        description="Decide the requests of a recording (picker --record) again, with the picker's "
        "own code. Without --config every decision has to be what it was.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the recording")
    dialect = Dialect(
        readers={"NEW": Path}, fields={"--allow-experimental-plugins": "experimental"}
    )
    add_flags(parser, _FLAGS, dialect)
    return parser
