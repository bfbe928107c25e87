"""Gradient descent on a head: batches, learning rate, checkpoints.

Muon optimizes the matrices (orthogonalised momentum; see `torch.optim.Muon`), AdamW the norms:
AdamW on the matrices loses the linear start (`fit_linear`) even at a rate of 3e-4.

The batch of a step is a pure function of the seed and the step's number, and a checkpoint is
written atomically. So a killed training resumes and ends with exactly the same numbers.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from worker.errors import ModelError
from worker.training.dataset import TrainingBatch, batches
from worker.training.objective import HeadObjective
from worker.training.store import TrainingSample, read_tensors, write_tensors
from worker.training.twin import HeadTwin

_BETAS, _WEIGHT_DECAY, _LARGEST_GRADIENT = (0.9, 0.95), 0.1, 1.0
_NORM_RATE = 1e-3
_FINAL_SHARE = 0.05
# Names in a checkpoint: the step, a parameter, and "parameter of moment".
_STEP, _OF = "step", "::"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps and learning rate. `batch_tokens` are the padded tokens of a step; the learning rate
    (Muon's) rises over `warmup_steps` and falls along a cosine until `steps`.
    """

    steps: int
    batch_tokens: int = 2048
    learning_rate: float = 0.006
    warmup_steps: int = 15
    checkpoint_steps: int = 25
    seed: int = 0

    def share(self, step: int, time_used: float = 0.0) -> float:
        """Return the learning rate of `step` (from 0) as a share of the highest. `time_used` is the
        share of the time limit: the rate falls with whichever of the two is further along.
        """
        rising = min(1.0, (step + 1) / self.warmup_steps)
        done = min(1.0, max(step / self.steps, time_used))
        falling = 0.5 * (1 + math.cos(math.pi * done))
        return rising * (_FINAL_SHARE + (1 - _FINAL_SHARE) * falling)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The progress of a training: `loss` is that of the last step."""

    step: int
    steps: int
    loss: float


class Trainer:
    """Trains one head on one set of samples; sole owner of the optimizers.

    `checkpoint` is the file of its state. With `autocast` products run in bfloat16.
    """

    def __init__(
        self, twin: HeadTwin, objective: HeadObjective, schedule: Schedule, checkpoint: Path
    ) -> None:
        self._twin = twin
        self._objective = objective
        self._schedule = schedule
        self._checkpoint = checkpoint
        self._optimizers = _optimizers(twin)
        self._rates = (schedule.learning_rate, _NORM_RATE)
        self.step = 0

    def resume(self) -> bool:
        """Resume from the checkpoint if it exists. Raises `ModelError` if it is another head's."""
        if not self._checkpoint.exists():
            return False
        stored = read_tensors(self._checkpoint)
        step = stored.pop(_STEP, None)
        parameters = dict(self._twin.named_parameters())
        found = {name: tuple(stored[name].shape) for name in stored.keys() & parameters.keys()}
        if step is None or found != {name: tuple(p.shape) for name, p in parameters.items()}:
            raise ModelError(f"{self._checkpoint}: of another head; remove it to begin anew")
        self.step = int(step)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(stored.pop(name))
        for key, tensor in stored.items():
            name, _, moment = key.partition(_OF)
            parameter = parameters[name]
            where = torch.device("cpu") if moment == "step" else parameter.device
            self._optimizer_of(parameter).state[parameter][moment] = tensor.to(where)
        return True

    def save(self) -> None:
        tensors: dict[str, Tensor] = {_STEP: torch.tensor(self.step)}
        for name, parameter in self._twin.named_parameters():
            tensors[name] = parameter.detach()
            for moment, tensor in self._optimizer_of(parameter).state[parameter].items():
                tensors[f"{name}{_OF}{moment}"] = tensor
        write_tensors(self._checkpoint, tensors)

    def _optimizer_of(self, parameter: Tensor) -> torch.optim.Optimizer:
        """Return the parameter's optimizer: the first for matrices, the second for norms."""
        return self._optimizers[0 if parameter.dim() > 1 else 1]

    def run(
        self,
        samples: Sequence[TrainingSample],
        autocast: bool,
        report: Callable[[StepReport], float],
    ) -> None:
        """Learn from `samples` to the end of the schedule, and save the state in any case.

        `report` is called after each step and returns the used share of the time limit: 1 ends the
        run.
        """
        schedule, time_used = self._schedule, 0.0
        for batch in self._batches(samples):
            if self.step >= schedule.steps:
                break
            loss = self._learn(batch, autocast, schedule.share(self.step, time_used))
            self.step += 1
            time_used = report(StepReport(self.step, schedule.steps, loss))
            if self.step % schedule.checkpoint_steps == 0:
                self.save()
            if time_used >= 1:
                break
        self.save()

    def _batches(self, samples: Sequence[TrainingSample]) -> Iterator[TrainingBatch]:
        number, epoch = 0, 0
        while True:
            rng = random.Random(f"{self._schedule.seed}/batches/{epoch}")
            for batch in batches(samples, self._schedule.batch_tokens, rng, self.step - number):
                if batch is not None:
                    yield batch
                number += 1
            epoch += 1

    def _learn(self, batch: TrainingBatch, autocast: bool, share: float) -> float:
        device = self._twin.get_parameter("fuse").device
        batch = batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = self._objective.loss(self._twin, batch)
        self._twin.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._twin.parameters(), _LARGEST_GRADIENT)
        for optimizer, highest in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = highest * share
            optimizer.step()
        return loss.item()


def _optimizers(twin: HeadTwin) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [p for p in twin.parameters() if p.dim() > 1]
    norms = [p for p in twin.parameters() if p.dim() == 1]
    return (
        torch.optim.Muon(matrices, weight_decay=_WEIGHT_DECAY),
        torch.optim.AdamW(norms, betas=_BETAS, weight_decay=0.0, foreach=False),
    )
