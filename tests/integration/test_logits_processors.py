"""Logits processors of an installed package in a running worker."""

from pathlib import Path

import pytest

from tests.support.worker.installed_processors import install_processors
from tests.support.worker.running_worker import running_worker

pytestmark = pytest.mark.full

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'


async def test_a_processor_forces_tokens_in_the_engine_process(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_processors(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    flags = ("--model", str(model_path), "--logits-processors", "cycle", "forbid")
    async with running_worker(*flags, "--speculative-config", NGRAM) as worker:

        async def tokens(**fields: object) -> list[int]:
            body = {"prompt": "The points are", "max_tokens": 12, "temperature": 0, **fields}
            body |= {"ignore_eos": True, "return_token_ids": True}
            answer = await worker.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
            found: list[int] = choice["token_ids"]
            return found

        free = await tokens()
        assert await tokens(vllm_xargs={"cycle": [300, 400]}) == [300, 400] * 6
        assert await tokens(vllm_xargs={"cycle": [500], "offset": 1}, temperature=1) == [500] * 12
        barred = await tokens(vllm_xargs={"forbidden": free})
        assert set(barred).isdisjoint(free)
        assert await tokens() == free
        wrong = await worker.ask(vllm_xargs={"forbidden": []})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "vllm_xargs")
