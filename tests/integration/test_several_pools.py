"""Several pools behind one real Envoy: the pool that a request names serves it."""

import json
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from fleet.envoy.settings import Mechanism
from picker.app.model_choice import MODEL_HEADER
from picker.config.pool_file import read_pool_file
from tests.support.fleet.envoy_of_pools import (
    Answer,
    Document,
    PickerProcess,
    PoolsScene,
    add_picker,
    add_route,
    add_split,
    asking,
    bootstrap,
    by_cluster,
    by_metadata,
    ext_proc,
    http_filters,
    pools_scene,
    running,
    served_pool,
)
from tests.support.local_ports import free_port
from tests.support.waiting import until
from tests.support.worker.sim_worker import sim_worker

pytestmark = [pytest.mark.envoy, pytest.mark.full]
ROOT = Path(__file__).parents[2]
A, B, C = POOLS = ("a", "b", "c")
SIGMAS = 4.5  # of a share: missed by chance once in 150,000 runs


def crossed(answers: Iterable[tuple[str, Answer]]) -> list[tuple[str, Answer]]:
    return [
        (pool, one)
        for pool, one in answers
        if one.pool != pool
        or one.destination != one.worker
        or not (one.path or "").startswith("/v1/")
    ]


def strayed(answers: Iterable[tuple[str, Answer]]) -> list[tuple[str, Answer]]:
    return [(pool, one) for pool, one in crossed(answers) if one.pool != pool or one.destination]


@asynccontextmanager
async def picked_for(
    scene: PoolsScene, document: Document | str, pools: Iterable[str], *pickers: PickerProcess
) -> AsyncIterator[None]:
    async with running(*pickers):
        await scene.start_envoy(document)
        for pool in pools:
            await scene.until_picked(pool)
        yield


def of_all(scene: PoolsScene, *flags: str) -> PickerProcess:
    return PickerProcess(scene.folder, [served_pool(name) for name in scene.workers], *flags)


async def test_one_picker_serves_three_separate_pools(tmp_path: Path) -> None:
    async with pools_scene(tmp_path, *POOLS) as scene:
        picker = of_all(scene)
        document = bootstrap(scene, picker, Mechanism.OVERRIDE_HOST)
        add_route(document, "unnamed", A, None)
        add_route(document, "unknown", A, by_metadata("d"))
        async with picked_for(scene, document, POOLS, picker):
            before = await scene.counted(picker, "llm_d_epp_request_total")
            answers = await scene.crowd(POOLS, 60)
            assert crossed(answers) == []
            served = Counter(one.worker for _, one in answers)
            assert set(served) == {one.host_port for both in scene.workers.values() for one in both}
            after = await scene.counted(picker, "llm_d_epp_request_total")
            assert {pool: after[pool] - before[pool] for pool in POOLS} == dict.fromkeys(POOLS, 60)

            words = {"unnamed": "asks for no pool", "unknown": "another pool than a, b, c"}
            for place, one in await scene.crowd(list(words), 10):
                assert one.status == 500, one
                assert words[place] in one.text
            assert await scene.counted(picker, "pointsman_unknown_pool_total") == {"": 20}
            assert (await scene.ask("nowhere")).status == 404
            assert await scene.counted(picker, "llm_d_epp_request_total") == after


async def test_the_pool_of_a_route_overrides_that_of_the_filter(tmp_path: Path) -> None:
    async with pools_scene(tmp_path, A, B) as scene:
        picker = of_all(scene)
        document = bootstrap(scene, picker)
        named = {"key": "x-pointsman-pool", "value": A}
        ext_proc(document)["grpc_service"]["initial_metadata"] = [named]
        asking(document, A, {})
        async with picked_for(scene, document, (A, B), picker):
            assert crossed(await scene.crowd([A, B], 20)) == []


async def test_each_pool_may_have_a_port_of_its_own(tmp_path: Path) -> None:
    async with pools_scene(tmp_path, *POOLS, "empty") as scene:
        (tmp_path / "empty.yaml").write_text('{"endpoints": []}')
        ports = {pool: free_port() for pool in scene.workers}
        pools = [served_pool(pool, f"grpc-port={port}") for pool, port in ports.items()]
        picker = PickerProcess(tmp_path, pools, "--health-checking")
        document = bootstrap(scene, picker)
        for pool, port in ports.items():
            add_picker(document, f"picker-{pool}", port, port)
            asking(document, pool, by_cluster(f"picker-{pool}"))
        add_route(document, "unnamed", A, None)
        async with picked_for(scene, document, POOLS, picker):
            assert crossed(await scene.crowd(POOLS, 60)) == []
            assert (await scene.ask("unnamed")).status == 500
            assert (await scene.ask("empty")).status == 503


