"""A whole picker of one pool or several, whose decisions are recorded under constant changes."""

import asyncio
import json
import stat
from pathlib import Path
from random import Random
from typing import Any

from fleet.commands.cli import main
from picker.cli.options import RecordFlags
from picker.recording.lines import read_recording
from picker.recording.replay import Redecided, Replay
from tests.depth import by_depth
from tests.support.picker.ext_proc_stream import GatewayStream, completion
from tests.support.picker.metrics_pages import START_SECONDS, Pod, page, pods
from tests.support.picker.pools_scene import several_pools
from tests.support.picker.whole_picker import HEAD, WholePicker, whole_picker
from tests.support.waiting import until

SECRET = "canary-of-a-client"
CONFIG = f"""{HEAD}
plugins:
- {{type: queue-scorer}}
- {{type: kv-cache-utilization-scorer}}
- {{type: prefix-cache-scorer}}
- {{type: lora-affinity-scorer}}
- {{type: token-load-scorer, parameters: {{queueThresholdTokens: 3000}}}}
- {{type: no-hit-lru-scorer}}
- {{type: session-affinity-scorer, parameters: {{strategy: session_id}}}}
- {{type: by-label, parameters: {{label: tier, validValues: [gold], allowsNoLabel: false}}}}
- {{type: by-label, name: noble, parameters: {{label: tier, validValues: [platinum]}}}}
- type: concurrency-detector
  parameters: {{maxConcurrency: 6}}
- {{type: header-profile-handler, parameters: {{headerName: x-profile, defaultProfile: all}}}}
schedulingProfiles:
- name: all
  plugins:
  - {{pluginRef: queue-scorer}}
  - {{pluginRef: kv-cache-utilization-scorer}}
  - {{pluginRef: prefix-cache-scorer, weight: 3}}
  - {{pluginRef: lora-affinity-scorer}}
  - {{pluginRef: token-load-scorer}}
  - {{pluginRef: no-hit-lru-scorer}}
- name: sticky
  plugins:
  - {{pluginRef: concurrency-detector}}
  - {{pluginRef: session-affinity-scorer, weight: 5}}
  - {{pluginRef: queue-scorer}}
- name: gold
  plugins:
  - {{pluginRef: by-label}}
  - {{pluginRef: token-load-scorer}}
- name: noble
  plugins:
  - {{pluginRef: noble}}
"""
REQUESTS = by_depth(300, 1000)
AT_ONCE = 12
ANSWER = json.dumps({"model": "m", "usage": {"prompt_tokens": 4, "completion_tokens": 2}}).encode()


class Clients:
    def __init__(self, picker: WholePicker) -> None:
        self.picker, self.draw, self.left = picker, Random(1), REQUESTS
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def run(self) -> None:
        while self.left > 0:
            await self.go_on.wait()
            self.left -= 1
            stream = GatewayStream(self.picker.channel)
            try:
                await self.ask(stream)
            finally:
                stream.call.cancel()

    async def ask(self, stream: GatewayStream) -> None:
        draw = self.draw
        topic = draw.choice(("ships", "shoes", "wax"))
        prompt = f"All about {topic}. " * draw.choice((3, 40)) + str(draw.randrange(50)) * 100
        body = completion(draw.choice(("base", "one", "two")), prompt, stream=False)
        headers = {
            "authorization": f"Bearer {SECRET}",
            "cookie": f"id={SECRET}",
            "x-session-id": f"{SECRET}-{draw.randrange(9)}",
            "x-request-id": f"r-{draw.randrange(10**9)}",
            "x-profile": draw.choice(("all", "sticky", "gold", "all", "noble")),
        }
        if draw.random() < 0.05:
            headers["prefer"] = "if-available"
        said = await stream.ask(body, headers, path=f"/v1/completions?key={SECRET}")
        if said[0].WhichOneof("response") == "immediate_response" or draw.random() < 0.2:
            return
        await stream.respond([ANSWER[:9], ANSWER[9:]])


