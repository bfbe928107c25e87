"""`LLM` answers as the server does, refuses bad requests first, and gives its memory back."""

import asyncio
import gc
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pointsman import LLM, RequestError, SamplingParams, WorkerError
from tests.support.worker.running_worker import running_worker
from worker.engine.core import EngineCore
from worker.errors import ConfigError
from worker.executor.model_runner import ModelRunner

ROOT = Path(__file__).parents[2]
SIZES = {"max_model_len": 256, "num_gpu_blocks_override": 96, "num_threads": 1}
CITY = "The capital of France is"
STORY = "Once upon a time there was a"
TALK = [{"role": "user", "content": "Name a color."}]
QUICK = {"engine": "sim", "sim_decode_base_ms": 0, "sim_decode_per_seq_ms": 0, "max_model_len": 64}


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model_path, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def sim() -> Iterator[LLM]:
    with LLM(**QUICK) as llm:
        yield llm


def flags_of(keywords: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in keywords.items()]


def shown(choice: dict[str, Any]) -> tuple[Any, ...]:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, choice["token_ids"], choice["finish_reason"], choice["stop_reason"]


def answers(output: Any) -> list[tuple[Any, ...]]:
    return [(o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs]


COMPLETIONS: tuple[tuple[str | list[int], dict[str, Any]], ...] = (
    (CITY, {"temperature": 0}),
    (STORY, {"temperature": 0, "max_tokens": 24, "stop": [" girl", "."]}),
    (STORY, {"temperature": 0.9, "seed": 7, "n": 2, "max_tokens": 12}),
    ([504, 3575, 282], {"temperature": 1.2, "top_p": 0.9, "seed": 11, "ignore_eos": True}),
    (CITY, {"temperature": 0, "structured_outputs": {"choice": ["Paris", "Rome"]}}),
    (CITY, {"temperature": 0, "n": 2, "use_beam_search": True, "max_tokens": 6}),
)


async def test_answers_equal_those_of_the_server(llm: LLM, model_path: Path) -> None:
    given = [prompt for prompt, _ in COMPLETIONS]
    own = llm.generate(given, [SamplingParams(**fields) for _, fields in COMPLETIONS])
    [talk] = llm.chat(TALK, SamplingParams(temperature=0, max_tokens=12))
    [embedded] = llm.embed(STORY, dimensions=8)
    async with running_worker("--model", str(model_path), *flags_of(SIZES)) as worker:
        for output, (prompt, fields) in zip(own, COMPLETIONS, strict=True):
            body = {"prompt": prompt, "return_token_ids": True, **fields}
            answer = (await worker.http.post("/v1/completions", json=body)).json()
            assert answers(output) == [shown(choice) for choice in answer["choices"]]
            assert output.prompt_token_ids == answer["choices"][0]["prompt_token_ids"]
        body = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
        answer = (await worker.ask(messages=TALK, **body)).json()
        assert answers(talk) == [shown(answer["choices"][0])]
        assert talk.prompt_token_ids == answer["prompt_token_ids"]
        body = {"input": STORY, "dimensions": 8}
        answer = (await worker.http.post("/v1/embeddings", json=body)).json()
        assert embedded.outputs.embedding == pytest.approx(answer["data"][0]["embedding"], abs=1e-6)


def test_results_have_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [CITY, STORY, CITY, STORY]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 1, 6)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 1, 6]
    assert outputs[0].outputs[0].text.startswith(outputs[2].outputs[0].text)


