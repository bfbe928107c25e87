"""Every example in the documentation is run, or at least taken by the program it is for."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import mkdocs.commands.build
import mkdocs.config
import pytest
import yaml

import fleet.command_lines
from fleet.envoy.tenants import read_tenants
from picker.config.build import build
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.config.pool_file import read_pool_file
from picker.metrics.picker_metrics import PickerMetrics
from picker.planner.autoscale_file import read_autoscale_file
from scripts.wrap_prose import pages, wrapped

ROOT = Path(__file__).parent.parent
PAGES = tuple(pages())
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def blocks(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, (kind, text) in enumerate(FENCE.findall(page.read_text())):
            if kind == language:
                yield f"{page.relative_to(ROOT)}#{number}", text


def commands() -> Iterator[str]:
    for _, text in blocks("bash"):
        for line in text.splitlines():
            if line.startswith("pointsman "):
                yield line


YAML = list(blocks("yaml"))


@pytest.mark.parametrize(("name", "text"), YAML, ids=[name for name, _ in YAML])
def test_yaml_examples_are_valid(name: str, text: str, tmp_path: Path) -> None:
    """A configuration builds; an endpoints file has no bad entry and no bad object; what names
    groups is a file of `--autoscale`, what names tenants one of `--tenants`; one that names its
    file is compared with it (`tests/deploy/test_gateways.py`).
    """
    if text.startswith("# deploy/"):
        assert list(yaml.safe_load_all(text))
    elif "kind: EndpointPickerConfig" in text:
        loaded = load_config(text.encode(), name)
        assembly = build(loaded, builtin_plugins(), PickerMetrics(), lambda: 0.0)
        assert not assembly.warnings
    elif "\ngroups:" in text:
        assert read_autoscale_file(text.encode(), name)
    elif "\ntenants:" in text:
        path, keys = tmp_path / "tenants.yaml", tmp_path / "keys"
        keys.mkdir()
        for file in re.findall(r"file: keys/([\w-]+)", text):
            (keys / file).write_text(f"sk-of-{file}-0123456789")
        path.write_text(text)
        assert read_tenants(path, {"ACME_KEY": "sk-0123456789abcdef"}).tenants
    else:
        read = read_pool_file(text.encode(), name, "default")
        assert len(read.contents.endpoints) == 2
        assert not read.findings


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_commands_are_taken_by_their_parsers(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    assert fleet.command_lines.parser_of(words[0]).parse_args(words[1:]) is not None


def test_there_are_examples_of_every_kind() -> None:
    assert len(YAML) >= 4
    assert len(set(commands())) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_is_listed_in_the_index() -> None:
    docs = ROOT / "docs"
    listed = set(LINK.findall((docs / "index.md").read_text()))
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    assert {page for page in pages - listed if not page.startswith("decisions/")} == {"index.md"}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    config = mkdocs.config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    config.strict = True
    mkdocs.commands.build.build(config)
    assert (tmp_path / "index.html").is_file()
    assert '<h2 id="step-1-install">' in (tmp_path / "vllm.html").read_text()
    for page in tmp_path.rglob("*.html"):
        if page.name == "404.html":  # the theme's own
            continue
        text = page.read_text()
        assert not re.search(r'<h\d id="[^a-z_]', text), page
        loaded = re.findall(r'<(?:script|img|link rel="[si])[^>]*="(https?:[^"]+)', text)
        assert loaded == [], page
    listed = set(re.findall(r"\((\S+\.html)\)", (tmp_path / "llms.txt").read_text()))
    pages = {page.name.removesuffix(".md") for page in (ROOT / "docs").glob("*.md")}
    assert {Path(page).stem for page in listed} >= pages - {"index", "glossary", "contributing"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_fits_into_a_hundred_columns(page: Path) -> None:
    text = page.read_text()
    assert wrapped(text) == text


def test_wrapping_changes_prose_alone() -> None:
    long = "word " * 30
    code = f"```text\n{long}\n```"
    page = f"# {long}\n\n| {long} |\n\n{code}\n\n- {long.strip()}\n  {long.strip()}\n- b\n"
    before, _, item = wrapped(page).partition("- word")
    assert before == page.partition("- word")[0]
    assert item.split() == page.partition("- word")[2].split()
    lines = item.splitlines()
    assert max(map(len, lines)) <= 100
    assert all(line.startswith("  word") for line in lines[1:-1])
    assert lines[-1] == "- b"


def test_every_word_of_the_glossary_has_one_meaning() -> None:
    rows = (ROOT / "docs" / "glossary.md").read_text().split("|---|---|\n")[1].splitlines()
    named = [word.strip() for row in rows for word in row.split("|")[1].split("/")]
    words = [word.removesuffix(" token") for word in named]
    assert len(words) > 40
    assert sorted(words) == sorted(set(words))


def test_the_first_code_stands_in_the_first_twenty_lines() -> None:
    assert "```bash\nmake up\n```" in "\n".join((ROOT / "README.md").read_text().splitlines()[:20])
