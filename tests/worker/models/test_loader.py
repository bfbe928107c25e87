"""Checkpoints of both formats give the logits of transformers, or an error names the problem."""

import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.model.model_variants import (
    DYNAMIC,
    HF_VARIANTS,
    LINEAR,
    LLAMA3,
    LONGROPE,
    PHI3,
    SAVED,
    TINY,
    VARIANTS,
    YARN,
)
from tests.support.model.tiny_checkpoint import configure, edit
from worker.errors import ModelError
from worker.executor.kv_cache import allocate
from worker.executor.state import DeviceState
from worker.executor.step_batch import StepBatch
from worker.models.checkpoints import GgufCheckpoint
from worker.models.config import from_gguf, from_hf
from worker.models.gguf import GgufFile
from worker.models.loader import inverse_frequencies, load_model
from worker.types import ScheduledSequence

CPU = torch.device("cpu")
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def logits_of(path: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.inference_mode():
        model = load_model(path, dtype, CPU)
        cache = allocate(20, 16, model.config, dtype, CPU)
        sequence = ScheduledSequence(0, token_ids, 0, range(20))
        step = StepBatch([sequence], DeviceState(16, CPU)).tensors
        step = dataclasses.replace(step, sample_rows=torch.arange(len(token_ids)))
        return model.forward(step, cache)


@pytest.mark.parametrize("variant", VARIANTS | HF_VARIANTS)
def test_safetensors_give_the_logits_of_transformers(
    variant: str, save_tiny: Callable[..., Any]
) -> None:
    kind, changes = (VARIANTS | HF_VARIANTS)[variant]
    saved = save_tiny(kind, **changes)
    logits = logits_of(saved.path, saved.token_ids)
    torch.testing.assert_close(logits, saved.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["llama, untied head", "gemma2"])
def test_bfloat16_is_near_float32(variant: str, save_tiny: Callable[..., Any]) -> None:
    kind, changes = VARIANTS[variant]
    saved = save_tiny(kind, **changes)
    logits = logits_of(saved.path, saved.token_ids, torch.bfloat16)
    assert float((logits - saved.logits).abs().mean() / saved.logits.std()) < 0.03


def test_shards_are_one_checkpoint(save_tiny: Callable[..., Any]) -> None:
    saved = save_tiny(shard_size="60KB")
    shards = list(saved.path.glob("*.safetensors"))
    index = saved.path / "model.safetensors.index.json"
    stale = index.read_bytes()
    assert len(shards) > 1

    def assert_loads() -> None:
        logits = logits_of(saved.path, saved.token_ids)
        torch.testing.assert_close(logits, saved.logits, rtol=1e-4, atol=1e-4)

    assert_loads()
    index.unlink()
    assert_loads()
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    save_file(tensors, saved.path / "model.safetensors")
    index.write_bytes(stale)
    for shard in shards:
        shard.unlink()
    assert_loads()


@pytest.mark.parametrize("variant", VARIANTS)
def test_gguf_gives_the_logits_of_transformers(
    variant: str, save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    kind, changes = VARIANTS[variant]
    saved = save_tiny(kind, **changes)
    logits = logits_of(write_gguf(saved.model), saved.token_ids)
    torch.testing.assert_close(logits, saved.logits, rtol=1e-4, atol=1e-4)


def test_gguf_rope_factors_are_applied(
    save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    """Llama 3.1 files store divisors of the frequencies as a tensor."""
    saved = save_tiny(rope_parameters=LLAMA3)
    scaled = inverse_frequencies(from_hf("", saved.model.config.to_dict()))
    plain = 1.0 / 5000.0 ** (torch.arange(0, 16, 2).float() / 16)
    path = write_gguf(saved.model, **{"rope_freqs.weight": (plain / scaled).numpy()})
    logits = logits_of(path, saved.token_ids)
    torch.testing.assert_close(logits, saved.logits, rtol=1e-4, atol=1e-4)


def test_a_quantised_file_gives_the_logits_of_its_decoded_weights(
    save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    saved = save_tiny(tie_word_embeddings=False)
    kinds = [gguf.GGMLQuantizationType[n] for n in ("Q4_1", "Q8_0", "Q5_0", "F16", "BF16")]
    stored = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate"]
    encodings = {
        f"blk.{n}.{s}.weight": k for n in (0, 1) for s, k in zip(stored, kinds, strict=True)
    }
    logits = logits_of(write_gguf(saved.model, encodings), saved.token_ids)
    with torch.no_grad():
        for layer in saved.model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            parts = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
            for part, kind in zip((*parts, mlp.gate_proj), kinds, strict=True):
                rounded = gguf.quants.quantize(part.weight.numpy(), kind)
                part.weight.copy_(torch.tensor(gguf.quants.dequantize(rounded, kind)))
        expected = saved.model(torch.tensor([saved.token_ids])).logits[0]
    assert float((expected - saved.logits).abs().max()) > 1e-3
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("old_layout", [False, True])
@pytest.mark.parametrize("scaling", [YARN, LLAMA3, LINEAR, DYNAMIC, None])
def test_both_layouts_of_rotary_settings_give_the_frequencies_of_transformers(
    old_layout: bool, scaling: dict[str, Any] | None
) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = scaling or {"rope_type": "default", "rope_theta": 5000.0}
    config = transformers.LlamaConfig(**{**SAVED, "rope_parameters": rope})
    values = config.to_dict()
    if old_layout:
        rest = {k: v for k, v in values.pop("rope_parameters").items() if k != "rope_theta"}
        values["rope_theta"] = rope["rope_theta"]
        values["rope_scaling"] = None
        if scaling is not None:
            values["rope_scaling"] = {"type": rest.pop("rope_type"), **rest}
    ours = from_hf("config.json", values)
    frequencies = inverse_frequencies(ours)
    if scaling is None:
        expected, factor = 1.0 / 5000.0 ** (torch.arange(0, 16, 2).float() / 16), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, None)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(
        1.0 if ours.rope_scaling is None else ours.rope_scaling.attention_factor
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing tensors: model\.norm\.weight"),
        (
            lambda t: [t.pop(n) for n in list(t) if "layers.1" in n],
            r"missing tensors: (model\.layers\.1\.\S+, ){4}model\S+ and 4 more$",
        ),
        (
            lambda t: (t.pop("model.norm.weight"), t.update({"extra": torch.ones(1)})),
            r"missing tensors: model\.norm\.weight; unexpected tensors: extra$",
        ),
        (
            lambda t: t.update({"model.layers.7.extra": torch.ones(1)}),
            r"unexpected tensors: model\.layers\.7\.extra",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            r"model\.norm\.weight has shape \[63\], not \[64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            r"model\.norm\.weight is I8",
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    change: Callable[[dict[str, torch.Tensor]], object], reason: str, save_tiny: Callable[..., Any]
) -> None:
    saved = save_tiny()
    edit(saved.path, change)
    with pytest.raises(ModelError, match=reason):
        load_model(saved.path, torch.float32, CPU)


def test_an_error_about_a_gguf_tensor_has_the_files_name_for_it(
    save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    saved = save_tiny()
    with_two = write_gguf(saved.model)
    file = GgufFile.open(with_two)
    content = with_two.read_bytes()
    with_two.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    assert "blk.1.ffn_up.weight" in file.tensors
    reason = r"missing tensors: blk\.1\.ffn_up\.weight; unexpected tensors: blk\.1\.ffn_xx\.weight"
    with pytest.raises(ModelError, match=reason):
        load_model(with_two, torch.float32, CPU)


def test_derived_buffers_are_ignored(save_tiny: Callable[..., Any]) -> None:
    """Old exporters stored rotary frequencies."""
    saved = save_tiny()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(saved.path, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert load_model(saved.path, torch.float32, CPU).config.num_layers == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "not positive"),
        ({"rms_norm_eps": float("nan")}, "not a finite number"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big', not a number"),
        ({"num_hidden_layers": 1.5}, "not a whole number"),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        ({"head_dim": 15}, "is odd"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "3 of 2 experts of size 96 cannot be taken",
        ),
        ({"model_type": "qwen3_moe"}, "num_experts is missing"),
        ({"model_type": "gemma3"}, "'gemma3' has images; supported is gemma3_text"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional"),
        ({"use_sliding_window": True, "model_type": "smollm3", "sliding_window": 4}, "layer_types"),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, "not a list of 2 names"),
        (
            {"sliding_window": 4, "layer_types": ["full_attention", "chunked_attention"]},
            "'chunked_attention', which is not supported",
        ),
        ({"sliding_window": -4}, "has a window, cap or scale below 0"),
    ],
)
def test_an_unsupported_configuration_is_named(
    change: dict[str, object], reason: str, save_tiny: Callable[..., Any]
) -> None:
    saved = save_tiny()
    configure(saved.path, **change)
    with pytest.raises(ModelError, match=reason):
        load_model(saved.path, torch.float32, CPU)


def test_unreadable_files_are_named(save_tiny: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: no such file"):
        load_model(tmp_path / "nowhere", torch.float32, CPU)
    saved = save_tiny()
    (saved.path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        load_model(saved.path, torch.float32, CPU)
    (saved.path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_model(saved.path, torch.float32, CPU)


def test_a_sliding_window_does_not_limit_the_context(save_tiny: Callable[..., Any]) -> None:
    saved = save_tiny("Mistral", sliding_window=128)
    model = load_model(saved.path, torch.float32, CPU)
    assert model.config.max_context == 256
    assert [layer.window for layer in model.layers] == [128, 128]


def test_longrope_uses_short_factors_for_short_sequences(save_tiny: Callable[..., Any]) -> None:
    """The maximum length of sequences decides, so that all positions have the same factors."""
    import transformers

    saved = save_tiny("Phi3", rope_parameters=LONGROPE, **PHI3)
    model = load_model(saved.path, torch.float32, CPU, max_positions=64)
    original = transformers.Phi3ForCausalLM.from_pretrained(saved.path)
    rope = original.model.rotary_emb
    cos, _ = rope(torch.zeros(1), torch.arange(64)[None])
    torch.testing.assert_close(model.rope.cos[:, :6], cos[0, :, :6])
    assert torch.equal(model.rope.cos[:, 6:8], torch.ones(64, 2))


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"rope_parameters": LINEAR}, 768),
        ({"rope_parameters": YARN}, 256),
        ({"rope_parameters": YARN, "max_position_embeddings": 64}, 256),
        ({"rope_parameters": LLAMA3}, 256),
        ({"rope_parameters": DYNAMIC}, 256),
        ({"sliding_window": 100}, 256),
    ],
)
def test_scaling_extends_the_context(changes: dict[str, Any], context: int) -> None:
    values = {**SAVED, "model_type": "llama", **changes}
    assert from_hf("config.json", values).max_context == context


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("expert_count", 8, "expert_used_count is missing"),
        ("attn_logit_softcapping", 30.0, "attn_logit_softcapping is 30"),
        ("rope.scaling.type", "longrope", "'longrope' is not supported"),
        ("rope.dimension_count", 8, "partial rotary"),
        ("attention.value_length", 8, "another size than keys"),
    ],
)
def test_unsupported_gguf_keys_are_named(
    key: str, value: object, reason: str, save_tiny: Callable[..., Any], write_gguf: Any
) -> None:
    file = GgufFile.open(write_gguf(save_tiny().model))
    file.metadata[f"llama.{key}"] = value
    with pytest.raises(ModelError, match=reason):
        from_gguf(file)


def test_loading_needs_little_more_memory_than_the_model(
    save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    saved = save_tiny(vocab_size=4096, tie_word_embeddings=True)
    checkpoint = GgufCheckpoint(write_gguf(saved.model, {"token_embd.weight": Q8_0}))
    name = "model.embed_tokens.weight"
    destination = torch.empty(checkpoint.shapes()[name], dtype=torch.bfloat16)
    tracemalloc.start()
    checkpoint.read_into(name, destination)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < destination.numel() * 4 / 2


@pytest.mark.model
def test_the_default_model_has_its_published_shape(model_path: Path) -> None:
    config = load_model(model_path, torch.bfloat16, CPU).config
    shape = (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads)
    assert shape == (30, 576, 9, 3)
    assert (config.vocab_size, config.max_context, config.tied_head) == (49152, 8192, True)
    assert config.rope_theta == 100_000


# ---- oversized numbers, which are refused quickly ----


@pytest.mark.parametrize("kind", ["Llama", "SmolLM3"])
def test_more_layers_than_tensors_are_refused(
    kind: str, save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    """Building the names of their tensors would take hours."""
    changes = {"pad_token_id": 0, "no_rope_layers": None} if kind == "SmolLM3" else {}
    saved = save_tiny(kind, **changes)
    configure(saved.path, num_hidden_layers=10**9, **changes)
    with pytest.raises(ModelError, match="too few for 1000000000 layers"):
        load_model(saved.path, torch.float32, CPU)
    path = write_gguf(saved.model)
    key = f"{saved.model.config.model_type}.block_count".encode()
    stored = key + (4).to_bytes(4, "little")
    content = path.read_bytes()
    assert stored + (2).to_bytes(4, "little") in content
    path.write_bytes(
        content.replace(stored + (2).to_bytes(4, "little"), stored + (10**9).to_bytes(4, "little"))
    )
    with pytest.raises(ModelError, match="too few for 1000000000 layers"):
        load_model(path, torch.float32, CPU)


def test_the_maximum_length_bounds_the_rotary_table(save_tiny: Callable[..., Any]) -> None:
    """A claimed context takes no memory unless sequences can use it."""
    path = save_tiny().path
    for asked, length in ((None, 256), (100, 100), (1000, 256)):
        assert load_model(path, torch.float32, CPU, asked).rope.cos.shape[0] == length


FACTOR = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\], not an object"),
        ({"rope_scaling": "x"}, "rope_scaling is 'x', not an object"),
        ({"rope_scaling": {**FACTOR, "original_max_position_embeddings": 0}}, "not positive"),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
            "not positive",
        ),
        ({"rope_scaling": {**FACTOR, "beta_fast": -1}}, "not positive"),
        ({"rope_scaling": {**FACTOR, "factor": 1e308}}, "factor is too large"),
        ({"vocab_size": 10**400}, "vocab_size is too large"),
        ({"rope_theta": 0}, "rope_theta 0.0 must be above 1"),
        ({"rope_theta": -1}, "rope_theta -1.0 must be above 1"),
        ({"rms_norm_eps": -1}, "rms_norm_eps -1.0"),
    ],
)
def test_values_outside_the_arithmetic_are_refused(change: dict[str, Any], reason: str) -> None:
    """They would divide by zero or give NaN."""
    with pytest.raises(ModelError, match=reason):
        from_hf("config.json", {**TINY, "model_type": "llama", **change})


def test_a_configuration_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_model(tmp_path, torch.float32, CPU)
