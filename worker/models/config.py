"""The architecture of a checkpoint, read from GGUF metadata or Hugging Face JSON.

Sources of the context length: vLLM for scaled models (`linear`: the stated positions times the
factor; `yarn`: the original positions times the factor), llama.cpp for the keys of GGUF.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.errors import ModelError
from worker.models.fields import Fields
from worker.models.gguf import GgufFile
from worker.models.rotary import RopeScaling, gguf_scaling, hf_rope, hf_scaling

SUPPORTED_ARCHITECTURES = (
    *("gemma2", "gemma3", "gemma3_text", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3"),
    *("qwen3_moe", "qwen3moe", "smollm3"),
)
GEMMA = ("gemma2", "gemma3", "gemma3_text")

# SmolLM3 leaves rotary embedding out of every fourth layer unless the file says otherwise.
_SMOLLM3_NO_ROPE_INTERVAL = 4
_QWEN3_HEAD_DIM = 128  # the default of a Qwen3 configuration
_GEMMA_HEAD_DIM = 256  # and of a Gemma configuration, also for the scale of scores
_GEMMA3_THETA = 1_000_000.0
_TIED = ("gemma2", "gemma3_text", "smollm3")  # by default
# Keys of GGUF that change the arithmetic, and the value that leaves it unchanged.
_NEUTRAL_KEYS = {
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"), 0),
    **dict.fromkeys(("attention.temperature_scale", "expert_count"), 0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 0),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), 1),
}
_MIXTURES = ("llama", "qwen3moe")  # GGUF architectures that may have experts
# Keys whose change of the arithmetic is supported for some architectures.
_EXPECTED = {
    "expert_count": _MIXTURES,
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2",),
}
_QK_NORM = ("gemma3", "gemma3_text", "qwen3", "qwen3_moe", "qwen3moe")
_PARTLY_ROTATED = ("phi3",)
# Architectures that need `use_sliding_window` for a window, and the default number of layers
# without it.
_WINDOW_IF_ASKED = ("qwen2", "qwen3", "qwen3_moe", "smollm3")
_QWEN_FULL_LAYERS = 28
# Gemma: every n-th layer has no window; the others have their own rotary base. Models of these
# numbers of layers scale scores differently, which GGUF does not record.
_GEMMA_FULL_INTERVALS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a llama-family decoder.

    `max_context` is the number of positions that a sequence may have.

    `qk_norm`: queries and keys are normalised per head before they are rotated. `no_rope_layers`
    are the layers without rotary embedding. The first `rotary_dim` numbers of a head are rotated
    (0: all of them). With a `window`, a row sees this number of positions, its own included, in all
    layers but the `full_layers`. `local_rope_theta`, if not 0, is the rotary base of the layers
    with a window, whose frequencies are then not scaled.

    `activation` ("silu" or "gelu", by tanh) gates the MLP. `post_norms`: the outputs of attention
    and MLP are normalised before they are added. Embeddings are multiplied by `embedding_scale`,
    scores by `attention_scale` (0: 1 / sqrt(head_dim)). Softcaps c > 0 turn x into
    c · tanh(x / c), for attention scores and for logits.

    With `num_experts`, the MLP of every `expert_interval`-th layer but the `dense_layers` is a
    mixture of this number of experts with `expert_size` inner features each. A token takes
    `experts_per_token` of them, with weights that add up to one if `normalizes_experts`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    no_rope_layers: range | frozenset[int] = frozenset()
    rotary_dim: int = 0
    window: int = 0
    full_layers: range | frozenset[int] = frozenset()
    local_rope_theta: float = 0.0
    activation: str = "silu"
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalizes_experts: bool = True
    expert_interval: int = 1
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.num_layers)
        # A file is input from outside: no size may lead to a division by zero.
        if min(*sizes, self.num_heads, self.num_kv_heads, self.head_dim, self.max_context) < 1:
            raise ModelError(f"model configuration has a size below 1: {self}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        # YaRN divides by the logarithm of the base, and norms take a root of the epsilon.
        if self.rope_theta <= 1 or self.rms_norm_eps < 0:
            raise ModelError(
                f"rope_theta {self.rope_theta} must be above 1, and rms_norm_eps"
                f" {self.rms_norm_eps} at least 0"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ModelError(
                f"{self.rotary_dim} of {self.head_dim} numbers of a head cannot rotate"
            )
        if min(self.window, self.attention_softcap, self.logit_softcap, self.attention_scale) < 0:
            raise ModelError(f"model configuration has a window, cap or scale below 0: {self}")
        if self.num_experts and not (
            0 < self.experts_per_token <= self.num_experts and self.expert_size > 0
        ):
            raise ModelError(
                f"{self.experts_per_token} of {self.num_experts} experts of size"
                f" {self.expert_size} cannot be taken"
            )
        if self.expert_interval < 1:
            raise ModelError(f"every {self.expert_interval}th layer cannot have experts")

    def window_of(self, layer: int) -> int | None:
        """Return how many positions a row sees, its own included; None: all up to its own."""
        return self.window if self.window and layer not in self.full_layers else None

    def has_experts(self, layer: int) -> bool:
        is_due = (layer + 1) % self.expert_interval == 0 and layer not in self.dense_layers
        return self.num_experts > 0 and is_due

    @property
    def kv_elements_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


def check_architecture(source: str, architecture: object) -> str:
    if not isinstance(architecture, str) or architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(
            f"{source}: architecture {architecture!r} is not supported (supported: {supported})"
        )
    return architecture


def from_gguf(file: GgufFile) -> ModelConfig:
    """Read GGUF metadata. Raise `ModelError` naming a missing key."""
    source = str(file.path)
    architecture = check_architecture(source, file.architecture)
    fields = gguf_fields(source, architecture, file.metadata)
    for key, neutral in _NEUTRAL_KEYS.items():
        if architecture in _EXPECTED.get(key, ()):
            continue
        if fields.number(key, float, float(neutral)) != neutral:
            raise fields.refuse(f"{key} is {fields.values[key]!r}, which is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        raise ModelError(f"{source}: tensor token_embd.weight is missing")
    hidden = fields.number("embedding_length", int)
    heads = fields.number("attention.head_count", int)
    # Sizes are checked later: a hostile file may claim 0 heads.
    head_dim = fields.number("attention.key_length", int, hidden // max(heads, 1))
    if fields.number("attention.value_length", int, head_dim) != head_dim:
        raise fields.refuse("values of another size than keys are not supported")
    rotary_dim = fields.number("rope.dimension_count", int, head_dim)
    if rotary_dim != head_dim and architecture not in _PARTLY_ROTATED:
        raise fields.refuse("partial rotary embedding is not supported")
    num_layers = fields.number("block_count", int)
    inner = fields.number("feed_forward_length", int)
    full_interval = _GEMMA_FULL_INTERVALS.get(architecture, 0)
    no_rope_interval = _SMOLLM3_NO_ROPE_INTERVAL if architecture == "smollm3" else 0
    gemma = {}
    if architecture in GEMMA:
        caps = [fields.number(key, float, 0.0) for key in _GEMMA2_CAPS]
        is_27b = num_layers == _GEMMA_27B_LAYERS[architecture]
        local_theta = fields.number("rope.freq_base_swa", float, _GEMMA3_LOCAL_THETA)
        gemma = _gemma(architecture, hidden, hidden / heads if is_27b else 0, caps, local_theta)
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.number("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        max_context=gguf_context_length(source, architecture, file.metadata),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", float),
        rope_theta=fields.number("rope.freq_base", float, 10000.0),
        rope_scaling=gguf_scaling(fields),
        # GGUF has no keys for these; the tensors show them.
        tied_head="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture in _QK_NORM,
        no_rope_layers=_every_nth(no_rope_interval, num_layers),
        rotary_dim=rotary_dim,
        window=fields.number("attention.sliding_window", int, 0),
        full_layers=_every_nth(full_interval, num_layers),
        **gemma,
        **_gguf_experts(fields, inner),
    )


def _gguf_experts(fields: Fields, inner: int) -> dict[str, Any]:
    """Return the fields of a mixture's experts, whose default size is that of a dense MLP."""
    count = fields.number("expert_count", int, 0)
    if not count:
        return {}
    return {
        "num_experts": count,
        "experts_per_token": fields.number("expert_used_count", int),
        "expert_size": fields.number("expert_feed_forward_length", int, inner),
    }


