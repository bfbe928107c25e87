"""The number of replicas of a Deployment, read and written through its scale subresource.

A write names the version that was read. If another writer (an operator, an HPA) was faster, the
server refuses it (409), and the next interval decides on the new number.
"""

from dataclasses import dataclass
from typing import Any, Final

from picker.k8s.api import ApiError, ApiResource, KubernetesApi, UnreachableError

DEPLOYMENTS: Final = ApiResource("apps", "v1", "deployments")
_CONFLICT, _NOT_FOUND, _FORBIDDEN = 409, 404, 403


class ScaleError(Exception):
    """A scale cannot be read or written. `result` is the HTTP status, or `unreachable`."""

    def __init__(self, text: str, result: str) -> None:
        super().__init__(text)
        self.result = result


@dataclass(frozen=True, slots=True)
class DeploymentScale:
    namespace: str
    name: str

    async def read(self, api: KubernetesApi) -> dict[str, Any]:
        try:
            return await api.get(DEPLOYMENTS, self.namespace, f"{self.name}/scale")
        except (ApiError, UnreachableError) as error:
            raise self._failed(error, "read") from error

    async def write(self, api: KubernetesApi, known: dict[str, Any], replicas: int) -> None:
        """Write `replicas` into the scale that was read as `known`. Raises `ScaleError`."""
        document = {**known, "spec": {**_spec(known), "replicas": replicas}}
        path = f"{DEPLOYMENTS.path(self.namespace, self.name)}/scale"
        try:
            await api.send("PUT", path, document)
        except (ApiError, UnreachableError) as error:
            raise self._failed(error, "written") from error

    def _failed(self, error: ApiError | UnreachableError, what: str) -> ScaleError:
        called = f"the scale of deployment {self.namespace}/{self.name}"
        if isinstance(error, UnreachableError):
            return ScaleError(f"{called} cannot be {what}: {error}", "unreachable")
        result = str(error.status)
        if error.status == _FORBIDDEN:
            return ScaleError(
                f"{called} is forbidden; grant the picker's service account in namespace "
                f"'{self.namespace}' {{apiGroups: [apps], resources: [deployments/scale], "
                f"resourceNames: [{self.name}], verbs: [get, update]}}: {error.message}",
                result,
            )
        if error.status == _NOT_FOUND:
            return ScaleError(
                f"there is no deployment {self.namespace}/{self.name}: correct the group of "
                "--autoscale, or create the deployment",
                result,
            )
        if error.status == _CONFLICT:
            return ScaleError(f"{called} was changed by another program meanwhile", result)
        return ScaleError(f"{called} cannot be {what}: {error}", result)


def replicas_of(scale: dict[str, Any]) -> int:
    """Return the number of replicas that a scale requests; Kubernetes omits a 0."""
    found = _spec(scale).get("replicas")
    return found if isinstance(found, int) else 0


def _spec(scale: dict[str, Any]) -> dict[str, Any]:
    spec = scale.get("spec")
    return spec if isinstance(spec, dict) else {}
