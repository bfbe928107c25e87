"""The online model of latencies, compared with laws that it does not know."""

from collections.abc import Callable, Mapping, Sequence
from random import Random

import pytest

from picker.contrib.latency._model import (
    MAX_MODELS,
    MIN_SAMPLES,
    TERMS,
    Fitted,
    Latency,
    LatencyModel,
    LatencyModels,
    LoadFeatures,
    LoadIntegral,
    Request,
    costs_ms,
    mean_load,
)
from tests.depth import worlds

Sample = tuple[Request, LoadFeatures]
Law = Callable[[Sample], float]
SIGMA = 0.2  # of the lognormal noise: the mean error of a perfect model is 16 %
BEST_MAPE = 0.16


def _load(prompt: float, cached: float = 0, pending: float = 0, waiting: int = 0) -> LoadFeatures:
    uncached = (prompt - cached) / 1024
    return LoadFeatures(
        1.0, uncached, cached / 1024, pending / 1024, waiting / 8, 2.5, 0.3, 2.5 * uncached
    )


def _sample(rng: Random) -> Sample:
    prompt = rng.choice((100, 500, 2000, 8000)) * rng.uniform(0.5, 1.5)
    load = _load(
        prompt,
        prompt * rng.choice((0, 0, 0.5, 0.9)),
        rng.expovariate(1 / 2000),
        max(0, rng.randint(-30, 20)),
    )
    running = rng.randint(0, 60) / 8
    load = load._replace(
        running=running, kv_usage=running / 8, uncached_running=load.uncached * running
    )
    return Request.of(int(prompt)), load


def _ttft_ms(sample: Sample) -> float:
    request, load = sample
    work = 1024 * (load.uncached + load.pending)
    attention = 2.6 * load.uncached * request.prompt
    return 15 + work / 20 + attention + 320 * load.waiting + 2.4 * load.running


def _predicted(
    model: LatencyModel, request: Request, loads: Mapping[str, LoadFeatures]
) -> Sequence[float] | None:
    fitted = model.fitted(request)
    return None if fitted is None else fitted.predict(loads)


class Trial:
    def __init__(self, seed: int = 1, sigma: float = SIGMA) -> None:
        self.sigma = sigma
        self.rng = Random(seed)
        self.model = LatencyModel(TERMS[Latency.FIRST_TOKEN])
        self.errors: list[float] = []
        self.held: list[bool] = []
        self.changes = 0

    def run(self, samples: int, law: Law = _ttft_ms, endpoint: str = "a") -> None:
        for _ in range(samples):
            sample = request, load = _sample(self.rng)
            seen = law(sample) * self.rng.lognormvariate(0, self.sigma)
            said = _predicted(self.model, request, {endpoint: load})
            if said is not None:
                self.errors.append(abs(said[0] - seen) / seen)
                self.held.append(seen <= said[0] * self.model.p90_factor)
            self.changes += self.model.learn(request, load, endpoint, seen)

    def mape(self, last: int) -> float:
        return sum(self.errors[-last:]) / last

    def coverage(self, last: int) -> float:
        return sum(self.held[-last:]) / last


@pytest.mark.parametrize("seed", range(worlds(4)))
def test_errors_are_those_of_the_noise(seed: int) -> None:
    trial = Trial(seed)
    trial.run(2000)
    assert trial.mape(last=1000) < 1.1 * BEST_MAPE
    assert trial.coverage(last=1000) == pytest.approx(0.9, abs=0.03)
    assert trial.changes == 0


def test_a_model_predicts_nothing_before_it_has_enough_samples() -> None:
    trial = Trial()
    trial.run(MIN_SAMPLES)
    assert trial.errors == []
    trial.run(MIN_SAMPLES)
    assert trial.mape(last=MIN_SAMPLES) < 2 * BEST_MAPE


@pytest.mark.parametrize("times", [0.3, 3.0])
def test_a_changed_law_is_learned_at_once(times: float) -> None:
    trial = Trial()
    trial.run(1000)
    trial.run(40, lambda sample: times * _ttft_ms(sample))
    assert trial.changes == 1
    trial.run(300, lambda sample: times * _ttft_ms(sample))
    assert trial.mape(last=200) < 1.25 * BEST_MAPE
    assert trial.coverage(last=200) == pytest.approx(0.9, abs=0.06)


def test_unseen_features_stay_learnable_through_many_changes() -> None:
    trial = Trial()
    trial.run(400)
    for change in range(12):
        times = (3.0, 1.0)[change % 2]
        trial.run(400, lambda sample, times=times: times * _ttft_ms(sample))
    assert trial.mape(last=200) < 1.25 * BEST_MAPE
    errors = []
    for _ in range(600):
        request, load = _sample(trial.rng)
        request = request._replace(limit=trial.rng.uniform(0.1, 4))
        seen = _ttft_ms((request, load)) + 900 * request.limit
        said = _predicted(trial.model, request, {"a": load})
        assert said is not None
        errors.append(abs(said[0] - seen) / seen)
        trial.model.learn(request, load, "a", seen)
    assert sum(errors[-200:]) / 200 < BEST_MAPE


@pytest.mark.parametrize("times", [0.3, 3.0])
def test_a_change_is_seen_through_noise(times: float) -> None:
    trial = Trial(sigma=0.5)
    trial.run(100)
    trial.run(25, lambda sample: times * _ttft_ms(sample))
    assert trial.changes == 1


