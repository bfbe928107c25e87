"""The table of all flags but the simulator's, in the notation of `base.flags` and vLLM's spelling.

A flag without a default in the table has that of the field which it sets (`worker.config`).
"""

from collections.abc import Mapping
from typing import Any, Final

from base.flags import Dialect, defaults_of, strings
from worker.api.tools.answer import REASONING_FORMATS, TOOL_FORMATS
from worker.config import (
    HASH_ALGOS,
    OFFLOADING_POLICIES,
    ApiConfig,
    EngineConfig,
    LoraConfig,
    SchedulerConfig,
    ServeConfig,
)
from worker.engine.policies import POLICIES, VICTIM_POLICIES, WAITING_ORDERS

# There are five heartbeats in a second, and a busy machine delays some: hence the least time-out.
FLAGS: Final = """
model
--model TEXT                  GGUF file, Hugging Face directory or id (default: variable
                              POINTSMAN_MODEL, else a small model)
--engine torch|sim = torch    torch runs the model; sim, without model or torch, answers with words
                              after the time that a model would take
--chat-template TEXT          a Jinja file, or the template in one line (default: the model's)
--generation-config auto|vllm|PATH = auto
                              default sampling parameters: the model's or the catalogue's (auto),
                              the API's (vllm), or those of a generation_config.json or its folder
--override-generation-config JSON = {}
                              sampling parameters that override those, e.g. {"temperature": 0.7}
--max-logprobs N[-1..]        most log probabilities in an answer; -1: the whole vocabulary
--tool-call-parser FORMAT     format of the model's tool calls (default: recognised from its chat
                              template)
--[no-]enable-auto-tool-choice
                              accept tool_choice auto: the model decides
--reasoning-parser FORMAT     format of the model's reasoning, which gets a field of its own in
                              answers
--pooler-config JSON          pooling of embeddings, e.g. {"pooling_type": "MEAN", "use_activation":
                              false} (default: the last token's hidden state, normalised)
--seed N                      seed for the seeds of requests without one (default: random)

server
--uds TEXT                    unix socket to listen on instead of a port
--host TEXT = 127.0.0.1       address to bind
--port PORT[0..65535] = 8000  port to bind; 0 picks a free one
--served-model-name TEXT …    names of the model (default: its own)
--api-key TEXT …              bearer keys that /v1 routes require (default: none)
--ssl-certfile TEXT           certificate chain (PEM); serves HTTPS
--ssl-keyfile TEXT            the certificate's private key (PEM)
--allowed-origins JSON        origins whose web pages may send requests (CORS); [] for none (default
                              ["*"])
--[no-]allow-credentials      let these pages send cookies and other credentials
--allowed-methods JSON        their requests' methods (default ["*"])
--allowed-headers JSON        their requests' headers (default ["*"])
--ssl-ca-certs TEXT           CAs (PEM) that must have signed clients' certificates
--max-num-queued-reqs N[0..]  sequences that may wait; beyond them, a 503 (default: no limit)
--max-num-queued-tokens N[0..]
                              the same for prompt tokens (default: no limit)
--max-body-bytes BYTES        longest request body, up to 64M
--max-rss-bytes BYTES         memory of the HTTP process; beyond it, a 503 (default: no limit)
--max-connections N[1..]      most connections; beyond them, a 503 (default: by the limit on open
                              files)
--header-timeout NUMBER(0..]  seconds from the first byte to the end of the headers
--body-timeout NUMBER(0..]    seconds from there to the end of the body
--write-stall-timeout NUMBER(0..]
                              seconds until a client that does not read its answer is disconnected
--sse-keep-alive-interval NUMBER[0..] = 0.0
                              seconds between comments on a silent stream; 0: none
--stream-interval N[1..]      tokens in one frame of a stream
--shutdown-timeout NUMBER[0..]
                              seconds that requests have to finish after SIGTERM
--[no-]strict-fields          reject requests with unknown fields, instead of ignoring these
--[no-]enable-request-id-headers
                              return X-Request-Id in every response
--[no-]enable-prompt-tokens-details
                              report cached prompt tokens in usage
--[no-]enable-force-include-usage
                              report usage in every stream
--[no-]return-tokens-as-token-ids
                              write tokens of log probabilities as "token_id:N"
--[no-]enable-per-request-metrics
                              report timings in each response
--tracing                     send OpenTelemetry spans, configured by OTEL_* variables
--otlp-traces-endpoint URL    send them there, by OTLP over HTTP: http://HOST:4318/v1/traces
--[no-]enable-admin-routes    serve routes that change or show the whole worker: sleep, pause,
                              reset, server info
--[no-]enable-tokenizer-info-endpoint
                              serve GET /tokenizer_info

engine
--dtype auto|float32|bfloat16|float16
                              auto: float32 on a CPU, half precision on a GPU; bfloat16 is float32
                              on a CPU without AVX-512 or AVX-NE-CONVERT
--quantization none|q8_0|q4_1
                              on a CPU, load safetensors weights, but not a draft model's, as blocks
                              of 8 or 4 bits; FP8, AWQ and GPTQ need no flag
--kv-cache-dtype auto|float32|bfloat16|fp8|fp8_e4m3
                              auto is that of activations; bfloat16 on a CPU, and fp8 on a GPU,
                              halve the cache and may change answers
--max-model-len N[2..]        tokens of prompt and answer (default: the model's, or what the KV
                              cache can hold)
--device auto|cpu|cuda        auto is the first GPU that CUDA sees, else the CPU
--tensor-parallel-size N[1..]
                              processes that share the model, each with a GPU or its part of the CPU
                              threads
--attention-backend auto|torch|triton
                              kernels of attention, norms and activations; auto is triton on a GPU,
                              native kernels (else torch) on a CPU
--[no-]enforce-eager          on a GPU, launch every step anew, without graphs
--cuda-graph-sizes N,N        sequences in decode steps captured as graphs on a GPU; smaller steps
                              are padded (default: 1,2,4,8,16,24 and so on up to --max-num-seqs)
--num-threads N[1..]          CPU threads of the torch engine
--cpu-activations float32|int8
                              activations in products with quantised weights on a CPU; int8 rounds
                              them in blocks of 32: faster, and may change answers
--block-size N                tokens in a KV block, a power of two
--num-gpu-blocks-override N[1..]
                              KV blocks (default: by memory)
--kv-cache-memory-bytes BYTES
                              memory of the KV cache on each rank, e.g. 4G (default: on a GPU the
                              free memory; on a CPU 1 GiB or one longest sequence, at most a quarter
                              of the available memory)
--gpu-memory-utilization NUMBER[0..1]
                              share of a GPU's memory to use, weights included; on a CPU, most of
                              the available memory for the KV cache
--[no-]enable-prefix-caching  reuse the KV of common prompt prefixes
--prefix-caching-hash-algo ALGORITHM
                              hash that names KV blocks, byte for byte as in vLLM
--prefix-caching-hash-seed TEXT
                              seed of the block hashes, or "random" (default: PYTHONHASHSEED, else
                              as vLLM)
--[no-]enable-partial-hits    reuse the matching beginning of a block by copying it
--[no-]enable-fair-eviction   evict first from tenants above an equal share
--kv-events-config JSON       publish KV events, e.g. {"enable_kv_cache_events": true, "endpoint":
                              "tcp://*:5557"}
--kv-transfer-config JSON     export or import the KV of prompts, e.g. {"kv_connector":
                              "TcpConnector", "kv_role": "kv_both"} (see disaggregation.md)
--[no-]pd-proxy               as `pointsman sidecar`, prefill at the worker in the header
                              x-prefiller-host-port; clients cannot name sources of KV
--prefiller-networks CIDR     networks of prefill workers, e.g. 10.8.0.0/16,fd00::/8 (default:
                              private ones but link-local addresses)
--prefill-timeout NUMBER(0..]
                              seconds for such a prefill; then it is computed here
--kv-offloading-size GIB(0..]
                              host memory for blocks evicted from the prefix cache (default: none)
--kv-offloading-path DIR      directory for blocks evicted from there; the next start finds them
--kv-offloading-disk-size GIB(0..]
                              most disk space there, for each worker (default: 32)
--kv-offloading-policy POLICY
                              blocks to discard first: least recently (lru) or least often used
                              (lfu), never reused (slru), or above their tenant's share (default:
                              lru)
--logits-processors NAME …    installed logits processors that requests may name in `vllm_xargs`

scheduler
--max-num-seqs N[1..]         most sequences that run at once
--max-num-batched-tokens N[1..]
                              most tokens in one step
--long-prefill-token-threshold N[0..]
                              most tokens of one prompt in one step; 0: no limit
--[no-]enable-chunked-prefill
                              spread a long prompt over several steps
--[no-]async-scheduling       schedule the next step while one runs
--scheduling-policy POLICY    order of waiting requests: by priority, then arrival; or by arrival
                              alone, rejecting requests with a priority
--waiting-order ORDER         order within a priority: arrival, or the longest cached prefix first
                              (lpm)
--preemption-victim POLICY    sequence to preempt without free KV blocks
--max-bypasses N[0..]         most requests admitted before a sequence that does not fit yet
--in-batch-prefix-tokens N[0..]
                              a request waits for another that computes at least this many tokens of
                              its prompt; 0: never
--[no-]reserve-full-prompt    admit a request only if its whole prompt fits
--watermark NUMBER[0..1]      share of the KV blocks to keep free when admitting

speculative decoding
--speculative-config, -sc JSON
                              draft tokens and verify them, e.g. {"method": "eagle"}; null: off; see
                              docs/speculation.md (default: {"method": "ngram",
                              "num_speculative_tokens": 16, "prompt_lookup_min": 1,
                              "prompt_lookup_max": 16}, with --engine sim null)

LoRA adapters
--[no-]enable-lora            serve LoRA adapters, each under its own name
--max-loras N[1..]            most adapters in one step; other requests wait
--max-lora-rank N[1..]        highest rank of an adapter
--max-cpu-loras N[1..]        adapters cached in host memory; others are read again (default:
                              --max-loras)
--lora-modules NAME=PATH …    adapters: NAME=PATH, or JSON {"name": …, "path": …} with an optional
                              "base_model_name"

engine failures
--engine-failure-policy restart|exit
                              start a new engine, or end with status 1
--max-engine-restarts N[0..]  most restarts in ten minutes; one more ends the worker
--heartbeat-timeout NUMBER[1..]
                              seconds of silence until the engine process is killed
--step-budget NUMBER(0..]     seconds for any step; beyond it /health is 503, at twice as much the
                              engine is killed
--step-budget-factor NUMBER(0..]
                              or this many times as long as earlier steps of its size
"""


