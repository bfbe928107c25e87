"""A head learns to predict its target, and an interrupted training ends with the same weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from worker.errors import ModelError
from worker.models.draft_head import HeadShape
from worker.models.llama import LlamaModel
from worker.training.dataset import batches, collate
from worker.training.objective import DraftAcceptance, HeadObjective, local_ids, measure
from worker.training.store import TrainingSample
from worker.training.trainer import Schedule, Trainer
from worker.training.twin import HeadTwin, fit_linear, teacher_of

MakeSamples = Callable[[int, int], list[TrainingSample]]
VOCAB = torch.arange(61)


def new_twin(target: LlamaModel, vocab: Tensor = VOCAB, inner: int = 48) -> HeadTwin:
    shape = HeadShape(inner, len(vocab))
    return HeadTwin(shape, teacher_of(target, vocab), torch.Generator().manual_seed(0))


def objective(vocab: Tensor = VOCAB, passes: int = 3) -> HeadObjective:
    return HeadObjective(passes, local_ids(vocab, 61))


def acceptance(
    twin: HeadTwin, target: LlamaModel, samples: list[TrainingSample]
) -> DraftAcceptance:
    found = (b for b in batches(samples, 256, None) if b is not None)
    return measure(twin, target.head.rows(torch.arange(61)), VOCAB, found, 3)


def test_a_toy_target_is_learned_by_heart(
    target: LlamaModel, greedy_samples: MakeSamples, tmp_path: Path
) -> None:
    samples = greedy_samples(4, 20)
    twin = new_twin(target)
    before = acceptance(twin, target, samples)
    schedule = Schedule(steps=50, batch_tokens=256, learning_rate=0.03)
    losses: list[float] = []
    trainer = Trainer(twin, objective(), schedule, tmp_path / "checkpoint.safetensors")
    trainer.run(samples, False, lambda state: losses.append(state.loss) or 0.0)
    after = acceptance(twin, target, samples)
    assert losses[-1] < losses[0] / 3
    assert after.starts == before.starts > 30
    assert before.conditional[0] < 0.5
    assert min(after.conditional) > 0.9
    assert after.expected_tokens(3) > 3.5


def test_an_interrupted_training_ends_bit_for_bit_the_same(
    target: LlamaModel, greedy_samples: MakeSamples, tmp_path: Path
) -> None:
    samples = greedy_samples(6, 14)
    schedule = Schedule(steps=12, batch_tokens=40, checkpoint_steps=4, warmup_steps=3)

    def train(name: str, last_step: int | None) -> dict[str, Tensor]:
        twin = new_twin(target)
        trainer = Trainer(twin, objective(passes=2), schedule, tmp_path / name)
        trainer.resume()
        trainer.run(samples, False, lambda state: float(state.step == last_step))
        return twin.weights()

    class KilledError(Exception): ...

    def killed(name: str, last_step: int) -> None:
        trainer = Trainer(new_twin(target), objective(passes=2), schedule, tmp_path / name)
        trainer.resume()

        def report(state: object) -> float:
            if trainer.step == last_step:
                raise KilledError
            return 0.0

        with pytest.raises(KilledError):
            trainer.run(samples, False, report)

    whole = train("whole", None)
    train("parts", 3)
    killed("parts", 6)
    killed("parts", 11)
    parts = train("parts", None)
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    assert not torch.equal(whole["fuse"], new_twin(target).weights()["fuse"])


def test_a_checkpoint_of_another_head_is_refused(
    target: LlamaModel, greedy_samples: MakeSamples, tmp_path: Path
) -> None:
    path, schedule = tmp_path / "checkpoint.safetensors", Schedule(steps=1, batch_tokens=64)
    Trainer(new_twin(target), objective(), schedule, path).run(
        greedy_samples(2, 10), False, lambda state: 0.0
    )
    with pytest.raises(ModelError, match="of another head; remove it"):
        Trainer(new_twin(target, inner=40), objective(), schedule, path).resume()


def test_the_rate_rises_and_falls_with_steps_or_time() -> None:
    schedule = Schedule(steps=100, warmup_steps=10)
    shares = [schedule.share(step) for step in range(101)]
    assert shares[0] == pytest.approx(0.1)
    assert shares.index(max(shares)) == 9
    assert shares[9:] == sorted(shares[9:], reverse=True)
    assert shares[100] == pytest.approx(0.05)
    assert schedule.share(50, 0.2) == shares[50]
    assert schedule.share(20, 0.5) == shares[50]


def test_the_loss_is_the_cross_entropy_of_each_pass(
    target: LlamaModel, greedy_samples: MakeSamples
) -> None:
    """Value and gradient equal the written-out formula; tokens that the head cannot say are left
    out.
    """
    vocab = torch.arange(0, 61, 2)
    batch = collate(greedy_samples(3, 12))
    twin = new_twin(target, vocab)
    twin.get_parameter("down").data.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    loss = objective(vocab, 2).loss(twin, batch)
    loss.backward()
    got = twin.get_parameter("fuse").grad
    sayable = [row for row, said in enumerate(batch.said_ids.tolist()) if said % 2 == 0]
    assert 0 < len(sayable) < len(batch.rows)
    shares = target.logits(batch.expected)[:, vocab].softmax(-1)
    terms = []
    for hidden in twin.passes(batch.features, batch.next_ids, 2):
        scores = twin.logits(hidden.flatten(0, 1)[batch.rows]).log_softmax(-1)
        terms.append(-torch.stack([(shares[r] * scores[r]).sum() for r in sayable]).mean())
    wanted = (terms[0] + 0.8 * terms[1]) / 1.8
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    twin.zero_grad()
    wanted.backward()
    torch.testing.assert_close(got, twin.get_parameter("fuse").grad, rtol=1e-3, atol=1e-5)


def test_acceptance_equals_that_of_a_drafting_loop(
    target: LlamaModel, greedy_samples: MakeSamples
) -> None:
    """It starts at every position where the text continues greedily."""
    samples = greedy_samples(2, 13)
    twin = new_twin(target)
    fit_linear(twin, [collate(samples)])
    counted = acceptance(twin, target, samples)
    starts, held = 0, [0, 0, 0]
    for sample in samples:
        inputs = sample.features[None, :-1], sample.token_ids[None, 1:-1]
        drafts = [twin.logits(p)[0].argmax(-1) for p in twin.passes(*inputs, 3)]
        for row in range(2, 13 - 2 - 2):
            starts += 1
            for number in range(3):
                if drafts[number][row + number] != sample.token_ids[row + number + 2]:
                    break
                held[number] += 1
    assert (counted.starts, list(counted.held)) == (starts, held)
    assert sum(held) > 0


def test_conditional_acceptance_and_tokens_follow_from_the_counts() -> None:
    some = DraftAcceptance(100, (50, 30, 0, 0))
    assert some.conditional == (0.5, 0.6, 0.0, 0.0)
    assert some.expected_tokens(1) == 1.5
    assert some.expected_tokens(4) == pytest.approx(1.8)
    assert DraftAcceptance(0, (0,)).expected_tokens(1) == 1.0


def test_a_batch_outside_the_draft_vocabulary_has_a_loss(
    target: LlamaModel, greedy_samples: MakeSamples
) -> None:
    batch = collate(greedy_samples(1, 8))
    others = torch.tensor(sorted(set(range(61)) - set(batch.said_ids.tolist())))
    loss = objective(others, 1).loss(new_twin(target, others), batch)
    assert bool(loss.isfinite())
