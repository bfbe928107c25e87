"""Mixtures of experts: each row goes through a few of many MLPs, which a router chooses for it.

After Shazeer et al., arXiv:1701.06538, as Mixtral and Qwen3 have it: a softmax over all experts,
and the likeliest few with their probabilities, which may be made to add up to one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.ops.linear import Linear
from worker.ops.planes import PlaneWeight


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer: products of each, and a `router` with one logit per expert.

    A row takes `per_token` of them; their weights add up to one if `normalized`. `stacks` are the
    weights of all: [experts, 2 · inner, hidden] and [experts, hidden, inner], each dense or packed,
    then with [experts · N] outputs. If `is_split`, each rank has a part of the inner features, and
    the mixtures of all ranks add up.
    """

    router: Linear
    gate_up: tuple[Linear, ...]
    down: tuple[Linear, ...]
    per_token: int
    normalized: bool
    stacks: tuple[Tensor | PlaneWeight, Tensor | PlaneWeight] | None = None
    is_split: bool = False

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts [T, per_token] int64 of rows x [T, hidden], and float32 weights."""
        shares, chosen = self.router(x).float().softmax(dim=-1).topk(self.per_token, dim=-1)
        if self.normalized:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return chosen, shares


def mix_experts(x: Tensor, experts: Experts, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute the weighted sum of the chosen experts' results for each row of x [T, hidden].

    A row's sum runs over its experts by number, in float32, so it does not depend on other rows.
    """
    chosen, shares = experts.route(x)
    mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        own = experts.down[expert](gate(experts.gate_up[expert](x.index_select(0, rows))))
        mixed.index_add_(0, rows, own.float() * shares[rows, places].unsqueeze(1))
    return mixed.to(x.dtype)
