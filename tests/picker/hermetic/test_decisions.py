"""Records of requests on the picker's HTTP port, one for each."""

import json
from pathlib import Path
from typing import Any

import pytest

from picker.cli.options import ExplainFlags
from tests.support.picker.ext_proc_stream import REQUEST_ID, completion, response_head
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.whole_picker import WholePicker, whole_picker
from tests.support.waiting import until

USAGE = {"prompt_tokens": 7, "total_tokens": 17, "completion_tokens": 10}
ANSWER = json.dumps({"id": "cmpl-1", "model": "my-model", "usage": USAGE}).encode()


async def listed(picker: WholePicker) -> list[dict[str, Any]]:
    return json.loads((await picker.get("/decisions"))[1])["decisions"]


async def found(picker: WholePicker, request_id: str = "last") -> dict[str, Any]:
    status, text = await picker.get(f"/decisions/{request_id}")
    assert status == 200, text
    return json.loads(text)


async def over(picker: WholePicker) -> dict[str, Any]:
    async def is_over() -> bool:
        return [one["outcome"] not in ("waiting", "under-way") for one in await listed(picker)] == [
            True
        ]

    await until(is_over)
    return (await listed(picker))[0]


async def test_a_record_has_the_decision_and_the_response(tmp_path: Path) -> None:
    async with whole_picker(tmp_path, pods(page(), page(queue=3))) as picker:
        async with picker.stream() as stream:
            await stream.ask(completion())
            record = await found(picker)
            assert record["summary"]["outcome"] == "under-way"
            await stream.response_headers(served="127.0.0.1:1")
            await stream.response_body(ANSWER, ends=True)
            await stream.read(1)
        summary = await over(picker)
        assert summary["request_id"] == REQUEST_ID
        assert (summary["outcome"], summary["status"]) == ("completed", 200)
        assert summary["ttft_seconds"] is not None
        record = await found(picker, REQUEST_ID)
        assert (record["prompt_tokens"], record["completion_tokens"]) == (7, 10)
        assert record["served_by"] == "127.0.0.1:1"
        (profile,) = record["profiles"]
        first, second = profile["candidates"]
        assert profile["picked"] == [first["endpoint"]]
        assert first["total"] > second["total"]
        assert first["metrics_age_seconds"] is not None
        assert {one["scorer"]: one["weight"] for one in first["scores"]} == dict.fromkeys(
            (
                "queue-scorer",
                "kv-cache-utilization-scorer",
                "prefix-cache-scorer",
                "lora-affinity-scorer",
            ),
            1.0,
        )


@pytest.mark.parametrize("served", [None, "the other", "10.9.9.9:1"])
async def test_a_header_names_the_serving_endpoint_where_configured(
    tmp_path: Path, served: str | None
) -> None:
    backends = pods(page(), page(queue=9))
    flags = ExplainFlags(decision_header=True)
    async with whole_picker(tmp_path, backends, explain=flags) as picker, picker.stream() as stream:
        await stream.ask(completion())
        second = backends[1].host_port
        address = second if served == "the other" else served
        names = {None: backends[0].name, second: backends[1].name, "10.9.9.9:1": "10.9.9.9:1"}
        shown = {"x-request-id": REQUEST_ID, "x-pointsman-endpoint": names[address]}
        assert await stream.response_headers(served=address) == response_head(shown)
        await stream.response_body(ANSWER, ends=True)
        await stream.read(1)
