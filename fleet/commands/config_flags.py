"""The command line of `pointsman config`."""

from pathlib import Path

from base.flags import Parser, add_flags

_CHECK = """
--json                        findings as JSON
--endpoints-file FILE         check this endpoints file instead, with its objectives and rewrites
--objectives FILE             check this file of objectives and rewrites instead, as for `pointsman
                              up`
--pool-name NAME = default    name of the picker's pool, for --endpoints-file
"""
_SHOW = """
--origin                      show the origin of each line
"""
_BOTH = """
--config-text YAML            the configuration as text
--allow-experimental-plugins  accept alpha plugin types
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman config",
        description="Work on an EndpointPickerConfig without starting a picker.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    init = commands.add_parser("init", help="write a configuration to edit")
    text = "where to write it, which must not exist (default: print it)"
    init.add_argument("file", nargs="?", type=Path, metavar="FILE", help=text)
    commands.add_parser("schema", help="print the JSON Schema of a configuration, for editors")
    check = commands.add_parser("check", help="report every problem of a file")
    text = "what to check; `-` is standard input"
    check.add_argument("file", nargs="?", metavar="FILE", help=text)
    add_flags(check, _CHECK)
    show = commands.add_parser("show", help="print the configuration in effect, with all defaults")
    text = "what to show; `-` is standard input (default: the built-in configuration)"
    show.add_argument("file", nargs="?", metavar="FILE", help=text)
    add_flags(show, _SHOW)
    for command in (check, show):
        add_flags(command, _BOTH)
    return parser