async def unrest(picker: WholePicker, config: Path, clients: Clients) -> None:
    all_pods: list[Pod] = list(picker.pods)
    draw, step = Random(2), 0
    changes = {
        2: lambda: config.write_text(CONFIG.replace("weight: 3", "weight: 1")),
        4: lambda: picker.list_endpoints(all_pods[1:]),
        6: lambda: picker.list_endpoints(all_pods),
        8: lambda: config.write_text(CONFIG),
    }

    async def reloads() -> float | None:
        return await picker.series("pointsman_config_reloads_total", result="success")

    while clients.left > 0:
        done = (REQUESTS - clients.left) * 10 // REQUESTS
        while step < done:
            step += 1
            changes.get(step, lambda: None)()
            if step == 7:  # the new configuration decides before the old one is back
                clients.go_on.clear()
                await until(reloads)
                clients.go_on.set()
        for pod in all_pods:
            started = START_SECONDS + (done if pod is all_pods[2] else 0)
            adapters = draw.sample(("one", "two", "three"), 2)
            pod.page = page(draw.randrange(5), draw.random(), adapters, started=started)
        await asyncio.sleep(0.02)


async def recorded(folder: Path) -> Path:
    path, config = folder / "recording.jsonl", folder / "config.yaml"
    config.write_text(CONFIG)
    labels = [{"tier": "gold"}, {"tier": "iron"}, {"tier": "gold"}, {"tier": "iron"}]
    four = pods(*[page()] * 4, labels=labels)
    changes = {"config_file": config, "record": RecordFlags(path)}
    async with whole_picker(folder, four, None, **changes) as picker:
        clients = Clients(picker)
        assert await picker.series("pointsman_recording_active") == 1
        async with asyncio.TaskGroup() as group:
            group.create_task(unrest(picker, config, clients))
            for _ in range(AT_ONCE):
                group.create_task(clients.run())
        await until(picker.is_idle)
        assert await picker.series("pointsman_recording_lost_lines_total") == 0
        assert (await picker.series("pointsman_config_reloads_total", result="success") or 0) >= 1
    return path


def decided(path: Path) -> list[Redecided]:
    return list(Replay(str(path)).decisions(read_recording(path)))


async def test_mixed_requests_are_decided_again_as_they_were(tmp_path: Path, capsys: Any) -> None:
    path = await recorded(tmp_path)
    found = decided(path)
    assert [one for one in found if not one.is_identical] == []
    assert len({one.recorded.request.id for one in found}) == REQUESTS
    assert len({one.recorded.config for one in found}) >= 2
    assert any(one.recorded.refusal for one in found)
    content = path.read_bytes()
    assert SECRET.encode() not in content
    assert content.count(b'"change":"forgotten"') >= 2
    assert content.splitlines()[-1].startswith(b'{"line":"stop","reason":"ended"')
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main(["replay", str(path)]) == 0
    count = f"{len(found):,}"
    assert capsys.readouterr().out.splitlines()[0] == f"{count} decisions, {count} identical"


async def test_the_end_of_the_recording_is_not_the_end_of_the_picker(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    async with whole_picker(tmp_path, pods(page()), record=RecordFlags(path, 9000)) as picker:
        for _ in range(20):
            assert await picker.destination(completion())
        assert await picker.series("pointsman_recording_active") == 0
        assert await picker.requests() == 20
    assert path.stat().st_size <= 9000
    found = decided(path)
    assert 0 < len(found) < 20
    assert all(one.is_identical for one in found)


REQUESTS_BY_POOL = {"llama": 40, "x/qwen": 25, "y/qwen": 15}


async def test_each_pool_is_decided_again_as_it_was(tmp_path: Path, capsys: Any) -> None:
    some = pods(page(), page(queue=2), page(queue=1))
    pools = {"llama": some, "x/qwen": some, "y/qwen": pods(page())}
    record = RecordFlags(tmp_path / "decisions-{pool}.jsonl")
    async with several_pools(tmp_path, pools, record=record) as scene:

        async def ask(key: str, number: int) -> None:
            async with scene[key].stream() as stream:
                await stream.ask(completion(prompt=f"about {key} {number % 5} " * 40))
                await stream.respond([b"{}"])

        numbered = [
            (key, number) for key, most in REQUESTS_BY_POOL.items() for number in range(most)
        ]
        await asyncio.gather(*(ask(*one) for one in numbered))
        for key in REQUESTS_BY_POOL:
            await until(scene[key].is_idle)
    for key, number in REQUESTS_BY_POOL.items():
        path = tmp_path / f"decisions-{key.replace('/', '_')}.jsonl"
        found = list(Replay(str(path)).decisions(read_recording(path)))
        assert len(found) == number
        assert all(one.is_identical for one in found)
        assert header_of(path) == key.rpartition("/")[2]
        assert main(["replay", str(path)]) == 0
        summary = capsys.readouterr().out.splitlines()[0]
        assert summary == f"{number} decisions, {number} identical"


def header_of(path: Path) -> str:
    header = next(read_recording(path)).line
    return header.pool_name
