"""Flags in vLLM's spelling resolve to one frozen configuration, or to one clear sentence."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from worker.cli.flags import build_parser, find_model, resolve
from worker.cli.server import read_chat_template
from worker.config import KvOffloadingConfig, LoraConfig, LoraModule, ServeConfig
from worker.errors import ConfigError
from worker.sim import tokenizer as sim
from worker.tokenizer.checkpoint import Checkpoint

TINY = Checkpoint(Path("/models/tiny.Q4_1.gguf"), "tiny", 2048, 49152, (2, 0), None, "", "")


def resolved(
    *flags: str, checkpoint: Checkpoint | None = TINY, environment: Mapping[str, str] | None = None
) -> ServeConfig:
    return resolve(build_parser().parse_args(flags), checkpoint, environment or {})


def test_defaults_come_from_the_model() -> None:
    config = resolved()
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert config.api.served_model_names == ("tiny",)
    assert config.api.accepted_model_names == ("/models/tiny.Q4_1.gguf",)
    assert config.api.max_model_len == config.engine.scheduler.max_model_len == 2048
    assert config.engine.fits_max_model_len
    assert config.engine.eos_token_ids == (2, 0)
    assert config.engine.model_path == "/models/tiny.Q4_1.gguf"


def test_the_simulator_needs_no_model() -> None:
    config = resolved("--engine", "sim", checkpoint=None)
    assert config.api.served_model_names == ("sim",)
    assert config.api.vocab_size == sim.VOCAB_SIZE
    words = (config.engine.sim.first_word_id, config.engine.sim.num_words)
    assert words == (sim.FIRST_WORD_ID, sim.NUM_WORDS)
    assert config.engine.model_path is None


def test_the_simulator_can_use_a_models_vocabulary() -> None:
    config = resolved("--engine", "sim").engine.sim
    assert 0 < config.first_word_id < config.first_word_id + config.num_words <= 49152


def test_flags_reach_the_engine() -> None:
    config = resolved(
        *("--max-model-len", "512", "--block-size", "32", "--num-gpu-blocks-override", "64"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--no-enable-prefix-caching"),
        *("--long-prefill-token-threshold", "128", "--max-num-queued-reqs", "9", "--seed", "3"),
        *("--num-threads", "2", "--dtype", "float32", "--served-model-name", "a", "b"),
        *("--quantization", "q4_1", "--kv-cache-dtype", "bfloat16"),
        *("--sim-prefill-tokens-per-second", "1000", "--sim-decode-base-ms", "5"),
        *("--sim-decode-per-seq-ms", "0.5", "--sim-time-scale", "0", "--shutdown-timeout", "7"),
    )
    engine = config.engine
    assert (engine.block_size, engine.num_blocks_override, engine.num_threads) == (32, 64, 2)
    assert (engine.dtype, engine.enable_prefix_caching) == ("float32", False)
    assert (engine.quantization, engine.kv_cache_dtype) == ("q4_1", "bfloat16")
    assert engine.scheduler.max_num_seqs == config.api.max_num_seqs == 4
    assert engine.scheduler.max_num_batched_tokens == 256
    assert engine.scheduler.long_prefill_token_threshold == 128
    assert engine.scheduler.max_model_len == config.api.max_model_len == 512
    assert not engine.fits_max_model_len
    assert config.api.max_num_queued_reqs == 9
    assert (config.api.served_model_names, config.api.seed) == (("a", "b"), 3)
    assert engine.sim.prefill_tokens_per_second == 1000
    assert (engine.sim.decode_base_seconds, engine.sim.time_scale) == (0.005, 0)
    assert engine.sim.decode_per_sequence_seconds == 0.0005
    assert config.shutdown_timeout_seconds == 7


def test_the_cache_and_the_scheduler_are_set_by_flags() -> None:
    engine = resolved(
        *("--kv-cache-memory-bytes", "2G", "--gpu-memory-utilization", "0.5"),
        *("--prefix-caching-hash-algo", "xxhash_cbor", "--prefix-caching-hash-seed", "7"),
        *("--no-enable-partial-hits", "--no-enable-fair-eviction", "--watermark", "0.01"),
        *("--no-async-scheduling", "--scheduling-policy", "fcfs", "--waiting-order", "lpm"),
        *("--preemption-victim", "last", "--max-bypasses", "3", "--in-batch-prefix-tokens", "0"),
        *("--no-reserve-full-prompt", "--step-budget", "9", "--step-budget-factor", "3"),
    ).engine
    assert (engine.kv_cache_memory_bytes, engine.gpu_memory_utilization) == (2 << 30, 0.5)
    assert engine.prefix_caching_hash_algo == "xxhash_cbor"
    assert engine.prefix_caching_hash_seed == "7"
    assert (engine.enable_partial_hits, engine.enable_fair_eviction) == (False, False)
    assert (engine.watermark, engine.async_scheduling) == (0.01, False)
    assert (engine.step_budget_seconds, engine.step_budget_factor) == (9, 3)
    scheduler = engine.scheduler
    assert (scheduler.policy, scheduler.waiting_order, scheduler.victim) == ("fcfs", "lpm", "last")
    assert (scheduler.max_bypasses, scheduler.in_batch_prefix_tokens) == (3, None)
    assert (scheduler.reserve_full_prompt, scheduler.enable_chunked_prefill) == (False, True)


def test_the_front_end_is_set_by_flags() -> None:
    config = resolved(
        *("--max-num-queued-tokens", "100", "--max-rss-bytes", "1.5G", "--max-logprobs", "-1"),
        *("--enable-request-id-headers", "--no-enable-prompt-tokens-details"),
        *("--enable-force-include-usage", "--return-tokens-as-token-ids", "--enable-admin-routes"),
        *("--sse-keep-alive-interval", "15", "--header-timeout", "5", "--body-timeout", "6"),
        *("--write-stall-timeout", "7", "--max-connections", "8", "--uds", "/run/w.sock"),
        *("--engine-failure-policy", "exit", "--max-engine-restarts", "1"),
        *("--heartbeat-timeout", "1.5", "--scheduling-policy", "fcfs", "--api-key", "k"),
        *("--allowed-origins", '["https://a.test", "null"]', "--allowed-methods", "[]"),
    )
    api = config.api
    assert (api.allowed_origins, api.allowed_methods) == (("https://a.test", "null"), ())
    assert (api.allowed_headers, api.allow_credentials) == (("*",), False)
    assert (api.max_num_queued_tokens, api.max_rss_bytes) == (100, 3 << 29)
    assert (api.max_logprobs, api.enable_request_id_headers) == (-1, True)
    assert (api.enable_prompt_tokens_details, api.enable_force_include_usage) == (False, True)
    assert (api.return_tokens_as_token_ids, api.enable_admin_routes) == (True, True)
    assert (api.sse_keep_alive_seconds, api.header_timeout_seconds) == (15, 5)
    assert (api.body_timeout_seconds, api.write_stall_seconds, api.max_connections) == (6, 7, 8)
    assert (api.enable_priority, api.api_keys) == (False, ("k",))
    assert resolved().api.sse_keep_alive_seconds is None
    assert (config.engine_failure_policy, config.max_engine_restarts) == ("exit", 1)
    assert (config.heartbeat_timeout_seconds, config.uds) == (1.5, "/run/w.sock")


def test_parsers_of_answers_are_set_by_flags() -> None:
    api = resolved("--tool-call-parser", "qwen3_coder", "--reasoning-parser", "deepseek_r1").api
    assert (api.tool_call_parser, api.reasoning_parser) == ("qwen3_coder", "deepseek_r1")
    assert resolved("--enable-auto-tool-choice").api == resolved().api
    api = resolved("--no-enable-auto-tool-choice").api
    assert (api.tool_call_parser, api.reasoning_parser) == (None, None)
    assert not api.enable_auto_tool_choice


def test_adapters_are_set_as_for_vllm() -> None:
    modules = ["sql=/a/sql", '{"name": "chat", "path": "/a/chat", "base_model_name": "base"}']
    flags = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", "64", "--lora-modules")
    config = resolved(*flags, *modules)
    assert config.engine.lora == LoraConfig(max_loras=3, max_cpu_loras=3, max_lora_rank=64)
    assert config.lora_modules == (
        LoraModule("sql", "/a/sql"),
        LoraModule("chat", "/a/chat", "base"),
    )
    assert not config.api.enable_adapter_routes
    assert resolved("--enable-lora", "--enable-admin-routes").api.enable_adapter_routes
    allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    assert resolved("--enable-lora", environment=allowed).api.enable_adapter_routes
    assert not resolved(environment=allowed).api.enable_adapter_routes


def test_a_list_flag_that_is_given_twice_has_all_values() -> None:
    for _ in range(2):  # nor does one command line leave something for the next
        config = resolved(
            *("--api-key", "k1", "--api-key", "k2", "k3"),
            *("--served-model-name", "a", "--served-model-name", "b"),
        )
        assert config.api.api_keys == ("k1", "k2", "k3")
        assert config.api.served_model_names == ("a", "b")


def test_variables_of_vllm_apply_and_flags_override_them() -> None:
    environment = {
        "PYTHONHASHSEED": "42",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
        "POD_IP": "10.0.0.7",
        "VLLM_API_KEY": "a,b",
    }
    config = resolved(environment=environment)
    assert config.engine.prefix_caching_hash_seed == "42"
    assert config.api.enable_admin_routes
    assert config.api.api_keys == ("a", "b")
    events = config.engine.kv_events
    assert (events.int_block_hashes, events.topic) == (False, "kv@10.0.0.7:8000@tiny")
    flags = ("--prefix-caching-hash-seed", "1", "--api-key", "c")
    config = resolved(*flags, environment=environment)
    assert (config.engine.prefix_caching_hash_seed, config.api.api_keys) == ("1", ("c",))
    assert resolved().engine.prefix_caching_hash_seed is None


def test_kv_events_are_set_as_for_vllm() -> None:
    given = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:6000", "format": "array"}'
    events = resolved("--kv-events-config", given, environment={"POD_IP": "::1"}).engine.kv_events
    assert (events.enable_kv_cache_events, events.endpoint) == (True, "tcp://*:6000")
    assert (events.format, events.buffer_steps, events.replay_endpoint) == ("array", 10_000, None)
    topic = resolved("--kv-events-config", '{"topic": "t"}', environment={"POD_IP": "x"})
    assert topic.engine.kv_events.topic == "t"


def test_sampling_defaults_come_from_the_model_or_from_flags() -> None:
    model = replace(
        TINY, generation_config={"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "eos": [1]}
    )
    defaults = dict(resolved(checkpoint=model).api.default_sampling)
    assert defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    override = ("--override-generation-config", '{"temperature": 0.1}')
    assert dict(resolved(*override, checkpoint=model).api.default_sampling)["temperature"] == 0.1
    vllm = resolved("--generation-config", "vllm", *override, checkpoint=model)
    assert vllm.api.default_sampling == (("temperature", 0.1),)


def test_sampling_defaults_come_from_a_folder_or_the_catalogue(tmp_path: Path) -> None:
    """A path replaces the model's own file, which wins over the entry of the catalogue."""
    folder = str(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "eos_token_id": 1}')
    model = replace(TINY, generation_config={"temperature": 0.6, "top_k": 20})
    for given in (folder, f"{folder}/generation_config.json"):
        config = resolved("--generation-config", given, checkpoint=model)
        assert dict(config.api.default_sampling) == {"temperature": 0.3}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=f"--generation-config {folder}: not a JSON object"):
        resolved("--generation-config", folder, checkpoint=model)
    known = replace(TINY, path=tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    sampling = {"temperature": 0.2, "top_p": 0.9}
    assert dict(resolved(checkpoint=known).api.default_sampling) == sampling
    own = replace(known, generation_config={"temperature": 0.6})
    assert dict(resolved(checkpoint=own).api.default_sampling) == sampling | {"temperature": 0.6}
    assert resolved("--generation-config", "vllm", checkpoint=known).api.default_sampling == ()


def test_a_chat_template_is_a_file_or_the_text_itself(tmp_path: Path) -> None:
    """A text with a brace is a template."""
    parse = build_parser().parse_args
    file = tmp_path / "chat.jinja"
    file.write_text("from a file")
    assert read_chat_template(parse([])) is None
    assert read_chat_template(parse(["--chat-template", "{{ messages }}"])) == "{{ messages }}"
    assert read_chat_template(parse(["--chat-template", str(file)])) == "from a file"
    with pytest.raises(ConfigError, match=r"--chat-template .*missing"):
        read_chat_template(parse(["--chat-template", str(tmp_path / "missing")]))


def test_https_needs_a_certificate_and_its_key(tmp_path: Path) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.touch()
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    with pytest.raises(ConfigError, match=r"tls\.key"):
        resolved(*flags)
    key.touch()
    with pytest.raises(ConfigError, match="--ssl-certfile and --ssl-keyfile: not usable"):
        resolved(*flags)
    with pytest.raises(ConfigError, match="go together"):
        resolved("--ssl-keyfile", str(key))
    with pytest.raises(ConfigError, match="--ssl-ca-certs needs"):
        resolved("--ssl-ca-certs", str(key))
    assert resolved().tls is None


@pytest.fixture
def openssl() -> str:
    path = shutil.which("openssl")
    if path is None:
        pytest.skip("needs the openssl command to make a certificate")
    return path


@pytest.mark.parametrize("password", [None, "secret"])
def test_a_certificate_is_tried_at_the_start(
    tmp_path: Path, openssl: str, password: str | None
) -> None:
    certificate, key = str(tmp_path / "tls.crt"), str(tmp_path / "tls.key")
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-days", "1", "-subj", "/CN=worker", "-out", certificate, "-keyout", key]
    command += ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    subprocess.run(command, check=True, capture_output=True)
    flags = ("--ssl-certfile", certificate, "--ssl-keyfile", key)
    if password is not None:
        with pytest.raises(ConfigError, match="not usable"):
            resolved(*flags)
        return
    tls = resolved(*flags, "--ssl-ca-certs", certificate).tls
    assert tls is not None
    assert (tls.certfile, tls.keyfile, tls.ca_certs) == (certificate, key, certificate)
    with pytest.raises(ConfigError, match="--ssl-ca-certs: not usable"):
        resolved(*flags, "--ssl-ca-certs", key)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-enable-chunked-prefill", "--max-num-batched-tokens", "64"], "at least"),
        (["--kv-events-config", "[]"], "not a JSON object"),
        (["--kv-events-config", '{"port": 1}'], "unknown 'port'"),
        (["--kv-events-config", '{"hwm": "x"}'], "hwm"),
        (["--kv-events-config", '{"publisher": "nats"}'], "nats"),
        (["--kv-events-config", '{"format": "xml"}'], "one of map, array"),
        (["--override-generation-config", "0.7"], "not a JSON object"),
        (["--override-generation-config", '{"temp": 1}'], "unknown 'temp'"),
        (["--generation-config", "/nowhere"], "No such file .*; it takes auto, vllm, or a folder"),
        (["--generation-config", "/"], "No such file .*; it takes auto, vllm, or a folder"),
        (["--override-generation-config", '{"top_p": true}'], "must be a number"),
        (["--max-model-len", "4096"], "context of 2048"),
        (["--override-generation-config", '{"temperature": -5}'], "temperature must be in"),
        (["--override-generation-config", '{"top_p": 0}'], "top_p"),
        (["--override-generation-config", '{"repetition_penalty": 0}'], "repetition_penalty"),
        (["--override-generation-config", '{"top_k": 1.5}'], "top_k"),
        (["--override-generation-config", '{"max_new_tokens": 0}'], "max_tokens"),
        (["--kv-events-config", '{"buffer_steps": -1}'], "buffer_steps must be an integer in"),
        (["--kv-events-config", '{"hwm": -1}'], "hwm must be an integer in"),
        (["--kv-events-config", '{"hwm": 2147483648}'], "hwm must be an integer in"),
        (["--kv-events-config", '{"max_queue_size": 0}'], "max_queue_size must be an integer in"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "secret", " "], "--api-key"),
        (["--max-body-bytes", "999999999"], "--max-body-bytes"),
        (["--lora-modules", "sql=/a"], "--lora-modules needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "sql"], "give NAME=PATH"),
        (["--enable-lora", "--lora-modules", '{"name": "sql"}'], "missing required field `path`"),
        (
            ["--enable-lora", "--max-loras", "4", "--max-cpu-loras", "2"],
            "2 is less than --max-loras 4",
        ),
    ],
)
def test_an_unusable_value_is_an_error(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-parallel-size", "0"],
        ["--max-model", "10"],
        ["--max-num-seqs", "0"],
        ["--dtype", "int8"],
        ["--quantization", "awq"],
        ["--kv-cache-dtype", "fp8_e5m2"],
        ["--block-size", "24"],
        ["--block-size", "0"],
        ["--watermark", "1.5"],
        ["--max-rss-bytes", "4X"],
        ["--max-rss-bytes", "0"],
        ["--heartbeat-timeout", "0"],
        ["--heartbeat-timeout", "0.9"],
        ["--heartbeat-timeout", "inf"],
        ["--preemption-victim", "richest"],
        ["--tool-call-parser", "cobol"],
        ["--reasoning-parser", "none"],
        ["--prefix-caching-hash-algo", "md5"],
        ["--sim-prefill-tokens-per-second", "0"],
        ["--sim-decode-base-ms", "-1"],
        ["--port", "x"],
        ["--port", "65536"],
        ["--port", "-1"],
        ["--allowed-origins", "*"],
        ["--allowed-methods", '["GET", 1]'],
    ],
)
def test_unknown_flags_and_values_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(flags)
    assert caught.value.code == 2