def test_a_slow_endpoint_has_a_factor_of_its_own() -> None:
    """The factor ends when the endpoint leaves, because its name may be reused."""
    trial = Trial()
    for _ in range(300):
        trial.run(1, endpoint="a")
        trial.run(1, endpoint="b")
        trial.run(1, lambda sample: 2 * _ttft_ms(sample), endpoint="slow")
    request, load = Request.of(1000), _load(1000)

    def ratio() -> float:
        quick, slow = _predicted(trial.model, request, {"a": load, "slow": load}) or (1, 0)
        return slow / quick

    assert ratio() == pytest.approx(2.0, rel=0.1)
    assert trial.mape(last=300) < 1.2 * BEST_MAPE
    trial.model.forget("slow")
    assert ratio() < 1.5


def test_predictions_have_a_floor() -> None:
    trial = Trial()
    trial.run(200, lambda sample: 100 + 1000 * sample[1].kv_usage)
    idle = LoadFeatures(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0)
    assert (_predicted(trial.model, Request.of(0), {"a": idle}) or [0])[0] > 0


@pytest.mark.parametrize("latency", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_latency_is_not_learned(latency: float) -> None:
    """It would spoil the weights for good."""
    model = LatencyModel(TERMS[Latency.WHOLE])
    assert not model.learn(Request.of(1), _load(1), "a", latency)
    assert model.num_samples == 0


def test_each_model_and_each_latency_is_learned_separately() -> None:
    """Clients choose the names of models, so their number is limited."""
    models, request, load = LatencyModels(), Request.of(100), _load(100)
    for name, kind, latency in (
        ("m", Latency.FIRST_TOKEN, 100.0),
        ("m", Latency.PER_TOKEN, 10.0),
        ("n", Latency.FIRST_TOKEN, 900.0),
    ):
        for _ in range(MIN_SAMPLES):
            models.learning(name, kind).learn(request, load, "a", latency)

    def said(name: str, kind: Latency) -> float | None:
        fitted = models.fitted(name, kind, request)
        return None if fitted is None else fitted.predict({"a": load})[0]

    assert said("m", Latency.FIRST_TOKEN) == pytest.approx(100.0, rel=0.01)
    assert said("m", Latency.PER_TOKEN) == pytest.approx(10.0, rel=0.01)
    assert said("n", Latency.FIRST_TOKEN) == pytest.approx(900.0, rel=0.01)
    assert said("n", Latency.PER_TOKEN) is None
    for number in range(MAX_MODELS):
        models.learning(f"made up {number}", Latency.WHOLE)
    assert said("m", Latency.FIRST_TOKEN) is None


def _fitted(factors: Mapping[str, float], **weights: float) -> Fitted:
    nothing = dict.fromkeys(LoadFeatures._fields, 0.0)
    return Fitted(LoadFeatures(**nothing | weights), 0.0, factors, 1.0)


# 1024 uncached tokens at an endpoint with 16 running and 8 waiting requests; and an idle endpoint,
# half as fast, with the whole prompt cached.
_BUSY = LoadFeatures(1.0, 1.0, 0.0, 0.0, 1.0, 2.0, 0.0, 2.0)
_IDLE = LoadFeatures(1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_LOADS = {"busy": _BUSY, "idle": _IDLE}


def test_a_cost_is_the_time_of_the_request_and_the_time_that_others_lose() -> None:
    first = _fitted({"idle": 2.0}, uncached=60.0, cached=10.0, uncached_running=5.0)
    each = _fitted({"idle": 2.0}, one=10.0, running=0.8)
    first_ms, each_ms = first.predict(_LOADS), each.predict(_LOADS)
    assert (first_ms, each_ms) == ([70.0, 20.0], [11.6, 20.0])
    own_ms = [one + 100 * other for one, other in zip(first_ms, each_ms, strict=True)]
    costs = costs_ms(_LOADS, own_ms, first, each, num_tokens=100.0)
    prompt, token = (60 - 10) * 1.0 + 5 * 2.0, 0.8 / 8
    assert costs == pytest.approx([70 + 100 * 11.6 + 24 * (prompt + 100 * token), 20 + 2000])


def test_the_cost_of_a_whole_answer_has_no_time_per_token() -> None:
    """No request makes the others faster."""
    whole = _fitted({}, one=500.0, uncached=40.0, cached=90.0, running=80.0)
    whole_ms = whole.predict(_LOADS)
    assert costs_ms(_LOADS, whole_ms, whole, whole, 1.0) == pytest.approx([700 + 24 * 80 / 8, 590])


def test_the_load_over_time_is_a_mean_between_two_moments() -> None:
    integral = LoadIntegral(0.0)
    since = integral.until(1.0, _IDLE._replace(running=9.0))
    integral.until(2.0, _IDLE._replace(running=1.0, kv_usage=0.2))
    integral.until(2.0, _IDLE)
    until = integral.until(5.0, _IDLE._replace(running=5.0, kv_usage=0.6, pending=4.0))
    expected = _BUSY._replace(running=4.0, kv_usage=0.5, pending=3.0, waiting=0.0)
    assert mean_load(_BUSY, since, until) == pytest.approx(expected)
    assert mean_load(_BUSY, until, integral.until(9.0, None)) == _BUSY


def test_the_expected_length_is_the_mean_of_earlier_answers() -> None:
    models = LatencyModels()
    assert models.num_tokens("m", 100) is None
    for num_tokens in (100, 300, 200):
        models.answered("m", num_tokens)
    assert models.num_tokens("m", None) == pytest.approx(200)
    assert models.num_tokens("m", 50) == 50
    for number in range(MAX_MODELS):
        models.answered(f"made up {number}", 1)
    assert models.num_tokens("m", None) is None
