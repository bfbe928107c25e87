"""The structure of other projects' kinds: names of fields, types, required fields and enumerations.

A file of `tests/data/gateway_schemas` records one release. Its shapes are written as

    {name!: string, mode: A|B, ports: [integer], labels: {'*': string}, rest: ...}

with `!` behind a required field, `|` between the values of an enumeration, `object` for one whose
fields the definition leaves open, and `...` for a field whose own structure is not recorded, so
that an object that uses it is refused. `python -m tests.support.kube.recorded_schemas CRDS.yaml
OBJECTS.yaml` prints the shapes of the objects' kinds, recorded as deep as the objects reach.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml

Object: TypeAlias = dict[str, Any]
Shape: TypeAlias = Any

FOLDER: Final = Path(__file__).parents[2] / "data" / "gateway_schemas"
UNRECORDED: Final = "..."
_PLAIN: Final = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
}
_ANYWHERE: Final = ("apiVersion", "kind", "metadata")


@cache
def shapes() -> dict[tuple[str, str], Shape]:
    """Every recorded shape by the `apiVersion` and `kind` of its objects."""
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        document = yaml.safe_load(path.read_text())
        assert document["source"].startswith("https://"), path
        found |= {tuple(name.split()): shape for name, shape in document["kinds"].items()}
    return found


def problems(obj: Object) -> list[str]:
    """Return what the recorded kind does not have, misses or does not allow, as `path: why`."""
    shape = shapes()[obj["apiVersion"], obj["kind"]]
    own = {name: value for name, value in obj.items() if name not in _ANYWHERE}
    return list(_problems(own, shape, obj["kind"]))


def _problems(value: Any, shape: Shape, at: str) -> Iterator[str]:
    if shape == UNRECORDED:
        yield f"{at}: its structure is not recorded"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{at}: is no list"
            return
        for index, one in enumerate(value):
            yield from _problems(one, shape[0], f"{at}[{index}]")
    elif isinstance(shape, dict):
        yield from _of_fields(value, shape, at)
    elif shape == "int-or-string":
        if not isinstance(value, int | str) or isinstance(value, bool):
            yield f"{at}: is neither a whole number nor a string"
    elif shape in _PLAIN:
        if not isinstance(value, _PLAIN[shape]) or isinstance(value, bool) != (shape == "boolean"):
            yield f"{at}: is no {shape}"
    elif value not in shape.split("|"):
        yield f"{at}: is none of {shape}"


def _of_fields(value: Any, shape: Shape, at: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{at}: is no object"
        return
    fields = {name.removesuffix("!"): below for name, below in shape.items()}
    required = {name.removesuffix("!") for name in shape if name.endswith("!")}
    yield from (f"{at}.{name}: is missing" for name in sorted(required - value.keys()))
    for name, one in value.items():
        below = fields.get(name, fields.get("*"))
        if below is None:
            yield f"{at}.{name}: is unknown"
        else:
            yield from _problems(one, below, f"{at}.{name}")


def recorded(definitions: Sequence[Object], objects: Sequence[Object]) -> dict[str, Shape]:
    """Return the shapes of the objects' kinds out of their CustomResourceDefinitions."""
    found = {}
    for definition in definitions:
        spec = definition["spec"]
        for version in spec["versions"]:
            name = f"{spec['group']}/{version['name']} {spec['names']['kind']}"
            used = [one for one in objects if f"{one['apiVersion']} {one['kind']}" == name]
            if used:
                schema = version["schema"]["openAPIV3Schema"]
                fields = {"spec": schema["properties"]["spec"]}
                own = {"properties": fields, "required": schema.get("required", ())}
                found[name] = _shape({**own, "type": "object"}, used)
    return found


def _shape(schema: Object, used: Sequence[Any]) -> Shape:
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        return "int-or-string"
    if kind == "string" and "enum" in schema:
        return "|".join(schema["enum"])
    if kind == "array":
        items = [one for value in used for one in value]
        return [_shape(schema["items"], items)] if items else UNRECORDED
    if kind != "object":
        return kind
    if not used:
        return UNRECORDED
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return kind
    if "properties" not in schema:
        inner = [one for value in used for one in value.values()]
        return {"*": _shape(schema["additionalProperties"], inner)}
    required = schema.get("required", ())
    return {
        name + ("!" if name in required else ""): _shape(
            below, [value[name] for value in used if name in value]
        )
        for name, below in schema["properties"].items()
    }


def main(crds: str, *files: str) -> None:
    """Print the shapes of the kinds of all objects in `files` that `crds` defines."""
    definitions = [one for one in yaml.safe_load_all(Path(crds).read_text()) if one]
    objects = [one for name in files for one in yaml.safe_load_all(Path(name).read_text())]
    found = recorded(definitions, objects)
    yaml.safe_dump(found, sys.stdout, sort_keys=False, width=100, default_flow_style=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
