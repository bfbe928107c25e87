"""Put another picker in the place of the one that the upstream suite's manifests run.

Reads Kubernetes manifests, finds the containers that are endpoint pickers by their `--pool-name`,
and gives them another image and other arguments. Names, Services, probes and rights stay what they
are. Everything else is written as it was read.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]


def put_picker(documents: list[Document], image: str, config: str) -> list[str]:
    """Change the documents in place; the names of the Deployments that were changed."""
    changed: list[str] = []
    for document, container in _pickers(documents):
        pool, namespace = _pool(container["args"])
        container["image"] = image
        container["imagePullPolicy"] = "IfNotPresent"
        container["args"] = [
            f"--pool-name={pool}",
            f"--pool-namespace={namespace}",
            "--grpc-port=9002",
            "--grpc-health-port=9003",
            "--zap-encoder=json",
            f"--config-text={config}",
        ]
        for mount in ("volumeMounts", "command"):
            container.pop(mount, None)
        document["spec"]["template"]["spec"].pop("volumes", None)
        changed.append(document["metadata"]["name"])
    return changed


def _pickers(documents: list[Document]) -> Iterator[tuple[Document, Document]]:
    for document in documents:
        if document.get("kind") != "Deployment":
            continue
        for container in document["spec"]["template"]["spec"]["containers"]:
            if any(str(one).startswith("--pool-name") for one in container.get("args") or ()):
                yield document, container


def _pool(arguments: list[str]) -> tuple[str, str]:
    """The pool's name and namespace, whether written as `--flag value` or `--flag=value`."""
    words = [word for one in arguments for word in str(one).split("=", 1)]
    named = dict(itertools.pairwise(words))
    return named["--pool-name"], named.get("--pool-namespace", "default")


def main() -> int:
    """Read one file, write another; gives the exit status, 1 where there is no picker."""
    parser = argparse.ArgumentParser(description="Put a picker into manifests.")
    parser.add_argument("manifests", type=Path)
    parser.add_argument("--image", required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    text = arguments.manifests.read_text(encoding="utf-8")
    documents = [one for one in yaml.safe_load_all(text) if one]
    changed = put_picker(documents, arguments.image, arguments.config.read_text(encoding="utf-8"))
    if not changed:
        sys.stderr.write(f"{arguments.manifests}: no container has --pool-name\n")
        return 1
    arguments.output.write_text(yaml.safe_dump_all(documents, sort_keys=False), encoding="utf-8")
    sys.stdout.write(f"in the place of: {', '.join(changed)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