async def shares(scene: PoolsScene, count: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for _, one in await scene.crowd(["split"], count):
        assert one.status == 200, one
        assert one.chosen is not None
        assert crossed([(one.chosen, one)]) == []
        found[one.chosen] += 1
    return found


def is_share(seen: int, count: int, wanted: float) -> bool:
    return bool(abs(seen - count * wanted) <= SIGMAS * (count * wanted * (1 - wanted)) ** 0.5)


@pytest.mark.parametrize("is_one", [False, True], ids=["two-pickers", "one-picker"])
async def test_requests_are_split_between_pools_by_weight(tmp_path: Path, is_one: bool) -> None:
    count = 500
    async with pools_scene(tmp_path, A, B) as scene:
        both = [of_all(scene)]
        if not is_one:
            both = [PickerProcess(tmp_path, [served_pool(pool)]) for pool in (A, B)]
        document = bootstrap(scene, both[0])
        ways = {pool: by_metadata(pool) for pool in (A, B)}
        if not is_one:
            ways = {pool: _at(document, pool, one) for pool, one in zip((A, B), both, strict=True)}
        add_split(document, "split", {A: (70, ways[A]), B: (30, ways[B])})
        async with picked_for(scene, document, (A, B), *both):
            found = await shares(scene, count)
        assert set(found) == {A, B}
        assert is_share(found[A], count, 0.7), found


def _at(document: Document, pool: str, picker: PickerProcess) -> Document:
    cluster = f"picker-{pool}"
    add_picker(document, cluster, picker.grpc, picker.health)
    asking(document, pool, by_cluster(cluster))
    return by_cluster(cluster)


@pytest.mark.parametrize(
    ("mechanism", "is_buffered"),
    [
        (Mechanism.OVERRIDE_HOST, False),
        (Mechanism.OVERRIDE_HOST, True),
        (Mechanism.ORIGINAL_DST, False),
    ],
)
async def test_the_model_chooses_the_pool(
    tmp_path: Path, mechanism: Mechanism, is_buffered: bool
) -> None:
    async with pools_scene(tmp_path, A, B) as scene:
        for at, worker in enumerate(scene.workers[A]):
            worker.models = {"llama": None, "sql": "llama"} if at else {"llama": None}
        for worker in scene.workers[B]:
            worker.models, worker.running = {"qwen": None}, ["poems"]
        picker = of_all(scene, "--route-by-model")
        buffered = {"buffer_request_body": is_buffered}
        document = bootstrap(scene, picker, mechanism, route_by_model=True, **buffered)
        expected = {"llama": A, "sql": A, "qwen": B, "poems": B}
        async with picked_for(scene, document, (A, B), picker):

            async def found() -> dict[str, str | None]:
                return {name: (await scene.by_model(name)).pool for name in expected}

            await until(found, lambda pools: pools == expected, what="all models are known")
            for _ in range(10):
                for name, pool in expected.items():
                    lie = A if pool == B else B
                    one = await scene.by_model(name, x_pointsman_pool=lie)
                    assert crossed([(pool, one)]) == []
            assert {name: (await scene.by_form(name)).pool for name in expected} == expected
            unknown = await scene.by_model("mixtral")
            assert unknown.status == 404
            assert "The model 'mixtral' does not exist; known are: llama, poems, qwen, sql" in (
                unknown.text
            )
            assert (await scene.send("POST", "/v1/completions", {"prompt": "x"})).status == 400
            listed = json.loads((await scene.send("GET", "/v1/models")).text)
            assert [one["id"] for one in listed["data"]] == sorted(expected)
            assert (await scene.counted(picker, "pointsman_unknown_model_total"))[""] >= 1


def of_istio(filters: list[Document]) -> None:
    """Replace our filter by the one that deploy/ adds to Istio's gateways."""
    folder = ROOT / "deploy" / "k8s" / "components" / "body-based-routing"
    [patch] = yaml.safe_load((folder / "envoyfilter.yaml").read_text())["spec"]["configPatches"]
    added = patch["patch"]["value"]
    assert filters[0]["name"] != added["name"]
    added["typed_config"]["grpc_service"] = filters[0]["typed_config"]["grpc_service"]
    filters[0] = added


@pytest.mark.parametrize("is_buffered", [False, True], ids=["istio", "buffered"])
async def test_a_gateway_s_routes_match_the_model_that_the_picker_names(
    tmp_path: Path, is_buffered: bool
) -> None:
    """HTTPRoutes lead to InferencePools by `X-Gateway-Model-Name` in the same way."""
    async with pools_scene(tmp_path, A, B) as scene:
        for pool, both in scene.workers.items():
            for worker in both:
                worker.models = {pool: None}
        picker = of_all(scene, "--route-by-model", "--model-header-only")
        buffered = {"buffer_request_body": is_buffered}
        document = bootstrap(
            scene, picker, Mechanism.OVERRIDE_HOST, route_by_model=True, **buffered
        )
        if not is_buffered:
            of_istio(http_filters(document))
        text = json.dumps(document).replace("x-pointsman-pool", "x-gateway-model-name")
        async with running(picker):
            await scene.start_envoy(text)

            async def found() -> list[str | None]:
                return [(await scene.by_model(name)).pool for name in (A, B)]

            await until(found, lambda pools: pools == [A, B], what="both models are routed")
            answers = [(name, await scene.by_model(name)) for name in (A, B) * 10]
            assert [one.pool for _, one in answers] == [A, B] * 10
            assert {one.destination for _, one in answers} == {None}
            assert (await scene.by_model("unknown")).status == 503  # no route matches
            assert await scene.counted(picker, "llm_d_epp_request_total") == {}
        if not is_buffered:
            lost = await scene.send("POST", "/v1/completions", {"model": A}, {MODEL_HEADER: A})
            assert lost.status == 500  # the client's header is not believed


async def test_simulated_workers_of_two_models_share_an_address(tmp_path: Path) -> None:
    async with pools_scene(tmp_path) as scene:
        with (
            sim_worker("--served-model-name", "llama") as one,
            sim_worker("--served-model-name", "qwen", "qwen-alias") as two,
        ):
            for pool, worker in ((A, one), (B, two)):
                endpoint = {"name": f"{pool}-0", "address": "127.0.0.1", "port": worker.port}
                (tmp_path / f"{pool}.yaml").write_text(json.dumps({"endpoints": [endpoint]}))
                scene.workers[pool] = ()
            picker = of_all(scene, "--route-by-model")
            document = bootstrap(scene, picker, Mechanism.OVERRIDE_HOST, route_by_model=True)
            async with running(picker):
                await scene.start_envoy(document)

                async def served() -> dict[str, str]:
                    names = ("llama", "qwen", "qwen-alias")
                    return {name: served_model((await scene.by_model(name)).text) for name in names}

                wanted = {"llama": "llama", "qwen": "qwen", "qwen-alias": "qwen"}
                await until(served, lambda found: found == wanted, what="both models are served")
                assert (await scene.by_model("mixtral")).status == 404


def served_model(text: str) -> str:
    try:
        return str(json.loads(text)["model"])
    except (ValueError, KeyError):
        return text


def page_block() -> str:
    text = (ROOT / "docs" / "several-pools.md").read_text().partition("## Configure Envoy")[2]
    return "".join(re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def test_the_page_s_files_are_those_that_its_picker_reads(tmp_path: Path) -> None:
    lines = page_block().splitlines()
    workers = {}
    for words in map(shlex.split, lines):
        if words[:2] == ["pointsman", "worker"]:
            workers[words[words.index("--served-model-name") + 1]] = int(words[-1])
    (loop,) = (line for line in lines if line.startswith("for "))
    subprocess.run(["sh", "-c", loop], cwd=tmp_path, check=True)
    assert sorted(workers) == ["llama", "mixtral", "qwen"]
    for pool, port in workers.items():
        flag = f"--pool name={pool},endpoints-file={pool}.yaml"
        assert flag in page_block()
        path = tmp_path / f"{pool}.yaml"
        (endpoint,) = read_pool_file(path.read_bytes(), path.name, pool).contents.endpoints
        assert endpoint.port == port


async def test_the_bootstrap_that_comes_along_serves_the_page_s_picker(tmp_path: Path) -> None:
    (line,) = (one for one in page_block().splitlines() if one.startswith("pointsman picker "))
    text = (ROOT / "deploy" / "envoy" / "several-pools.yaml").read_text()
    async with pools_scene(tmp_path, "llama", "qwen", "mixtral") as scene:
        pools = tuple(scene.workers)
        for pool, both in scene.workers.items():
            for worker in both:
                worker.models = {pool: None}
        picker = PickerProcess(tmp_path, (), *shlex.split(line)[2:], "--config-file=config.yaml")
        places = {8080: scene.listen, 9901: scene.admin}
        places |= {9002: picker.grpc, 9003: picker.health, 9004: picker.xds}
        for written, port in places.items():
            text, count = re.subn(
                rf"port_value: {written}$", f"port_value: {port}", text, flags=re.M
            )
            assert count == 1
        async with running(picker):
            await scene.start_envoy(text, threads=1)
            for pool in pools:
                await scene.until_picked(pool)
            assert strayed(await scene.crowd(pools, 20)) == []
            assert {pool: (await scene.by_model(pool)).pool for pool in pools} == {
                pool: pool for pool in pools
            }
            elsewhere = await scene.ask("elsewhere")
            assert elsewhere.status == 404
            assert "The model 'm' does not exist" in elsewhere.text

            await picker.kill()
            answers = [(pools[0], await scene.ask(pools[0]))]
            # Envoy ejects it on another thread than the one that meets the failure.
            await scene.envoy.until_healthy("picker", 0)
            answers += [(pool, await scene.ask(pool)) for pool in pools * 10]
            lost = [one.status for _, one in answers if one.status != 200]
            assert lost in ([], [500])
            assert all(one.pool == pool for pool, one in answers if one.status == 200)
            assert (await scene.by_model("llama")).status == 503

            await picker.start()
            for pool in pools:
                await scene.until_picked(pool)
            assert strayed(await scene.crowd(pools, 20)) == []
