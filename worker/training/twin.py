"""The draft head in trainable form: the same weights, and no paged cache.

The head is trained as it is used (HASS, arXiv:2408.15766; training-time test of EAGLE-3,
arXiv:2503.01840). In pass 0 row t has the target's hidden state of position t; in pass j, for the
j-th token drafted after that, it has the result of pass j-1 for row t-1. In every pass row t knows
token t+1 and predicts the target's token after it. A drafting row attends to the same keys as a
draft: those of pass 0 up to the last position that the target has run, t-j, and then one key of
each pass, at the positions drafted since.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.models.config import ModelConfig
from worker.models.draft_head import HeadShape
from worker.models.llama import LlamaModel
from worker.ops.rope import RopeTable
from worker.training.dataset import TrainingBatch

_INITIAL_SCALE = 0.02
# Share of the mean variance added to every direction, so that rare directions do not overfit.
_RIDGE = 3e-3


@dataclass(frozen=True, slots=True)
class Teacher:
    """The frozen parts of the target that the head uses, in the target's dtype.

    `embedding` [V, H]; `lm_rows` [Vd, H], the rows of the target's head for the draft vocabulary;
    `final_norm` [H] is float32.
    """

    config: ModelConfig
    embedding: Tensor
    lm_rows: Tensor
    final_norm: Tensor
    rope: RopeTable

    def normalised(self, features: Tensor) -> Tensor:
        """Normalise hidden states [..., H] as input of the target's head."""
        eps = self.config.rms_norm_eps
        return functional.rms_norm(features.float(), self.final_norm.shape, self.final_norm, eps)


def teacher_of(target: LlamaModel, draft_vocab: Tensor) -> Teacher:
    """Return the frozen parts of a target."""
    return Teacher(
        config=target.config,
        embedding=target.embedding.rows(
            torch.arange(target.config.vocab_size, device=target.device)
        ),
        lm_rows=target.head.rows(draft_vocab),
        final_norm=target.final_norm.float(),
        rope=target.rope,
    )