def test_log_probabilities_are_by_token_with_ranks(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate(CITY, params)
    [answer] = output.outputs
    assert answer.logprobs is not None
    for token_id, found in zip(answer.token_ids, answer.logprobs, strict=True):
        assert [one.rank for one in found.values()] == [1, 2]
        assert next(iter(found)) == token_id
    drawn = [found[i].logprob for i, found in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(drawn))
    decoded = [
        found[i].decoded_token for i, found in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
    assert "".join(decoded) == answer.text
    first, *others = output.prompt_logprobs or []
    assert first is None
    for token_id, found in zip(output.prompt_token_ids[1:], others, strict=True):
        assert found is not None
        assert token_id in found


@pytest.mark.parametrize(
    ("prompts", "fields", "message"),
    [
        (["a", [], "b"], {}, r"^prompts\[1\] is neither a text nor a list of token ids"),
        (["a", ["b", "c"]], {}, r"^prompts\[1\] is neither"),
        (["a", "b", "word " * 70], {}, r"^prompts\[2\]: .*maximum context length is 64"),
        (["a", [5, 10**6]], {}, r"^prompts\[1\]: Token id 1000000 is out of vocabulary"),
        (["a"], {"temperature": -1}, r"^prompts\[0\]: temperature must be in \[0, 2\]"),
        (["a"], {"top_k": "many"}, r"^prompts\[0\]: top_k: Expected `int`"),
        (["a"], {"n": 2, "temperature": 0}, r"^prompts\[0\]: n must be 1 when using greedy"),
        (["a"], {"thinking_token_budget": 3}, r"`thinking_token_budget` is not supported"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_runs(
    sim: LLM, prompts: list[Any], fields: dict[str, Any], message: str
) -> None:
    marker = [sum(message.encode()) % 250, *range(300, 340)]
    with pytest.raises(RequestError, match=message):
        sim.generate([*prompts, marker], SamplingParams(**fields))
    [output] = sim.generate(marker)
    assert output.num_cached_tokens == 0
    assert sim.generate(marker)[0].num_cached_tokens > 0


def test_parameters_are_one_for_each_prompt(sim: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling parameters were given for 3 prompts"):
        sim.generate(["a", "b", "c"], [SamplingParams(), SamplingParams()])
    assert sim.generate([]) == []


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_model_ln": 64}, "LLM takes no max_model_ln; did you mean max_model_len?"),
        ({"port": 8000}, "LLM takes no port: --port is for `pointsman worker` alone"),
        ({"reasoning_parser": "deepseek_r1"}, "LLM takes no reasoning_parser: "),
        ({"max_model_len": 1}, "--max-model-len: takes a whole number of 2 or more, not '1'"),
        ({"dtype": "floot32"}, "invalid choice: 'floot32' .*did you mean float32?"),
        ({"enforce_eager": "yes"}, "enforce_eager takes True or False, not 'yes'"),
        ({"speculative_config": {"method": "ngrm"}}, "unknown method 'ngrm'"),
        ({"lora_modules": ["a=/b"]}, "--lora-modules needs --enable-lora"),
    ],
)
def test_keywords_are_checked_by_the_table_of_flags(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        LLM(**{"engine": "sim", **keywords})


def test_keywords_mean_what_the_flags_do() -> None:
    """Switches, both ways; lists; objects; and None, which is the default."""
    adapters = {"enable_lora": True, "max_loras": 2, "lora_modules": ["sql=/s", "xml=/x"]}
    others = {"enable_prefix_caching": False, "max_num_seqs": None}
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    with LLM(**QUICK, **adapters, **others, **drafts) as llm:
        assert len(llm.generate(["a b"] * 2, model="xml")) == 2
        assert llm.generate(list(range(300, 340)))[0].num_cached_tokens == 0
        assert llm.generate(list(range(300, 340)))[0].num_cached_tokens == 0
        with pytest.raises(RequestError, match="The model `csv` does not exist"):
            llm.generate("a", model="csv")


async def test_a_caller_may_have_an_event_loop(sim: LLM) -> None:
    assert len(sim.generate("a")) == 1
    assert len(await asyncio.to_thread(sim.generate, "a")) == 1


def test_ctrl_c_aborts_the_answers_and_leaves_an_engine_that_works() -> None:
    with LLM(engine="sim", sim_decode_base_ms=1, max_model_len=60_000) as llm:

        def interrupt() -> None:
            cores = [one for one in gc.get_objects() if type(one) is EngineCore]
            while not any(core.running_step for core in cores):
                pass
            signal.raise_signal(signal.SIGINT)

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a"] * 3, SamplingParams(max_tokens=50_000, ignore_eos=True))
        thread.join()
        assert len(llm.generate("a", SamplingParams(max_tokens=2))[0].outputs[0].token_ids) == 2


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


def test_memory_and_threads_are_given_back(model_path: Path) -> None:
    """Weights, KV cache and threads go at `close`, and without one with the last reference; later
    ones take the place of the first.
    """
    before = alive(EngineCore), alive(ModelRunner), tensor_megabytes()
    names = {thread.name for thread in threading.enumerate()}
    for closes in (True, False):
        llm = LLM(model_path, **SIZES)
        text = llm.generate(CITY, SamplingParams(temperature=0))[0].outputs[0].text
        assert text.startswith(" Paris")
        assert (alive(EngineCore), alive(ModelRunner)) == (before[0] + 1, before[1] + 1)
        assert tensor_megabytes() > before[2] + 50
        if closes:
            llm.close()
            with pytest.raises(WorkerError, match="this LLM is closed"):
                llm.generate(CITY)
        else:
            del llm
        assert (alive(EngineCore), alive(ModelRunner)) == before[:2]
        assert tensor_megabytes() < before[2] + 1
    assert {thread.name for thread in threading.enumerate()} <= names


def tensor_megabytes() -> float:
    """Return the size of all tensors; the process's own depends on what the allocator keeps."""
    gc.collect()
    # Other layouts, such as oneDNN's, have no storage; tests before this one may have left some.
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    storages = [one.untyped_storage() for one in tensors if one.layout is torch.strided]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values()) / 1e6


def test_importing_the_package_loads_neither_torch_nor_the_worker() -> None:
    code = (
        "import sys, pointsman; assert not {'worker', 'torch'} & sys.modules.keys();"
        "from pointsman import LLM; assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_example_of_the_documentation_runs(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POINTSMAN_MODEL", str(model_path))
    page = (ROOT / "docs" / "offline.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert examples
    for code in examples:
        exec(code, {})
    assert "Paris" in capsys.readouterr().out
