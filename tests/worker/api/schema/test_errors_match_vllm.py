"""Bad and odd requests: what vLLM 0.32 answers, and this server.

The answers of vLLM are a real server's, recorded by `scripts/record_vllm_errors.py`. A row without
`ours` is answered alike: status, type, param and code. Where a difference is meant, `ours` is the
answer, and `why` names the reason.
"""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
TABLE = json.loads((ROOT / "tests/data/vllm_0.32_errors.json").read_text())
ROWS = {row["name"]: row for row in TABLE["rows"]}


@pytest.mark.parametrize("name", ROWS)
async def test_errors_match_vllms(bench: Any, name: str) -> None:
    """Status, type, param and code, or the difference that the table has."""
    row = ROWS[name]
    async with bench.client(max_model_len=128, vocab_size=49152) as client:
        response = await client.request(row["method"], row["path"], **row["send"])
    answer = {"status": response.status_code}
    if not response.is_success:
        answer |= response.json()["error"]
        del answer["message"]
    assert answer == row.get("ours", row["vllm"])


def test_every_difference_is_one_that_the_documentation_names() -> None:
    """A row that differs has a reason, a reason has a row, and docs/http-api.md has them all."""
    differing = [row for row in TABLE["rows"] if "ours" in row or "why" in row]
    assert all(row["ours"] != row["vllm"] for row in differing)
    assert {row["why"] for row in differing} == set(TABLE["reasons"])
    page = " ".join((ROOT / "docs/http-api.md").read_text().split())
    assert [text for text in TABLE["reasons"].values() if f"- {text}" not in page] == []
