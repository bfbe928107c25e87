"""Configurations have exactly the meaning, or the errors, of their golden files.

`name.in.yaml` is a configuration, `name.out.yaml` its meaning. To accept a changed meaning, run
with `POINTSMAN_UPDATE_GOLDEN=1` and review the difference.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from picker.config.build import BuildOptions, assemble
from picker.config.catalog import builtin_plugins
from picker.config.schema import PLUGIN_TYPES
from picker.errors import ConfigError
from tests.support.picker.assembly_meaning import meaning
from tests.support.picker.configured_requests import GOLDEN, golden, golden_output


def outcome(path: Path) -> dict[str, Any]:
    options = BuildOptions(allow_experimental="experimental_refused" not in path.name)
    try:
        return meaning(assemble(path.read_bytes(), path.name, builtin_plugins(), options)[1])
    except ConfigError as error:
        return {"errors": str(error).splitlines()}


@pytest.mark.parametrize("case", GOLDEN)
def test_a_configuration_has_the_meaning_of_its_golden_file(case: str) -> None:
    found = outcome(GOLDEN[case])
    twin = golden_output(case)
    if os.environ.get("POINTSMAN_UPDATE_GOLDEN"):
        twin.write_text(yaml.safe_dump(found, sort_keys=False, width=100, allow_unicode=True))
    assert found == yaml.safe_load(twin.read_text())


def test_the_cases_have_every_plugin_type() -> None:
    text = "".join(map(golden, GOLDEN))
    written = set(re.findall(r"type: ([a-z0-9-]+)", text))
    assert builtin_plugins().names - written == set()
    assert builtin_plugins().names & set(PLUGIN_TYPES) == set()


def test_there_are_golden_cases() -> None:
    """A moved folder must not pass silently."""
    assert len(GOLDEN) > 30
