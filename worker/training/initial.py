"""A first guess for a head: the best linear one, found without any steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from worker.training.dataset import Batch
from worker.training.twin import HeadTwin

# Of the mean variance, added to every direction: keeps the rare ones from being believed too much.
_RIDGE = 3e-3


@torch.no_grad()
def fit_linear(twin: HeadTwin, batches: Iterable[Batch]) -> None:
    """Set `fuse` so that the head, whose attention and MLP add nothing yet, comes as near to the
    target's next normalised hidden state as a linear map can (ridge regression).
    """
    hidden = twin.teacher.config.hidden_size
    device = twin.get_parameter("fuse").device
    moments = torch.zeros(2 * hidden, 2 * hidden, device=device)
    products = torch.zeros(2 * hidden, hidden, device=device)
    for batch in batches:
        inputs = _inputs(twin, batch)
        goal = functional.rms_norm(
            batch.expected.float(), (hidden,), eps=twin.teacher.config.rms_norm_eps
        )
        moments += inputs.T @ inputs
        products += inputs.T @ goal
    ridge = _RIDGE * moments.diagonal().mean()
    moments.diagonal().add_(ridge)
    twin.get_parameter("fuse").copy_(torch.linalg.solve(moments, products).T)


def _inputs(twin: HeadTwin, batch: Batch) -> Tensor:
    words = twin.words(batch.next_ids.flatten()[batch.rows])
    thoughts = twin.thoughts(batch.features.flatten(0, 1)[batch.rows].float())
    return torch.cat((words, thoughts), dim=-1)