def _power_of_two(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1 or value & (value - 1):
        raise ValueError(f"must be a power of two, got {text}")
    return value


def _whole_numbers(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise ValueError(f"must be at least 1 each, got {text}")
    return tuple(map(int, numbers))


_DEFAULTS: Final[Mapping[str, Any]] = {
    **defaults_of(ApiConfig, EngineConfig, SchedulerConfig, ServeConfig, LoraConfig),
    "max_model_len": None,  # the model's
    "max_cpu_loras": None,
}
DIALECT: Final = Dialect(
    readers={
        "--allowed-origins": strings,
        "--allowed-methods": strings,
        "--allowed-headers": strings,
        "--block-size": _power_of_two,
        "--cuda-graph-sizes": _whole_numbers,
        "--generation-config": str,
        "--kv-offloading-policy": OFFLOADING_POLICIES,
        "--prefix-caching-hash-algo": HASH_ALGOS,
        "--preemption-victim": tuple(VICTIM_POLICIES),
        "--reasoning-parser": tuple(REASONING_FORMATS),
        "--scheduling-policy": POLICIES,
        "--tool-call-parser": tuple(TOOL_FORMATS),
        "--waiting-order": WAITING_ORDERS,
    },
    defaults=_DEFAULTS,
    fields={
        "--body-timeout": "body_timeout_seconds",
        "--enable-tokenizer-info-endpoint": "enable_tokenizer_info",
        "--header-timeout": "header_timeout_seconds",
        "--heartbeat-timeout": "heartbeat_timeout_seconds",
        "--num-gpu-blocks-override": "num_blocks_override",
        "--preemption-victim": "victim",
        "--prefill-timeout": "prefill_timeout_seconds",
        "--scheduling-policy": "policy",
        "--shutdown-timeout": "shutdown_timeout_seconds",
        "--step-budget": "step_budget_seconds",
        "--write-stall-timeout": "write_stall_seconds",
    },
)
