"""Record what a vLLM server answers to the requests of tests/data/vllm_0.32_errors.json.

    python scripts/record_vllm_errors.py http://127.0.0.1:8000

writes its statuses and errors into that file. The server must be started as the file's `server`
says. Where our own answer is to be another, the row's `ours` and `why` say so; they stay.
"""

import json
import sys
from pathlib import Path
from typing import Any

import httpx

TABLE = Path(__file__).parents[1] / "tests/data/vllm_0.32_errors.json"
FIELDS = ("type", "param", "code")
MESSAGE_CHARS = 100  # for the reader; validation errors quote whole requests


def answer_of(response: httpx.Response) -> tuple[dict[str, Any], str | None]:
    """The status and the fields of the error, if there is one, and how its message begins."""
    if response.is_success:
        return {"status": response.status_code}, None
    error = response.json().get("error", {})
    fields = {name: error[name] for name in FIELDS if name in error}
    message = error.get("message")
    return {"status": response.status_code, **fields}, message and message[:MESSAGE_CHARS]


def main(url: str) -> None:
    """Ask for every row, and write the file anew."""
    table = json.loads(TABLE.read_text())
    with httpx.Client(base_url=url, timeout=60) as client:
        for row in table["rows"]:
            answer = client.request(row["method"], row["path"], **row["send"])
            row["vllm"], message = answer_of(answer)
            if message is not None:
                row["message"] = message
    rows = ",\n".join(json.dumps(row) for row in table.pop("rows"))
    head = json.dumps(table, indent=0, ensure_ascii=False).removesuffix("\n}")
    TABLE.write_text(f'{head},\n"rows": [\n{rows}\n]\n}}\n')


if __name__ == "__main__":
    main(sys.argv[1])
