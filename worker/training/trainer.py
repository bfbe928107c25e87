"""Gradient descent on a head: batches, learning rate, checkpoints.

Theory of operation. Which batch a step sees is a pure function of the seed and the step's number,
and nothing else is random. A checkpoint holds the step, the parameters and the optimizer's two
moments, and is written so that it is there whole or not at all. So training that was killed goes on
from its last checkpoint and ends with the very numbers it would have ended with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from worker.errors import ModelError
from worker.training.dataset import Batch, batches
from worker.training.objective import Objective
from worker.training.store import Sample, read_tensors, write_tensors
from worker.training.twin import HeadTwin

_BETAS, _WEIGHT_DECAY, _LARGEST_GRADIENT = (0.9, 0.95), 0.01, 1.0
_FINAL_RATE = 0.05  # of the highest
_STEP = "step"


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to learn. `batch_tokens` are the padded tokens of a step; the learning
    rate rises over `warmup_steps` and falls along a cosine until `steps`.
    """

    steps: int
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    warmup_steps: int = 30
    checkpoint_steps: int = 25
    seed: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rising = min(1.0, (step + 1) / self.warmup_steps)
        falling = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate * rising * (_FINAL_RATE + (1 - _FINAL_RATE) * falling)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training is: `loss` is that of the last step."""

    step: int
    steps: int
    loss: float


class Trainer:
    """Trains one head on one set of samples; sole owner of the optimizer.

    `checkpoint` is the file it keeps its state in. With `autocast` products run in bfloat16.
    """

    def __init__(
        self, twin: HeadTwin, objective: Objective, schedule: Schedule, checkpoint: Path
    ) -> None:
        self._twin = twin
        self._objective = objective
        self._schedule = schedule
        self._checkpoint = checkpoint
        self._optimizer = torch.optim.AdamW(
            _groups(twin), lr=schedule.learning_rate, betas=_BETAS, foreach=False
        )
        self.step = 0

    def resume(self) -> bool:
        """Go on from the checkpoint, if there is one. `ModelError` for one of another head."""
        if not self._checkpoint.exists():
            return False
        kept = read_tensors(self._checkpoint)
        parameters = dict(self._twin.named_parameters())
        wanted = {f"{part}.{name}" for name in parameters for part in ("weight", "mean", "square")}
        if wanted | {_STEP} != kept.keys() or any(
            kept[f"weight.{name}"].shape != parameter.shape
            for name, parameter in parameters.items()
        ):
            raise ModelError(f"{self._checkpoint}: of another head; remove it to begin anew")
        self.step = int(kept[_STEP])
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(kept[f"weight.{name}"])
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": kept[f"mean.{name}"].to(parameter.device),
                    "exp_avg_sq": kept[f"square.{name}"].to(parameter.device),
                }
        return True

    def save(self) -> None:
        """Write the checkpoint."""
        tensors: dict[str, Tensor] = {_STEP: torch.tensor(self.step)}
        for name, parameter in self._twin.named_parameters():
            state = self._optimizer.state[parameter]
            tensors[f"weight.{name}"] = parameter.detach()
            tensors[f"mean.{name}"] = state["exp_avg"]
            tensors[f"square.{name}"] = state["exp_avg_sq"]
        write_tensors(self._checkpoint, tensors)

    def run(
        self, samples: Sequence[Sample], autocast: bool, told: Callable[[Progress], bool]
    ) -> None:
        """Learn from `samples` until the schedule's end. `told` is called after each step; it says
        whether to go on. The state is kept in any case.
        """
        schedule = self._schedule
        for batch in self._batches(samples):
            if self.step >= schedule.steps:
                break
            loss = self._learn(batch, autocast)
            self.step += 1
            goes_on = told(Progress(self.step, schedule.steps, loss))
            if self.step % schedule.checkpoint_steps == 0 or not goes_on:
                self.save()
            if not goes_on:
                return
        self.save()

    def _batches(self, samples: Sequence[Sample]) -> Iterator[Batch]:
        """The batches of this step and all after it."""
        number, epoch = 0, 0
        while True:
            rng = random.Random(f"{self._schedule.seed}/batches/{epoch}")
            for batch in batches(samples, self._schedule.batch_tokens, rng, self.step - number):
                if batch is not None:
                    yield batch
                number += 1
            epoch += 1

    def _learn(self, batch: Batch, autocast: bool) -> float:
        device = self._twin.get_parameter("fuse").device
        batch = batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = self._objective.loss(self._twin, batch)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._twin.parameters(), _LARGEST_GRADIENT)
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.rate(self.step)
        self._optimizer.step()
        return loss.item()


def _groups(twin: HeadTwin) -> list[dict[str, object]]:
    """Parameters in the optimizer's groups: matrices shrink a little, norms do not."""
    matrices = [p for p in twin.parameters() if p.dim() > 1]
    norms = [p for p in twin.parameters() if p.dim() == 1]
    return [
        {"params": matrices, "weight_decay": _WEIGHT_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
