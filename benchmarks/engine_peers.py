"""Other engines that decode the same GGUF file, as processes: llama.cpp and vLLM's CPU build."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

LLAMA_PROGRAM = "llama-batched-bench"
# vLLM cannot be told to leave prefill out, so decode is the difference of two lengths.
_VLLM_PROGRAM = """
import json, sys, time
from vllm import LLM, SamplingParams
model, prompts, short, long = json.loads(sys.argv[1])
engine = LLM(model, enforce_eager=True, max_model_len=1024, max_num_seqs=64,
             enable_prefix_caching=False)
def seconds(length):
    rule = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    started = time.perf_counter()
    engine.generate([{"prompt_token_ids": p} for p in prompts], rule, use_tqdm=False)
    return time.perf_counter() - started
seconds(2)
first = seconds(short)
print("RESULT", first, seconds(long) - first)
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens a second by wall time and, where it can be told apart, by CPU time."""

    tokens_per_second: float
    per_cpu_second: float | None = None


class Llama:
    """`llama-batched-bench`, a process for each measurement."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        self._program = folder / LLAMA_PROGRAM
        self._model = model
        self._threads = threads
        if not self._program.is_file():
            raise FileNotFoundError(f"no {LLAMA_PROGRAM} in {folder}")

    def decode(self, batch: int, prompt: int, steps: int) -> Turn:
        """CPU time is the difference of two lengths: loading and the prompt drop out."""
        _, short = self._run(prompt, 1, batch)
        line, long = self._run(prompt, steps + 1, batch)
        return Turn(line["speed_tg"], batch * steps / max(long - short, 1e-3))

    def prefill(self, tokens: int) -> Turn:
        """Of one prompt in one batch."""
        return Turn(self._run(tokens, 1, 1)[0]["speed_pp"])

    def _run(self, prompt: int, steps: int, batch: int) -> tuple[dict[str, float], float]:
        """The program's own line, and the CPU seconds of the process."""
        sizes = {"-npp": prompt, "-ntg": steps, "-npl": batch, "-c": batch * (prompt + steps)}
        sizes |= {"-b": 2048, "-ub": 512, "-t": self._threads, "-tb": self._threads}
        command = [str(self._program), "-m", str(self._model), "--output-format", "jsonl"]
        for name, value in sizes.items():
            command += [name, str(value)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        [line] = [text for text in done.stdout.splitlines() if text.startswith("{")]
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        values: dict[str, float] = json.loads(line)
        return values, spent


class Vllm:
    """vLLM in another interpreter; it decodes GGUF weights if its build for this CPU can."""

    def __init__(self, python: Path, model: Path, threads: int) -> None:
        self._python = python
        self._model = model
        self._environment = os.environ | {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "HF_HUB_OFFLINE": "1",
        }

    def decode(self, prompts: list[list[int]], steps: int) -> Turn:
        """Prefill and start-up drop out of the difference of two lengths."""
        _, seconds = self._run(prompts, steps)
        return Turn(len(prompts) * steps / seconds)

    def prefill(self, prompt: list[int]) -> Turn:
        """One prompt and the first token of its answer."""
        first, _ = self._run([prompt], 1)
        return Turn(len(prompt) / first)

    def _run(self, prompts: list[list[int]], steps: int) -> tuple[float, float]:
        arguments = json.dumps([str(self._model), prompts, 1, steps + 1])
        command = [str(self._python), "-c", _VLLM_PROGRAM, arguments]
        started = time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=self._environment
        )
        lines = [text for text in done.stdout.splitlines() if text.startswith("RESULT")]
        if not lines:
            why = (done.stderr.strip().splitlines() or ["no output"])[-1]
            spent = time.perf_counter() - started
            raise RuntimeError(f"vLLM failed after {spent:.0f} s: {why}")
        first, rest = (float(number) for number in lines[0].split()[1:])
        return first, rest