class HeadTwin(nn.Module):
    """A draft head with float32 parameters, named as the tensors of a head's file."""

    def __init__(self, shape: HeadShape, teacher: Teacher, noise: torch.Generator) -> None:
        """Sample initial weights from `noise`. Norms of hidden states start as the target's final
        norm; attention and MLP start with zero output.
        """
        super().__init__()
        self.shape = shape
        self.teacher = teacher
        for name, size in shape.tensor_shapes(teacher.config).items():
            initial = torch.ones(size)
            if name in ("feature_norm", "output_norm"):
                initial = teacher.final_norm.detach().clone().cpu()
            elif name in ("output", "down"):
                initial = torch.zeros(size)
            elif len(size) > 1:
                initial = torch.randn(size, generator=noise) * _INITIAL_SCALE
            self.register_parameter(name, nn.Parameter(initial.to(teacher.lm_rows.device)))

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of a head's file, except `draft_vocab`."""
        return {name: tensor.detach() for name, tensor in self.named_parameters()}

    def passes(self, features: Tensor, token_ids: Tensor, num_passes: int) -> list[Tensor]:
        """Return hidden states [B, L, H] of each pass, for `features` [B, L, H] of positions 0 to
        L-1 and the tokens after them. Row t of pass j is valid for t >= j.
        """
        tokens = self.token_inputs(token_ids)
        seen: list[tuple[Tensor, Tensor]] = []
        given, results = features.float(), []
        for _ in range(num_passes):
            states = self.state_inputs(given)
            joined = torch.cat((tokens, states), dim=-1)
            x = functional.linear(joined, self.get_parameter("fuse")).float()
            x = x + self._attention(self._norm(x, "input_norm"), seen)
            normed = self._norm(x, "mlp_norm")
            gate, up = functional.linear(normed, self.get_parameter("gate_up")).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, self.get_parameter("down"))
            results.append(x)
            given = functional.pad(x[:, :-1], (0, 0, 1, 0))
        return results

    def token_inputs(self, token_ids: Tensor) -> Tensor:
        """Return the head's input for tokens [...]: normalised embeddings [..., H]."""
        return self._norm(self.teacher.embedding[token_ids].float(), "embedding_norm")

    def state_inputs(self, features: Tensor) -> Tensor:
        """Return the head's input for hidden states [..., H], the target's or its own."""
        return self._norm(features, "feature_norm")

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., Vd] float32 over the draft vocabulary."""
        return functional.linear(self.output_states(hidden), self.teacher.lm_rows).float()

    def output_states(self, hidden: Tensor) -> Tensor:
        """Normalise hidden states [..., H] of a pass as input of the target's head."""
        return self._norm(hidden, "output_norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.get_parameter(name)
        return functional.rms_norm(
            x.float(), weight.shape, weight, self.teacher.config.rms_norm_eps
        )

    def _attention(self, x: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute x [B, L, H] → [B, L, H]; append the keys and values of this pass to `seen`."""
        config = self.teacher.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = functional.linear(x, self.get_parameter("qkv")).float()
        qkv = qkv.view(*x.shape[:2], -1, head_dim).transpose(1, 2)
        queries, keys, values = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        queries, keys = self._rotated(queries), self._rotated(keys)
        sharing = heads // kv_heads
        keys, values = keys.repeat_interleave(sharing, 1), values.repeat_interleave(sharing, 1)
        seen.append((keys, values))
        mixed = _attend(queries * head_dim**-0.5, seen)
        return functional.linear(mixed.transpose(1, 2).flatten(2), self.get_parameter("output"))

    def _rotated(self, x: Tensor) -> Tensor:
        length = x.shape[2]
        cos, sin = self.teacher.rope.cos[:length], self.teacher.rope.sin[:length]
        return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def _attend(queries: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attend with scaled queries [B, heads, L, head_dim] of the last pass to all passes' keys."""
    behind = len(seen) - 1
    length = queries.shape[2]
    rows = torch.arange(length, device=queries.device)
    unseen = rows[None, :] > rows[:, None] - behind
    scores = (queries @ seen[0][0].transpose(-1, -2)).float().masked_fill(unseen, -torch.inf)
    drafted = [
        (queries * _delayed(keys, behind - n)).sum(dim=-1, keepdim=True).float()
        for n, (keys, _) in enumerate(seen[1:], 1)
    ]
    weights = torch.cat((scores, *drafted), dim=-1).softmax(dim=-1)
    mixed = weights[..., :length] @ seen[0][1]
    for n, (_, values) in enumerate(seen[1:], 1):
        mixed = mixed + weights[..., length + n - 1, None] * _delayed(values, behind - n)
    return mixed


def _delayed(x: Tensor, by: int) -> Tensor:
    """Shift x [B, heads, L, head_dim] by `by` rows, with zeros before them."""
    return x if by == 0 else functional.pad(x[:, :, :-by], (0, 0, by, 0))


@torch.no_grad()
def fit_linear(twin: HeadTwin, batches: Iterable[TrainingBatch]) -> None:
    """Set `fuse` to the linear map that best predicts the target's next normalised hidden state
    (ridge regression); attention and MLP have no output yet.
    """
    hidden = twin.teacher.config.hidden_size
    device = twin.get_parameter("fuse").device
    moments = torch.zeros(2 * hidden, 2 * hidden, device=device)
    products = torch.zeros(2 * hidden, hidden, device=device)
    for batch in batches:
        tokens = twin.token_inputs(batch.next_ids.flatten()[batch.rows])
        states = twin.state_inputs(batch.features.flatten(0, 1)[batch.rows].float())
        inputs = torch.cat((tokens, states), dim=-1)
        goal = functional.rms_norm(
            batch.expected.float(), (hidden,), eps=twin.teacher.config.rms_norm_eps
        )
        moments += inputs.T @ inputs
        products += inputs.T @ goal
    ridge = _RIDGE * moments.diagonal().mean()
    moments.diagonal().add_(ridge)
    twin.get_parameter("fuse").copy_(torch.linalg.solve(moments, products).T)
