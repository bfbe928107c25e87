"""How text is cut into words before byte-pair merging, by the names GGUF files carry.

`tokenizer.ggml.pre` names the published pre-tokenizer of the model a vocabulary was trained for.
Every rule is a list of regular expressions applied in turn: what one matches, and what it leaves
between two matches, are pieces that the next one cuts further and that no merge crosses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What a vocabulary gets whose own rule nobody recorded: llama.cpp's fallback.
_DEFAULT_RULES = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """One rule. `patterns` are applied in turn; None stands for GPT-2's own, built into the
    library. `ignore_merges`: a word that is a token as a whole stays one, whatever the merges say.
    `compose`: the text is brought into Unicode's composed form (NFC) first. `adds_bos`: the model
    expects its begin token unless the file says otherwise.
    """

    patterns: tuple[str, ...] | None = None
    digits_apart: bool = False
    ignore_merges: bool = False
    compose: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The library's form of the rule, ending in GPT-2's byte alphabet."""
        steps: list[Any] = []
        if self.digits_apart:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            for pattern in self.patterns or ()
        ]
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.patterns is None)
        return pre_tokenizers.Sequence([*steps, words]) if steps else words

    def normalizer(self) -> normalizers.Normalizer | None:
        """What happens to the text before it is cut."""
        return normalizers.NFC() if self.compose else None


_GPT2 = PreTokenization()
_SMOLLM = PreTokenization(digits_apart=True)
_LLAMA3 = PreTokenization((_LLAMA3_WORDS,), ignore_merges=True, adds_bos=True)
_LLAMA3_PLAIN = PreTokenization((_LLAMA3_WORDS,))
_QWEN2 = PreTokenization((_QWEN2_WORDS,), compose=True)

_BY_NAME = {
    **dict.fromkeys(
        (
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva",
            "minerva-7b",
        ),
        _SMOLLM,
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3_PLAIN),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "stablelm2": PreTokenization((_QWEN2_WORDS,)),
    "qwen35": PreTokenization((_QWEN35_WORDS,), compose=True),
    "tekken": PreTokenization((_TEKKEN_WORDS,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion"), _GPT2),
    "default": PreTokenization(_DEFAULT_RULES),
}
NAMES = tuple(_BY_NAME)


def by_name(name: object) -> PreTokenization | None:
    """The rule of a `tokenizer.ggml.pre` name, or None where nobody knows it."""
    return _BY_NAME.get(name) if isinstance(name, str) else None
