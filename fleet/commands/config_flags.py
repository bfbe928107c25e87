"""The flags of `pointsman config`."""

from __future__ import annotations

from pathlib import Path

from fleet.command_line import Parser


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
    check.add_argument("--json", action="store_true", help="findings as JSON")
    text = "check this endpoints file instead, with its objectives and rewrites"
    check.add_argument("--endpoints-file", metavar="FILE", help=text)
    text = "check this file of objectives and rewrites instead, as for `pointsman up`"
    check.add_argument("--objectives", metavar="FILE", help=text)
    text = "name of the picker's pool, for --endpoints-file"
    check.add_argument("--pool-name", default="default", metavar="NAME", help=text)
    show = commands.add_parser("show", help="print the configuration in effect, with all defaults")
    text = "what to show; `-` is standard input (default: the built-in configuration)"
    show.add_argument("file", nargs="?", metavar="FILE", help=text)
    show.add_argument("--origin", action="store_true", help="show the origin of each line")
    for command in (check, show):
        command.add_argument("--config-text", metavar="YAML", help="the configuration as text")
        text = "accept alpha plugin types"
        command.add_argument("--allow-experimental-plugins", action="store_true", help=text)
    return parser