def _gemma(
    architecture: str, hidden: int, query_scalar: float, caps: Sequence[float], local_theta: float
) -> dict[str, Any]:
    """Return the fields special to Gemma; scores are divided by the root of `query_scalar`."""
    return {
        "local_rope_theta": 0.0 if architecture == "gemma2" else local_theta,
        "activation": "gelu",
        "post_norms": True,
        "embedding_scale": hidden**0.5,
        "attention_scale": query_scalar**-0.5 if query_scalar > 0 else 0.0,
        "attention_softcap": caps[0],
        "logit_softcap": caps[1],
    }


def _every_nth(interval: int, num_layers: int) -> range:
    """Return layers interval-1, 2·interval-1, …; none for 0. A range, not a set: `num_layers` is
    not checked yet, and a hostile file may claim billions.
    """
    return range(interval - 1, num_layers, interval) if interval > 0 else range(0)


def from_hf(source: str, values: Mapping[str, Any]) -> ModelConfig:
    """Read Hugging Face's JSON; `source` names the file in errors."""
    architecture = check_architecture(source, values.get("model_type"))
    # In GGUF the same name is the text model alone.
    if architecture == "gemma3":
        raise ModelError(f"{source}: architecture 'gemma3' has images; supported is gemma3_text")
    key, wanted = "hidden_act", "silu"
    if architecture in GEMMA:
        key, wanted = "hidden_activation", "gelu_pytorch_tanh"
    if (values.get(key) or wanted) != wanted:
        raise ModelError(f"{source}: {key} {values[key]!r} is not supported")
    if values.get("use_bidirectional_attention"):
        raise ModelError(f"{source}: use_bidirectional_attention is not supported")
    fields = Fields(source, values)
    heads = fields.number("num_attention_heads", int)
    hidden = fields.number("hidden_size", int)
    num_layers = fields.number("num_hidden_layers", int)
    attention_bias = fields.flag("attention_bias")
    head_dim = fields.number("head_dim", int, _default_head_dim(architecture, hidden, heads))
    full_layers = _hf_full_layers(fields, architecture, num_layers)
    theta = _GEMMA3_THETA if architecture == "gemma3_text" else 10_000.0
    gemma = {}
    if architecture in GEMMA:
        scalar = fields.number("query_pre_attn_scalar", float, _GEMMA_HEAD_DIM)
        defaults = _GEMMA2_CAPS if architecture == "gemma2" else {}
        # null is off; a missing key has the default of the class in transformers.
        caps = [
            fields.number(key, float, 0.0 if key in values else defaults.get(key, 0.0))
            for key in _GEMMA2_CAPS
        ]
        gemma = _gemma(architecture, hidden, scalar, caps, _hf_local_theta(source, values))
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.number("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=fields.number("intermediate_size", int),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.number("num_key_value_heads", int, heads),
        head_dim=head_dim,
        max_context=hf_context_length(source, values),
        rms_norm_eps=fields.number("rms_norm_eps", float, 1e-6),
        rope_theta=hf_rope(source, values).number("rope_theta", float, theta),
        rope_scaling=hf_scaling(source, values),
        tied_head=fields.flag("tie_word_embeddings", default=architecture in _TIED),
        # Qwen2 has these biases without a key in its configuration.
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=architecture in _QK_NORM,
        no_rope_layers=_hf_no_rope_layers(fields, architecture, num_layers),
        rotary_dim=_hf_rotary_dim(source, values, architecture, head_dim),
        window=0 if full_layers is None else fields.number("sliding_window", int, 0),
        full_layers=full_layers or frozenset(),
        **gemma,
        **_hf_experts(fields, architecture),
    )


