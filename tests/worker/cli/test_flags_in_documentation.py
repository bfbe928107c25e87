"""Every flag of the worker is documented, and every field of `--speculative-config`."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

from worker.cli.speculation import DEFAULT_MODEL_DRAFTS, parse
from worker.config import DRAFT_SAMPLE_METHODS, SPECULATIVE_METHODS, SpeculativeConfig

ROOT = Path(__file__).parents[3]


def test_the_document_agrees_with_the_parser() -> None:
    """`scripts/document_flags.py --write` repairs the document."""
    script = ROOT / "scripts" / "document_flags.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def speculation_rows() -> dict[str, tuple[str, str]]:
    text = (ROOT / "docs" / "speculation.md").read_text()
    table = text.split("| field | default | meaning |")[1].split("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in lines]
    return {
        name: (default, meaning)
        for names, default, meaning in rows
        for name in re.findall(r"`(\w+)`", names)
    }


def test_every_field_of_speculation_is_documented_with_its_default() -> None:
    rows = speculation_rows()
    fields = {field.name: field for field in dataclasses.fields(SpeculativeConfig)}
    assert set(rows) == {*fields, "draft_tensor_parallel_size"}
    for name, (default, _) in rows.items():
        if name.startswith(("suffix_", "enable_", "draft_sample", "rejection_")):
            assert default.strip("`") == str(fields[name].default).lower()
    assert "5, 5" in rows["prompt_lookup_min"][0]
    assert rows["num_speculative_tokens"][0].endswith(f"else {DEFAULT_MODEL_DRAFTS}")
    assert re.findall(r"`(\w+)`", rows["method"][1]) == list(SPECULATIVE_METHODS)
    named = rows["draft_sample_method"][1].split("when a request samples")[1]
    assert re.findall(r"`(\w+)`", named) == list(DRAFT_SAMPLE_METHODS)


def test_the_examples_of_speculation_are_valid() -> None:
    pages = "".join((ROOT / name).read_text() for name in ("README.md", "docs/speculation.md"))
    given = re.findall(r"(?:--speculative-config|-sc) '(\{.*?\})'", pages)
    parsed = [parse(json.loads(config.replace('\\"', '"'))) for config in given]
    assert {config.method for config in parsed} == set(SPECULATIVE_METHODS)
