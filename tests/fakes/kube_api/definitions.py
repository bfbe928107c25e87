"""CustomResourceDefinitions that are created, changed and deleted like other objects."""

from collections.abc import Callable, Iterator

from tests.fakes.kube_api.resources import Catalogue, Object, Resource
from tests.fakes.kube_api.store import Change, Store, Type, key_of
from tests.support.kube.crd_rules import CrdRules, FieldError


def _established(definition: Object) -> None:
    condition = {"type": "Established", "status": "True", "reason": "InitialNamesAccepted"}
    definition.setdefault("status", {"conditions": [condition]})


def _errors(definition: Object) -> Iterator[FieldError]:
    try:
        for version in definition["spec"]["versions"]:
            CrdRules(definition, version["name"])
    except KeyError as error:
        yield FieldError("spec", "FieldValueRequired", f"Required value: {error}")
    except ValueError as error:
        yield FieldError("spec.versions", "FieldValueInvalid", f"Invalid value: {error}")


DEFINITIONS = Resource(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
    defaults=_established,
    check=_errors,
)


class Definitions:
    """Keeps the catalogue in step with the definitions; `removed` gets a deleted one's name."""

    def __init__(self, store: Store, catalogue: Catalogue, removed: Callable[[str], None]) -> None:
        self._store = store
        self._catalogue = catalogue
        self._removed = removed
        catalogue.serve(DEFINITIONS)
        store.listen(DEFINITIONS, self._changed)

    def _changed(self, change: Change) -> None:
        spec = change.new.obj["spec"]
        name = f"{spec['names']['plural']}.{spec['group']}"
        gone = self._catalogue.remove(name)
        if change.type is not Type.DELETED:
            self._catalogue.install(change.new.obj)
            return
        for resource in gone:
            for one in self._store.all(resource):
                self._store.delete(resource, key_of(one.obj))
        self._removed(name)


def in_force(definition: Object) -> Object:
    definition = {**definition}
    _established(definition)
    return definition