def test_an_error_names_the_wanted_number(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, wanted in (("--max-num-seqs", "whole number"), ("--heartbeat-timeout", "number")):
        with pytest.raises(SystemExit):
            build_parser().parse_args([flag, "abc"])
        assert (
            f"argument {flag}: takes a {wanted} of 1 or more, not 'abc'" in capsys.readouterr().err
        )


def test_the_model_is_found_by_flag_environment_or_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    parse = build_parser().parse_args
    assert find_model(parse(["--model", "x"]), {"POINTSMAN_MODEL": "y"}) == Path("x")
    assert find_model(parse([]), {"POINTSMAN_MODEL": "y"}) == Path("y")
    assert find_model(parse(["--engine", "sim"]), {"POINTSMAN_MODEL": "y"}) is None
    with pytest.raises(ConfigError, match="--model"):
        find_model(parse([]), {})
    cached = tmp_path / ".cache/pointsman/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert find_model(parse([]), {}) == cached
    moved = tmp_path / "moved"
    with pytest.raises(ConfigError, match="moved"):
        find_model(parse([]), {"POINTSMAN_CACHE": str(moved)})
    (moved / "models").mkdir(parents=True)
    (moved / "models" / cached.name).touch()
    found = find_model(parse([]), {"POINTSMAN_CACHE": str(moved)})
    assert found == moved / "models" / cached.name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[1]", "--kv-transfer-config: not a JSON object"),
        ('{"kv_rank": 1}', "unknown 'kv_rank'; known are kv_connector"),
        ('{"kv_connector": "x"}', "kv_connector must be one of TcpConnector, NixlConnector"),
        ('{"kv_connector_extra_config": {"backends": []}}', "backends must be NIXL's, such as UCX"),
        ('{"kv_role": "both"}', "kv_role must be one of kv_producer, kv_consumer, kv_both"),
        ('{"kv_ip": "0.0.0.0"}', "the IP address that others reach, got '0.0.0.0'"),
        ('{"kv_ip": "localhost"}', "the IP address that others reach"),
        ('{"kv_port": 65536}', "kv_port must be an integer in [0, 65535], got 65536"),
        ('{"kv_buffer_size": 0}', "kv_buffer_size must be above 0, got 0"),
        ('{"kv_connector_extra_config": {"kv_lease_duration": -1}}', "kv_lease_duration must"),
    ],
)
def test_an_invalid_transfer_is_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolved("--kv-transfer-config", given)