def _hf_experts(fields: Fields, architecture: str) -> dict[str, Any]:
    if architecture not in ("mixtral", "qwen3_moe"):
        return {}
    is_qwen = architecture == "qwen3_moe"
    # transformers has used either name.
    count = fields.number("num_local_experts", int, 0) or fields.number("num_experts", int)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.refuse(f"mlp_only_layers is {dense!r}, not a list of layers")
    return {
        "num_experts": count,
        "experts_per_token": fields.number("num_experts_per_tok", int),
        "expert_size": fields.number(
            "moe_intermediate_size" if is_qwen else "intermediate_size", int
        ),
        "normalizes_experts": fields.flag("norm_topk_prob") if is_qwen else True,
        "expert_interval": fields.number("decoder_sparse_step", int, 1) if is_qwen else 1,
        "dense_layers": frozenset(dense) if is_qwen else frozenset(),
    }


def _hf_local_theta(source: str, values: Mapping[str, Any]) -> float:
    """Return the rotary base of Gemma-3's layers with a window, in either layout."""
    stated = (values.get("rope_parameters") or {}).get("sliding_attention")
    if stated is None:
        return Fields(source, values).number("rope_local_base_freq", float, _GEMMA3_LOCAL_THETA)
    local = Fields(f"{source}: sliding_attention", stated)
    if stated.get("rope_type", "default") != "default":
        raise local.refuse(f"rope scaling {stated['rope_type']!r} is not supported")
    return local.number("rope_theta", float, _GEMMA3_LOCAL_THETA)


