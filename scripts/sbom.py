"""The software bill of materials of an image's Python packages, as CycloneDX 1.6 has it.

They come from its lock file. What the base image brings is in the bill that BuildKit attaches.
"""

import json
import re
import uuid
from pathlib import Path
from typing import Any

_PACKAGE = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[\w.+!-]+)(?: ; (?P<marker>[^\\]*?))? *$")
_TORCH = re.compile(r"^torch==(?P<version>\S+)$", re.MULTILINE)


def bill(image: str, version: str, lock: str, constraints: str, repository: str) -> str:
    """The document for `image`, such as `worker-cpu`; equal inputs give equal bytes.

    `constraints` has torch's version, if `lock` has no torch and the image is a worker's.
    """
    packages = list(_packages(lock))
    names = {one["name"] for one in packages}
    if image.startswith("worker") and "torch" not in names:
        packages += [
            _component("torch", found["version"]) for found in _TORCH.finditer(constraints)
        ]
    own = _component("pointsman", version)
    components = [own, *sorted(packages, key=lambda one: str(one["name"]))]
    name = f"pointsman-{image}"
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(components))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "bom-ref": name,
                "name": name,
                "version": version,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "externalReferences": [{"type": "vcs", "url": repository}],
            }
        },
        "components": components,
        "dependencies": [{"ref": name, "dependsOn": [one["bom-ref"] for one in components]}],
    }
    return json.dumps(document, indent=1) + "\n"


def bills(root: Path, images: tuple[str, ...], version: str, repository: str) -> dict[str, str]:
    """The name and the text of the document of each image."""
    constraints = (root / "constraints.txt").read_text()
    locks = {one: (root / "deploy" / "docker" / f"{one}.lock").read_text() for one in images}
    return {
        f"pointsman-{image}-{version}.cdx.json": bill(image, version, lock, constraints, repository)
        for image, lock in locks.items()
    }


def _packages(lock: str) -> list[dict[str, Any]]:
    found = []
    for line in lock.replace("\\\n", " ").splitlines():
        pinned, *digests = (part.strip() for part in line.split(" --hash=sha256:"))
        package = _PACKAGE.fullmatch(pinned)
        if package is not None:
            found.append(_component(package["name"], package["version"], digests))
    return found


def _component(name: str, version: str, digests: list[str] | None = None) -> dict[str, Any]:
    reference = f"pkg:pypi/{name}@{version}"
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": version,
        "purl": reference,
    }
    if digests:  # of the wheels, of which each machine installs one
        component["externalReferences"] = [
            {
                "type": "distribution",
                "url": f"https://pypi.org/project/{name}/{version}/",
                "hashes": [{"alg": "SHA-256", "content": one} for one in digests],
            }
        ]
    return component
