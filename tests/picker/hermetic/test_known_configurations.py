"""The reference's own published and smoke configurations boot and serve (cases H44 and H46)."""

from pathlib import Path

import pytest

from tests.support.picker.ext_proc_stream import body_of, completion, destination_of
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.whole_picker import whole_picker

GOLDEN = Path(__file__).parents[2] / "golden/config"
PUBLISHED = (
    "published_flow_control",
    "published_optimized_baseline",
    "published_payload_agnostic",
    "published_pd_disaggregation",
    "published_predicted_latency_slo",
    "published_tiered_prefix_cache_cpu",
    "published_wide_ep_lws",
    "published_wide_ep_lws_dp_aware",
)
SMOKE = sorted(path.name.removesuffix(".in.yaml") for path in GOLDEN.glob("smoke_*.in.yaml"))
WAITING = {"published_flow_control"}
AT_ONE_PORT = {"published_wide_ep_lws_dp_aware"}  # the rank is named in a header
READS_NOTHING = {"published_payload_agnostic"}
ROLES = [{"llm-d.ai/role": role} for role in ("encode", "prefill", "decode", "both")]


@pytest.mark.parametrize("name", [name for name in (*PUBLISHED, *SMOKE) if name not in WAITING])
async def test_a_known_configuration_serves(tmp_path: Path, name: str) -> None:
    text = (GOLDEN / f"{name}.in.yaml").read_text()
    four = pods(*[page()] * 4, labels=ROLES)
    async with whole_picker(tmp_path, four, text) as picker, picker.stream() as stream:
        body = completion(prompt="a long story " * 100)
        said = await stream.ask(body)
        address, _, port = destination_of(said).rpartition(":")
        assert address in [pod.address for pod in four]
        assert body_of(said) == body
        assert int(port) in ([8000] if name in AT_ONE_PORT else [pod.port for pod in four])
        assert await stream.respond([b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'])
        reported = await picker.series("llm_d_epp_request_output_tokens_sum")
        assert reported == (None if name in READS_NOTHING else 4)
        assert await picker.series("pointsman_plugin_failures_total") is None
        assert await picker.is_idle()
