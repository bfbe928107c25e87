"""The build step's changes to a module."""

from pathlib import Path

import pytest

from scripts.one_package import absolute, move, rewritten

MODULES = frozenset({"worker.engine", "worker.engine.process", "picker.config"})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from worker.engine import x", "from pointsman.worker.engine import x"),
        ("from  worker import app", "from  pointsman.worker import app"),
        (
            "if 1:\n    from fleet.up import (\n    y)",
            "if 1:\n    from pointsman.fleet.up import (\n    y)",
        ),
        ("import os, picker.config as c", "import os, pointsman.picker.config as c"),
        ("é = 1; from worker.a import b", "é = 1; from pointsman.worker.a import b"),
        ("f('worker.engine.process')", "f('pointsman.worker.engine.process')"),
        ('f("""worker.engine""")', 'f("""pointsman.worker.engine""")'),
        (
            "f('worker.engine', 'picker.config')",
            "f('pointsman.worker.engine', 'pointsman.picker.config')",
        ),
    ],
)
def test_names_of_our_modules_get_the_prefix(before: str, after: str) -> None:
    assert rewritten(before.encode(), MODULES, "m.py").decode() == after


@pytest.mark.parametrize(
    "text",
    [
        "from . import worker",
        "from .worker import x",
        "from workers.engine import x",
        "import os",
        "f('worker')",
        "f('worker.engine is down')",
        "f('worker.nothing')",
        "f(worker.engine)",
        '"""from worker.engine import x"""',
        "# from worker.engine import x",
    ],
)
def test_everything_else_stays(text: str) -> None:
    assert rewritten(text.encode(), MODULES, "m.py").decode() == text


@pytest.mark.parametrize("text", ["\nimport worker.engine", "\nimport os, fleet"])
def test_an_import_that_binds_the_short_name_is_refused(text: str) -> None:
    with pytest.raises(SyntaxError, match=r"m\.py:2: write `from … import …`"):
        rewritten(text.encode(), MODULES, "m.py")


def test_the_packages_move_into_one(tmp_path: Path) -> None:
    for name in ("pointsman", "base", "picker", "worker", "fleet", "worker/engine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "fleet/plan.py").write_text("from worker.engine import a\nb = 'worker.engine'\n")
    move(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pointsman"]
    moved = (tmp_path / "pointsman/fleet/plan.py").read_text()
    assert moved == "from pointsman.worker.engine import a\nb = 'pointsman.worker.engine'\n"


def test_links_lead_to_the_repository() -> None:
    text = "[a](docs/a.md#b), [c](#d), [e](https://f.example/g), [h](LICENSE), ![i](j.svg)"
    wanted = (
        "[a](https://r/blob/main/docs/a.md#b), [c](#d), [e](https://f.example/g), "
        "[h](https://r/blob/main/LICENSE), ![i](https://r/raw/main/j.svg)"
    )
    assert absolute(text, "https://r") == wanted
    assert absolute(wanted, "https://r") == wanted
