"""The picker's default configuration is the same wherever it is written down."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from picker.config.build import DEFAULT_CONFIG, BuildOptions, assemble
from picker.config.catalog import builtin_plugins
from picker.config.show import parameters_in_force

ROOT = Path(__file__).parents[2]
Essence = dict[str, Any]


def manifests() -> str:
    return (ROOT / "deploy/k8s/base/picker.yaml").read_text()


def chart() -> str:
    values = yaml.safe_load((ROOT / "deploy/helm/pointsman/values.yaml").read_text())
    return yaml.safe_dump(values["picker"]["config"])


def readme() -> str:
    [example] = re.findall(
        r"```yaml\n# config\.yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    return str(example)


def essence(text: str) -> Essence:
    _, assembly = assemble(text.encode(), "c.yaml", builtin_plugins(), BuildOptions())
    return {
        "plugins": {
            name: (one.type_name, parameters_in_force(one.parameters))
            for name, one in assembly.instances.items()
        },
        "profiles": {
            plan.name: {
                "parts": {p.instance.name: p.weight for p in (*plan.filters, *plan.scorers)},
                "picker": plan.picker and plan.picker.instance.name,
            }
            for plan in assembly.plans
        },
    }


@pytest.mark.parametrize("copy", [manifests, chart, readme])
def test_the_default_is_the_same_everywhere(copy: Callable[[], str]) -> None:
    assert essence(copy()) == essence(DEFAULT_CONFIG.decode())
