"""Bytes → `EndpointPickerConfig`, with findings that point at a line. Reads no files."""

from dataclasses import dataclass, field

from picker.config import schema
from picker.config.decode import decode_most
from picker.config.documents import as_plain, unusable, yaml_loader
from picker.config.findings import Findings, Source
from picker.config.schema import EndpointPickerConfig

MAX_CONFIG_BYTES = 1024 * 1024  # as the endpoints file of the reference


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A decoded configuration. With errors among the `findings` it holds the valid parts, so that
    these can be checked too; `build` then refuses it. `content` is the original text.
    """

    config: EndpointPickerConfig
    source: Source
    findings: Findings = field(compare=False)
    content: bytes = field(default=b"", compare=False, repr=False)


def load_config(content: bytes, name: str) -> LoadedConfig:
    """Decode a configuration; `name` (a file, a flag) is for messages. Raises `InvalidConfigError`
    unless `content` is a YAML document; all other errors become findings.
    """
    with yaml_loader(content, name, "the configuration", MAX_CONFIG_BYTES) as loader:
        root = loader.get_single_node()
        if root is None:
            raise unusable(name, "the configuration is empty")
        source = Source(name, root)
        findings = Findings(source)
        document = as_plain(loader, root, name, findings)
    # As much as is valid, so that `build` can report its own errors together with these.
    config = decode_most(document, EndpointPickerConfig, (), findings)
    if config.api_version == schema.DEPRECATED_API_VERSION:
        text = f"apiVersion {config.api_version} is deprecated, use {schema.API_VERSION}"
        findings.warn(("apiVersion",), text)
    elif config.api_version and config.api_version not in schema.API_VERSIONS:
        text = f"'{config.api_version}' is unknown"
        findings.error(("apiVersion",), text, schema.API_VERSIONS)
    if config.kind and config.kind != schema.KIND:
        findings.error(("kind",), f"'{config.kind}' is unknown", (schema.KIND,))
    return LoadedConfig(config, source, findings, content)
