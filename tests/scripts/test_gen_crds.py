"""The files under `crds/` are what the description of the kinds says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gen-crds"


def test_the_files_are_up_to_date() -> None:
    """`scripts/gen-crds` brings them up to date."""
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        [SCRIPT, "--check"], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_files_that_differ_are_told_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed one, a missing one and one too many; afterwards all is as it should be."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gen_crds

    monkeypatch.setattr(gen_crds, "FOLDER", tmp_path)
    (tmp_path / "old.yaml").write_text("")
    assert gen_crds.main(["--check"]) == 1
    assert "crds/old.yaml is not what" in capsys.readouterr().err
    assert gen_crds.main([]) == 0
    assert gen_crds.main(["--check"]) == 0
    path = tmp_path / "llm-d.ai_inferenceobjectives.yaml"
    path.write_text(path.read_text().replace("int32", "int64"))
    assert gen_crds.different() == [path.name]


@pytest.mark.parametrize("path", sorted((ROOT / "crds").glob("*.yaml")), ids=lambda one: one.stem)
def test_files_are_named_by_what_they_define(path: Path) -> None:
    """Each has one definition."""
    document = yaml.safe_load(path.read_text())
    assert document["apiVersion"] == "apiextensions.k8s.io/v1"
    assert path.stem == f"{document['spec']['group']}_{document['spec']['names']['plural']}"
