"""The default model, and sampling defaults of models whose files have none, by the file's name."""

from pathlib import Path

DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BETTER_FILE = "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"
# With the names of `generation_config.json`.
_SAMPLING: dict[str, dict[str, float]] = {
    DEFAULT_FILE: {"temperature": 0.2, "top_p": 0.9},
    BETTER_FILE: {"repetition_penalty": 1.1, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
}


def catalog_sampling(model: Path) -> dict[str, float]:
    return dict(_SAMPLING.get(model.name, {}))
