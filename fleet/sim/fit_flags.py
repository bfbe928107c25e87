"""The command line of `pointsman fit`."""

from pathlib import Path

from base.flags import Parser, add_flags

_FLAGS = """
--workers N[1..] = 1          number of workers that answered the run
--kv-tokens N[1..]            KV cache of a worker, which no bench can measure
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman fit",
        description="Fit a worker of `pointsman simulate` to a run of `pointsman bench --json` of "
        "several rates: prompt tokens a second, the time of a decode step, a fixed time of each "
        "request, and the tokens of a chat template. It schedules a step while the one before it "
        "runs (async_scheduling in the file).",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the JSON of the run")
    parser.add_argument("out", type=Path, metavar="FILE", help="where the worker is written")
    add_flags(parser, _FLAGS)
    return parser
