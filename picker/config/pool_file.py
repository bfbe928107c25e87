"""The endpoints file: YAML documents → endpoints, objectives and rewrites, with all findings.

One document lists the endpoints; the others are Kubernetes objects, or a List of these. An entry or
an object with errors is skipped, and the others count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import msgspec
import yaml

from picker.config.decode import decode
from picker.config.documents import (
    as_plain,
    constructed,
    duplicate_keys,
    refuse_multiplied,
    unusable,
    yaml_loader,
)
from picker.config.findings import MAX_FINDINGS, Finding, Findings, Path, Severity, Source
from picker.errors import ConfigError
from picker.pool import policies
from picker.pool.endpoints_file import MAX_FILE_BYTES, EndpointList, PoolContents, endpoints_of
from picker.pool.policies import (
    InferenceObjective,
    Objective,
    PolicyObject,
    RewriteRule,
    RuleSet,
    doubts_about,
    objective_of,
    rules_of,
)

LIST_KIND = "List"
_LIST_API_VERSION = "v1"
_ENDPOINTS = "endpoints"
_SECOND_LIST = "a second list of endpoints, where only one may be"
_SHOWN_LENGTH = 60
_NULL_TAG = "tag:yaml.org,2002:null"


class _ObjectList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    api_version: str
    kind: str
    items: tuple[Any, ...]
    metadata: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class PoolFile:
    """The contents of an endpoints file. Errors among `findings` are about skipped entries."""

    contents: PoolContents
    findings: tuple[Finding, ...]


def read_pool_file(content: bytes, name: str, pool: str) -> PoolFile:
    """Decode an endpoints file for the pool named `pool`; `name` is for messages. Raises
    `ConfigError` for a file that is not YAML, is too large, or does not have exactly one list of
    endpoints.
    """
    reading = _Reading(name, pool)
    reading.read(content)
    if reading.endpoints is None:
        text = "expected a mapping with a list under the key 'endpoints'"
        if reading.num_objects:
            text = "no document lists endpoints; for a pool without any write 'endpoints: []'"
        raise unusable(name, text)
    return reading.result(reading.endpoints)


def read_policies(content: bytes, name: str, pool: str) -> PoolFile:
    """Decode a file of objectives and rewrites only. Raises `ConfigError` like `read_pool_file`."""
    reading = _Reading(name, pool, lists_endpoints=False)
    reading.read(content)
    return reading.result(EndpointList(()))


def pool_contents(content: bytes, name: str, pool: str) -> PoolContents:
    return read_pool_file(content, name, pool).contents


class _Reading:
    def __init__(self, name: str, pool: str, *, lists_endpoints: bool = True) -> None:
        self._name, self._pool = name, pool
        self._lists_endpoints = lists_endpoints
        self.endpoints: EndpointList | None = None
        self.num_objects = 0
        self._num_skipped = 0
        self._objectives: dict[str, Objective] = {}
        self._rewrites: dict[tuple[str, str], tuple[RewriteRule, ...]] = {}
        self._findings: list[Finding] = []
        self._is_cut = False

    def read(self, content: bytes) -> None:
        with yaml_loader(content, self._name, "the file", MAX_FILE_BYTES) as loader:
            while loader.check_node():
                root = loader.get_node()
                if root is not None and root.tag != _NULL_TAG:  # "---" may have nothing after it
                    self._read_document(loader, root)

    def result(self, listed: EndpointList) -> PoolFile:
        rewrites = (rule for rules in self._rewrites.values() for rule in rules)
        rules = RuleSet(tuple(self._objectives.values()), tuple(rewrites))
        findings = tuple(self._findings)
        if self._is_cut:
            text = "there are further findings, which are not listed"
            findings = (*findings, Finding(Severity.WARNING, text, self._name))
        contents = PoolContents(
            endpoints=listed.endpoints,
            rules=rules,
            skipped=tuple(str(one) for one in findings if one.severity is Severity.ERROR),
            remarks=tuple(str(one) for one in findings if one.severity is Severity.WARNING),
            num_skipped=self._num_skipped,
        )
        return PoolFile(contents, findings)

    def _read_document(self, loader: yaml.SafeLoader, root: yaml.Node) -> None:
        source = Source(self._name, root)
        if not any(key.value == "kind" for key, _ in _pairs(root)):
            self._read_endpoints(loader, source)
            return
        findings = self._room(source)
        document = as_plain(loader, root, self._name, findings)
        if not isinstance(document, dict):
            findings.error((), f"expected a mapping, got {type(document).__name__}")
        if findings.has_errors:
            self._skip(findings, "")
        elif document.get("kind") == LIST_KIND:
            self._read_list(document, source)
        else:
            self._read_object(document, (), source)

    def _read_endpoints(self, loader: yaml.SafeLoader, source: Source) -> None:
        if not self._lists_endpoints:
            text = f"expected objects with a kind: {', '.join((*policies.KINDS, LIST_KIND))}"
            raise unusable(self._name, text, source.root.start_mark)
        # Constructed without findings: each entry is checked on its own.
        refuse_multiplied(source.root, self._name)
        doubled = self._doubled_keys(source.root)
        document = constructed(loader, source.root)
        try:
            listed = endpoints_of(document, doubled)
        except ConfigError as error:
            raise unusable(self._name, str(error), source.root.start_mark) from error
        if self.endpoints is not None:
            raise unusable(self._name, _SECOND_LIST, source.root.start_mark)
        self.endpoints = listed
        findings = self._room(source)
        for problem in listed.problems:
            findings.error(problem.path, problem.text)
        for doubt in listed.shared:
            findings.warn(doubt.path, f"{doubt.text}: one server counts as two")
        self._num_skipped += len(listed.problems)
        self._report(findings)

    def _doubled_keys(self, root: yaml.Node) -> dict[int, str]:
        """Describe the duplicate keys of entries, by index. Raises `ConfigError` for two lists."""
        doubled: dict[int, str] = {}
        lists = [pair for pair in _pairs(root) if pair[0].value == _ENDPOINTS]
        if len(lists) > 1:
            raise unusable(self._name, _SECOND_LIST, lists[1][0].start_mark)
        for _, entries in lists:
            for index, entry in enumerate(entries.value):
                one = next(duplicate_keys(entry), None) if isinstance(entry, yaml.Node) else None
                if one is not None:
                    key, mark, first_line = one
                    at = f"in line {mark.line + 1}, first in line {first_line}"
                    doubled[index] = f"duplicate key {_shown(key)} {at}"
        return doubled

    def _read_list(self, document: Any, source: Source) -> None:
        findings = self._room(source)
        decoded = decode(document, _ObjectList, (), findings)
        if decoded is not None and decoded.api_version != _LIST_API_VERSION:
            text = f"{_shown(decoded.api_version)} is unknown"
            findings.error(("apiVersion",), text, (_LIST_API_VERSION,))
        if decoded is None or findings.has_errors:
            self._skip(findings, "")
            return
        for index, item in enumerate(decoded.items):
            self._read_object(item, ("items", index), source)

    def _read_object(self, document: Any, at: Path, source: Source) -> None:
        self.num_objects += 1
        findings = self._room(source)
        decoded = _decoded(document, at, findings)
        # An object for another pool is no error: one file may serve several pickers.
        if decoded is not None and not findings.has_errors:
            if decoded.spec.pool_ref.names(self._pool):
                self._take(decoded, at, findings)
            else:
                named = decoded.spec.pool_ref
                text = (
                    f"is for the {named.kind} '{named.name}' of {named.group or 'core'}, not for "
                )
                text += f"this picker's '{self._pool}' (--pool-name or --pool), and is left out"
                findings.warn((*at, "spec", "poolRef"), text)
        if findings.has_errors:
            self._skip(findings, _called(document))
        else:
            self._report(findings, _called(document))

    def _take(self, decoded: PolicyObject, at: Path, findings: Findings) -> None:
        """Add an object for this pool; of two with the same name the first counts."""
        name, namespace = decoded.metadata.name, decoded.metadata.namespace
        if isinstance(decoded, InferenceObjective):
            is_taken = name in self._objectives
            self._objectives.setdefault(name, objective_of(decoded))
        else:
            is_taken = (namespace, name) in self._rewrites
            self._rewrites.setdefault((namespace, name), rules_of(decoded))
        if is_taken:
            text = "the name is already taken by an earlier one"
            findings.error((*at, "metadata", "name"), text)
            return
        for doubt in doubts_about(decoded):
            findings.warn((*at, *doubt.path), doubt.text)

    def _skip(self, findings: Findings, called: str) -> None:
        self._num_skipped += 1
        self._report(findings, called)

    def _report(self, findings: Findings, called: str = "") -> None:
        room = MAX_FINDINGS - len(self._findings)
        self._is_cut |= len(findings) > room
        for one in islice(findings, room):
            self._findings.append(replace(one, message=f"{called}{one.message}"))

    def _room(self, source: Source) -> Findings:
        return Findings(source, MAX_FINDINGS - len(self._findings))


def _decoded(document: Any, at: Path, findings: Findings) -> PolicyObject | None:
    kind = _kind_of(document)
    version = document.get("apiVersion") if isinstance(document, dict) else None
    shape = policies.shape_of(kind or "", version)
    if shape is None:
        text = "expected an object with a known kind"
        if kind is not None:
            text = f"the kind {_shown(kind)} is unknown"
        findings.unknown((*at, "kind"), text, kind, policies.KINDS)
        return None
    if version == policies.LEGACY_API_VERSION:
        text = f"{version} is deprecated, use {policies.API_VERSION}"
        findings.warn((*at, "apiVersion"), text)
    elif isinstance(version, str) and version != policies.API_VERSION:
        text = f"{_shown(version)} is unknown"
        findings.error((*at, "apiVersion"), text, (policies.API_VERSION,))
    return decode(document, shape, at, findings)


def _called(document: Any) -> str:
    kind = _kind_of(document)
    if kind not in policies.KINDS:
        return ""
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{kind} {_shown(name)}: " if isinstance(name, str) else ""


def _kind_of(document: Any) -> str | None:
    kind = document.get("kind") if isinstance(document, dict) else None
    return kind if isinstance(kind, str) else None


def _pairs(root: yaml.Node) -> Sequence[tuple[yaml.Node, yaml.Node]]:
    return root.value if isinstance(root, yaml.MappingNode) else ()


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}…")
