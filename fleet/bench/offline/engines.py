"""The engines of `pointsman bench offline`: `python -m … WORK RESULT`, a process for one engine, so
that each has all memory to itself.
"""

import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

Generate = Callable[[list[list[int]], list[int]], object]
TEMPERATURE = 0.6  # nano-vllm draws too
WARM_UP_TOKENS = 8
TRANSFORMERS_BATCH = 16


class Work(msgspec.Struct):
    """Prompts as token ids, and the tokens to generate for each. `llm` is for Pointsman's alone."""

    engine: str
    model: str
    prompts: list[list[int]]
    output_tokens: list[int]
    seed: int
    llm: dict[str, Any] = {}

    @property
    def max_model_len(self) -> int:
        sizes = map(len, self.prompts)
        return max(size + new for size, new in zip(sizes, self.output_tokens, strict=True))


def _pointsman(work: Work) -> Generate:
    llm = import_module("worker.offline")
    return _like_vllm(llm, work, seed=work.seed, **work.llm)


def _vllm(work: Work) -> Generate:
    llm = _like_vllm(import_module("vllm"), work, seed=work.seed, skip_tokenizer_init=True)
    return lambda prompts, sizes: llm([{"prompt_token_ids": one} for one in prompts], sizes)


def _nano_vllm(work: Work) -> Generate:
    return _like_vllm(import_module("nanovllm"), work)


def _like_vllm(module: Any, work: Work, **settings: Any) -> Callable[[Any, list[int]], object]:
    engine = module.LLM(work.model, **{"max_model_len": work.max_model_len, **settings})

    def generate(prompts: Any, sizes: list[int]) -> object:
        drawn = {"temperature": TEMPERATURE, "ignore_eos": True}
        params = [module.SamplingParams(max_tokens=size, **drawn) for size in sizes]
        return engine.generate(prompts, params)

    return generate


def _transformers(work: Work) -> Generate:
    """`generate` of padded batches, each as long as its longest answer."""
    torch, library = import_module("torch"), import_module("transformers")
    model = library.AutoModelForCausalLM.from_pretrained(work.model, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def generate(prompts: list[list[int]], sizes: list[int]) -> None:
        for first in range(0, len(prompts), TRANSFORMERS_BATCH):
            batch = prompts[first : first + TRANSFORMERS_BATCH]
            longest, most = max(map(len, batch)), max(sizes[first : first + TRANSFORMERS_BATCH])
            rows = [[0] * (longest - len(one)) + one for one in batch]
            masks = [[0] * (longest - len(one)) + [1] * len(one) for one in batch]
            ids, mask = (torch.tensor(one, device=model.device) for one in (rows, masks))
            drawn = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "pad_token_id": 0}
            limits = {"max_new_tokens": most, "min_new_tokens": most}
            model.generate(ids, attention_mask=mask, **limits, **drawn)

    return generate


# By name: the module that it needs, and what builds it.
ENGINES: Mapping[str, tuple[str, Callable[[Work], Generate]]] = {
    "pointsman": ("torch", _pointsman),
    "vllm": ("vllm", _vllm),
    "nano-vllm": ("nanovllm", _nano_vllm),
    "transformers": ("transformers", _transformers),
}


def main(argv: list[str]) -> None:
    """Read the work, do it after a warm-up that does not count, and write the seconds."""
    work = msgspec.json.decode(Path(argv[0]).read_bytes(), type=Work)
    generate = ENGINES[work.engine][1](work)
    generate([work.prompts[0]], [min(WARM_UP_TOKENS, work.output_tokens[0])])
    began = time.perf_counter()
    generate(work.prompts, work.output_tokens)
    Path(argv[1]).write_text(str(time.perf_counter() - began))


if __name__ == "__main__":
    main(sys.argv[1:])
