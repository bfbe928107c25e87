"""The choice of a pool by the model of a request."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from picker.app.model_choice import (
    MAX_AGE_SECONDS,
    MIN_AGE_SECONDS,
    KnownModels,
    ModelChoice,
    PoolOfModels,
)
from picker.errors import ErrorForm, RefusedError
from picker.framework.attributes import MODELS_ATTRIBUTE, ServedModel
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.policies import RewriteRule, RewriteTarget, RuleSet
from picker.types import Endpoint, EndpointMetrics, FinishCause, RawRequest, RouteDecision
from tests.support.picker.recording_director import RecordingDirector

COMPLETIONS = {":path": "/v1/completions"}
FORM_TYPE = 'multipart/form-data; boundary="a b"'
FORM = (
    b'--a b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\0\xff\r\n'
    b'--a b\r\nContent-Disposition: form-data; name="model"\r\n\r\nqwen\r\n--a b--\r\n'
)


@dataclass
class Pool:
    key: str
    director: Any
    datastore: Datastore = field(default_factory=Datastore)
    rules: RuleSet = field(default_factory=RuleSet)

    def __post_init__(self) -> None:
        self.datastore.set_endpoints([Endpoint(f"{self.key}-0", "10.0.0.1", 8000)])

    def lists(self, *models: str, parent: str = "") -> None:
        served = tuple(ServedModel(name, parent=parent) for name in models)
        self.datastore.set_attributes(f"default/{self.key}-0", {MODELS_ATTRIBUTE: served})

    def runs(self, *adapters: str) -> None:
        known = EndpointMetrics(active_models=frozenset(adapters))
        self.datastore.update_metrics(f"default/{self.key}-0", known)


@dataclass
class Scene:
    pools: Mapping[str, Pool]
    choice: ModelChoice
    metrics: PickerMetrics
    now: list[float]

    def pool_of(self, body: object) -> str:
        raw = RawRequest(COMPLETIONS, json.dumps(body).encode())
        return self.choice.choose(raw).key

    def refusal(
        self, body: bytes | None, path: str = "/v1/completions", **headers: str
    ) -> RefusedError:
        with pytest.raises(RefusedError) as refused:
            self.choice.choose(RawRequest({":path": path, **headers}, body))
        return refused.value

    def later(self, seconds: float = MAX_AGE_SECONDS) -> None:
        self.now[0] += seconds


def made() -> Scene:
    def routing(key: str) -> Callable[[RawRequest], Any]:
        async def route(raw: RawRequest) -> RouteDecision:
            return RouteDecision(f"{key}:1", (("x-own", "1"),))

        return route

    pools = {key: Pool(key, RecordingDirector(routing(key))) for key in "ab"}
    metrics, now = PickerMetrics(), [0.0]
    every = [
        PoolOfModels(one.key, one.director, one.datastore.snapshot, lambda one=one: one.rules)
        for one in pools.values()
    ]
    known = KnownModels(every, lambda: now[0])
    return Scene(pools, ModelChoice(known, metrics.unknown_model_total), metrics, now)


@pytest.fixture
def scene() -> Scene:
    scene = made()
    scene.pools["a"].lists("llama", "sql")
    scene.pools["b"].lists("qwen")
    return scene


def rule(*models: str) -> RuleSet:
    return RuleSet(rewrites=(RewriteRule("r", (RewriteTarget("x"),), frozenset(models)),))


def test_a_pool_is_chosen_by_its_listed_models(scene: Scene) -> None:
    found = [scene.pool_of({"model": name}) for name in ("llama", "sql", "qwen")]
    assert found == ["a", "a", "b"]


def test_a_pool_is_chosen_by_running_adapters_and_rewrites() -> None:
    scene = made()
    scene.pools["a"].runs("poems")
    scene.pools["b"].rules = rule("prod", "beta")
    assert [scene.pool_of({"model": name}) for name in ("poems", "prod", "beta")] == ["a", "b", "b"]


def test_a_rewrite_takes_precedence_and_then_the_order_of_pools(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.pools["b"].lists("qwen", "llama", "sql")
    scene.pools["b"].rules = rule("sql")
    for _ in range(3):
        assert (scene.pool_of({"model": "llama"}), scene.pool_of({"model": "sql"})) == ("a", "b")
        scene.later()
    assert caplog.text.count("both have the model llama: requests for it go to a") == 1
    assert caplog.text.count("both have the model sql: requests for it go to b") == 1


def test_the_lists_of_models_are_followed(scene: Scene) -> None:
    assert scene.refusal(b'{"model":"new"}').status == 404
    scene.pools["b"].lists("qwen", "new")
    scene.later(MIN_AGE_SECONDS)
    assert scene.pool_of({"model": "new"}) == "b"
    scene.pools["b"].lists("qwen")
    scene.later()
    assert scene.refusal(b'{"model":"new"}').status == 404


def test_a_pool_without_endpoints_retains_its_models(scene: Scene) -> None:
    assert scene.pool_of({"model": "qwen"}) == "b"
    scene.pools["b"].datastore.set_endpoints([])
    scene.later()
    assert scene.pool_of({"model": "qwen"}) == "b"


def test_an_unknown_model_is_a_404_that_names_the_known_ones(scene: Scene) -> None:
    refusal = scene.refusal(b'{"model":"gpt\\n5"}')
    text = "the model 'gpt 5' does not exist; known are: llama, qwen, sql"
    assert (refusal.status, refusal.message) == (404, text)
    assert dict(scene.metrics.unknown_model_total.numbers()) == {(): 1.0}


def test_an_unknown_model_is_a_503_until_every_pool_has_listed_its_models() -> None:
    scene = made()
    scene.pools["a"].lists("llama")
    refusal = scene.refusal(b'{"model":"qwen"}')
    assert refusal.status == 503
    assert "no endpoint of b has listed its models yet" in refusal.message


@pytest.mark.parametrize(
    ("body", "content_type", "text"),
    [
        (b"{}", "", "has no 'model'; known are: llama, qwen, sql"),
        (b'{"model":""}', "", "has no 'model'; known are: llama, qwen, sql"),
        (b'{"model":7}', "", "has no 'model'; known are: llama, qwen, sql"),
        (b'{"model":null}', "", "has no 'model'; known are: llama, qwen, sql"),
        (b"", "application/json", "the request body is empty"),
        (b"[]", "", "it must be an object, not a list"),
        (b"--boundary", "text/plain", "the request body is text/plain"),
        (FORM.replace(b"model", b"mode"), FORM_TYPE, "the form has no field 'model'; known are: "),
        (FORM, "multipart/form-data", "the form has no field 'model'; known are: "),
    ],
)
def test_a_body_without_a_readable_model_is_a_400_that_names_the_cause(
    scene: Scene, body: bytes, content_type: str, text: str
) -> None:
    refusal = scene.refusal(body, **{"content-type": content_type})
    assert refusal.status == 400
    assert text in refusal.message
    assert (refusal.param == "model") is ("'model'" in text)


def test_a_form_names_its_model(scene: Scene) -> None:
    raw = RawRequest({":path": "/v1/audio/transcriptions", "content-type": FORM_TYPE}, FORM)
    assert scene.choice.choose(raw).key == "b"


@pytest.mark.parametrize(
    "path", ["/v1/models/org%2Fsql", "/v1/models/org/sql", "/v1/realtime?a=b&model=org/sql"]
)
def test_the_path_of_a_request_without_a_body_names_its_model(scene: Scene, path: str) -> None:
    scene.pools["a"].lists("org/sql")
    assert scene.choice.choose(RawRequest({":path": path}, None)).key == "a"
    assert scene.refusal(None, path.replace("sql", "x")).status == 404


def test_a_lone_surrogate_does_not_hide_the_model(scene: Scene) -> None:
    raw = RawRequest(COMPLETIONS, rb'{"prompt":"\ud83d","model":"qwen"}')
    assert scene.choice.choose(raw).key == "b"


def test_the_list_of_models_has_those_of_all_pools() -> None:
    scene = made()
    scene.pools["a"].lists("sql", parent="llama")
    scene.pools["b"].lists("qwen")
    listing = scene.refusal(None, "/v1/models?x=1")
    body, headers = listing.answer(ErrorForm.OPENAI)
    assert (listing.status, dict(headers)) == (200, {"content-type": "application/json"})
    entries: Iterable[dict[str, Any]] = json.loads(body)["data"]
    assert [(one["id"], one["owned_by"], one.get("parent")) for one in entries] == [
        *(("qwen", "b", None), ("sql", "a", "llama"))
    ]
    assert scene.refusal(None, "/version").status == 404


async def test_the_chosen_pool_serves_the_exchange(scene: Scene) -> None:
    exchange = scene.choice.begin(lambda reason: None)
    raw = RawRequest(COMPLETIONS, b'{"model":"qwen"}')
    assert exchange.decides_at_once(raw) is False  # the answer of the fake director
    decision = await exchange.route(raw)
    assert decision.destination == "b:1"
    assert decision.set_headers == (
        *(("x-own", "1"), ("x-pointsman-pool", "b")),
        *(("x-gateway-model-name", "qwen"), ("x-gateway-base-model-name", "qwen")),
    )
    exchange.finish(FinishCause.COMPLETED, 200, "10.0.0.1:8000")
    (own,) = scene.pools["b"].director.exchanges
    assert own.finished.result() == (FinishCause.COMPLETED, 200, "10.0.0.1:8000")
    assert scene.pools["a"].director.exchanges == []


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"model":"sql"}', {"x-gateway-model-name": "sql", "x-gateway-base-model-name": "llama"}),
        (b'{"model":"gpt"}', {"x-gateway-model-name": "gpt"}),  # of a pool with another picker
        (b'{"model":"a\\nx: y"}', {}),
        (b"{}", {}),
        (b"{", {}),
        (None, {}),
    ],
)
async def test_for_a_gateway_the_model_is_named_and_no_pool_chosen(
    scene: Scene, body: bytes | None, headers: dict[str, str]
) -> None:
    scene.pools["a"].lists("sql", parent="llama")
    choice = ModelChoice(scene.choice.models, scene.metrics.unknown_model_total, names_only=True)
    exchange = choice.begin(lambda reason: None)
    raw = RawRequest(COMPLETIONS, body)
    assert exchange.decides_at_once(raw)
    decision = await exchange.route(raw)
    assert (decision.destination, dict(decision.set_headers)) == ("", headers)
    assert decision.skip_response
    exchange.finish(FinishCause.SKIPPED)
    assert [one.director.exchanges for one in scene.pools.values()] == [[], []]


async def test_an_unknown_model_is_refused_at_once_without_an_exchange(scene: Scene) -> None:
    exchange = scene.choice.begin(lambda reason: None)
    raw = RawRequest(COMPLETIONS, b'{"model":"x"}')
    assert exchange.decides_at_once(raw)
    with pytest.raises(RefusedError, match="'x' does not exist"):
        await exchange.route(raw)
    exchange.finish(FinishCause.REFUSED, 404)
    assert [one.director.exchanges for one in scene.pools.values()] == [[], []]