def _default_head_dim(architecture: str, hidden: int, heads: int) -> int:
    if architecture in GEMMA:
        return _GEMMA_HEAD_DIM
    return _QWEN3_HEAD_DIM if architecture == "qwen3" else hidden // max(heads, 1)


def _hf_no_rope_layers(
    fields: Fields, architecture: str, num_layers: int
) -> range | frozenset[int]:
    """Read SmolLM3's `no_rope_layers` (1 where a layer rotates, 0 where not) or its interval."""
    if architecture != "smollm3":
        return frozenset()
    listed = fields.values.get("no_rope_layers")
    if listed is None:
        interval = fields.number("no_rope_layer_interval", int, _SMOLLM3_NO_ROPE_INTERVAL)
        return _every_nth(interval, num_layers)
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise fields.refuse(f"no_rope_layers is not a list of {num_layers} switches")
    return frozenset(n for n, rotates in enumerate(listed) if not rotates)


def _hf_full_layers(
    fields: Fields, architecture: str, num_layers: int
) -> range | frozenset[int] | None:
    """Return the layers without a window; None: there is no window."""
    # Qwen2 writes a window it does not use beside `use_sliding_window: false`.
    slides = fields.flag("use_sliding_window", default=architecture not in _WINDOW_IF_ASKED)
    if not slides or not fields.optional("sliding_window"):
        return None
    listed = fields.values.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != num_layers:
            raise fields.refuse(f"layer_types is not a list of {num_layers} names")
        odd = [kind for kind in listed if kind not in ("full_attention", "sliding_attention")]
        if odd:
            raise fields.refuse(f"layer_types has {odd[0]!r}, which is not supported")
        return frozenset(n for n, kind in enumerate(listed) if kind == "full_attention")
    if architecture == "smollm3":
        raise fields.refuse("layer_types is missing beside use_sliding_window")
    if architecture in ("qwen2", "qwen3"):
        return range(fields.number("max_window_layers", int, _QWEN_FULL_LAYERS))
    interval = _GEMMA_FULL_INTERVALS.get(architecture, 0)
    return _every_nth(fields.number("sliding_window_pattern", int, interval), num_layers)


def _hf_rotary_dim(source: str, values: Mapping[str, Any], architecture: str, head_dim: int) -> int:
    rope = hf_rope(source, values)
    part = rope.number("partial_rotary_factor", float, 1.0)
    if part == 1.0:
        return head_dim
    if architecture not in _PARTLY_ROTATED:
        raise rope.refuse("partial rotary embedding is not supported")
    return int(head_dim * part)


def hf_context_length(source: str, values: Mapping[str, Any]) -> int:
    fields, rope = Fields(source, values), hf_rope(source, values)
    positions = fields.number("max_position_embeddings", int)
    kind = rope.values.get("rope_type") or rope.values.get("type")
    factor = rope.number("factor", float, 1.0)
    original = rope.number("original_max_position_embeddings", int, positions)
    if values.get("model_type") in GEMMA:  # the stated number includes the scaling
        return positions
    return _scaled(kind, positions, original, factor)


def gguf_context_length(source: str, architecture: str, metadata: Mapping[str, Any]) -> int:
    fields = gguf_fields(source, architecture, metadata)
    positions = fields.number("context_length", int)
    kind = fields.values.get("rope.scaling.type")
    factor = fields.number("rope.scaling.factor", float, 1.0)
    original = fields.number("rope.scaling.original_context_length", int, positions)
    if architecture in GEMMA:
        return positions
    return _scaled(kind, positions, original, factor)


def gguf_fields(source: str, architecture: str, metadata: Mapping[str, Any]) -> Fields:
    prefix = f"{architecture}."
    keys = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    return Fields(f"{source}: {architecture}", keys)


def _scaled(kind: object, positions: int, original: int, factor: float) -> int:
    if kind == "linear":
        return int(positions * max(factor, 1.0))
    return max(positions, int(original * factor)) if kind == "yarn" else positions