def test_a_proxy_needs_a_connector_that_takes_kv() -> None:
    for given in ((), ("--kv-transfer-config", '{"kv_role": "kv_producer"}')):
        with pytest.raises(ConfigError, match=r"--pd-proxy needs .*kv_consumer or kv_both"):
            resolved("--pd-proxy", *given)
    flags = ("--kv-transfer-config", "{}", "--prefiller-networks", "10.0.0.0/8, fd00::/8")
    api = resolved("--pd-proxy", *flags, "--prefill-timeout", "3").api
    assert (api.pd_proxy, api.prefill_timeout_seconds) == (True, 3.0)
    assert api.prefiller_networks == ("10.0.0.0/8", "fd00::/8")
    assert not resolved().api.pd_proxy


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engine", "sim"), "--kv-offloading-size: --engine sim has no KV"),
        (("--no-enable-prefix-caching",), "needs the prefix cache"),
        (("--kv-offloading-policy", "tenant", "--no-enable-fair-eviction"), "policy tenant"),
        (
            ("--kv-offloading-path", "/kv", "--prefix-caching-hash-algo", "xxhash"),
            "--kv-offloading-path: no later start knows a random hash seed",
        ),
        (("--kv-offloading-path", "/kv", "--prefix-caching-hash-seed", "random"), "random hash"),
        (("--kv-offloading-path", ""), "--kv-offloading-path is empty"),
    ],
)
def test_impossible_offloading_is_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolved("--kv-offloading-size", "1", *flags)


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("--kv-offloading-path /kv", "--kv-offloading-size"),
        ("--kv-offloading-policy lru", "--kv-offloading-size"),
        ("--kv-offloading-disk-size 32", "--kv-offloading-path"),
        ("--kv-offloading-disk-size 32 --kv-offloading-size 1", "--kv-offloading-path"),
    ],
)
def test_a_part_of_offloading_alone_is_refused(flags: str, needed: str) -> None:
    given = flags.split()
    with pytest.raises(ConfigError, match=f"{given[0]} needs {needed}: "):
        resolved(*given)


def test_offloading_is_off_by_default() -> None:
    assert resolved().engine.kv_offloading is None
    config = resolved("--kv-offloading-size", "1.5", "--kv-offloading-path", "/kv")
    assert config.engine.kv_offloading == KvOffloadingConfig(1.5, "/kv", 32.0, "lru")


def test_transfers_have_an_engine_id_and_reach_the_api() -> None:
    given = '{"kv_role": "kv_producer", "kv_connector_extra_config": {"kv_transfer_timeout": 3}}'
    config = resolved("--kv-transfer-config", given)
    transfer = config.engine.kv_transfer
    assert transfer is not None
    assert (transfer.kv_role, transfer.kv_transfer_timeout) == ("kv_producer", 3)
    assert len(transfer.engine_id) == 36
    assert config.api.kv_role == "kv_producer"
