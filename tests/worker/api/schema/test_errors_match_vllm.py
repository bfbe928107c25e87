"""Bad requests get the answers of vLLM 0.32 (by `record_vllm_errors.py`), or documented others."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
TABLE = json.loads((ROOT / "tests/data/vllm_0.32_errors.json").read_text())
ROWS = {row["name"]: row for row in TABLE["rows"]}


@pytest.mark.parametrize("name", ROWS)
async def test_errors_match_vllms(bench: Any, name: str) -> None:
    row = ROWS[name]
    async with bench.client(max_model_len=128, vocab_size=49152) as client:
        response = await client.request(row["method"], row["path"], **row["send"])
    answer = {"status": response.status_code}
    if not response.is_success:
        answer |= response.json()["error"]
        message = answer.pop("message")
        # The message has the field at fault, if not its place in a list.
        path = (answer["param"] or "").removeprefix("body").split(".")
        fields = [name for name in path if not name.isdecimal()]
        context = "This model's maximum context length is 128 tokens."
        assert fields[-1] in message or message.startswith(context)
        assert bench.engine.requests == []
    assert answer == row.get("ours", row["vllm"])


def test_every_difference_is_one_that_the_documentation_names() -> None:
    differing = [row for row in TABLE["rows"] if "ours" in row or "why" in row]
    assert all(row["ours"] != row["vllm"] for row in differing)
    assert {row["why"] for row in differing} == set(TABLE["reasons"])
    page = " ".join((ROOT / "docs/http-api.md").read_text().split())
    assert [text for text in TABLE["reasons"].values() if f"- {text}" not in page] == []
