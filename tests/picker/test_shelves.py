"""A picker composes without any of its shelves, and refuses the flag that needs the missing one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from picker.app.shelves import _SHELVES

ROOT = Path(__file__).parents[2]
FLAGS = {"--autoscale": "a.yaml", "--xds-port": "0"}
RUN = """
import json, sys
# The finder of an editable install would find the shelf in the repository.
sys.meta_path = [one for one in sys.meta_path if "__editable__" not in str(one.__module__)]
from picker.__main__ import main
from picker.app.picker import compose
from picker.cli.flags import build_parser, options_of

plain, more = json.loads(sys.argv[1])
compose(options_of(build_parser().parse_args(plain)))
print("composed", flush=True)
sys.exit(main([*plain, *more]))
"""


@pytest.mark.parametrize(("flag", "module"), _SHELVES.items())
def test_a_picker_without_a_shelf_composes_and_refuses_its_flag(
    flag: str, module: str, tmp_path: Path
) -> None:
    folder = module.split(".")[1]
    for program in ("base", "picker"):
        (tmp_path / program).mkdir()
        for path in (ROOT / program).iterdir():
            if path.name != folder:
                (tmp_path / program / path.name).symlink_to(path)
    (tmp_path / "e.yaml").write_text("endpoints: []")
    arguments = json.dumps([["--endpoints-file=e.yaml"], [f"{flag}={FLAGS[flag]}"]])
    done = subprocess.run(
        [sys.executable, "-c", RUN, arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "composed\n", done.stderr
    assert done.returncode == 1
    assert done.stderr.endswith(f"{flag} needs {module}, which is not installed\n")
    assert "Traceback" not in done.stderr
