"""Steps of any kind in pieces: all but attention is replayed from graphs.

A step with a part of a prompt has no graph: the launches of its attention depend on the rows and
contexts of its sequences. Everything else depends on the number of rows alone. So the model is cut
at the attention of each layer. For each of a few numbers of rows there are as many graphs as layers
and one more: from the tokens to the first layer's queries and its writes to the cache; from what a
layer attended to, to the next layer's queries and writes; and to the states that leave the last
layer. Attention is launched between them, for the real rows.

A step is padded to the next number of rows. Padded rows are token 0 at position 0 and write to the
cache's last block. Their attention is that of earlier steps, which changes no other row.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from worker.models import llama
from worker.models.llama import LlamaModel
from worker.ops.step import StepTensors

# Up to 256 rows a model takes about as long as for one; beyond, padding is a fifth at most.
_SIZES = (32, 64, 128, 256, 320, 384, 448, 512)

Replay = Callable[[], None]
Capture = Callable[[Replay, Tensor], Replay]


def piece_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Return the numbers of rows that are captured, for steps of at most `max_num_tokens`."""
    return (*(n for n in _SIZES if n < max_num_tokens), min(max_num_tokens, _SIZES[-1]))


class StepPieces:
    """Captured pieces of steps of `sizes` rows, in ascending order; empty until `capture`.

    `capture_one` is that of a `GraphDevice`.
    """

    def __init__(self, capture_one: Capture, sizes: Sequence[int]) -> None:
        self._capture_one = capture_one
        self._sizes = sizes
        self._captured: _Captured | None = None

    def capture(self, model: LlamaModel, cache: Tensor, layers: Sequence[int]) -> None:
        """Capture all pieces, the largest first, so that the others fit into its memory; `layers`
        are those of `states_and_inputs`. The cache's last block must belong to no sequence.
        """
        self._captured = None
        if self._sizes:
            captured = _Captured(model, cache, layers, self._sizes[-1])
            for size in reversed(self._sizes):
                captured.capture(self._capture_one, size)
            self._captured = captured

    def drop(self) -> None:
        """Release all captures: the model or the cache is about to be replaced."""
        self._captured = None

    def states_and_inputs(self, step: StepTensors) -> tuple[Tensor, list[Tensor]] | None:
        """Run a step as the model's `states_and_inputs` does; None if it has too many rows, or
        adapters. The next step overwrites what is returned.
        """
        place = bisect_left(self._sizes, len(step.token_ids))
        if self._captured is None or step.adapters is not None or place == len(self._sizes):
            return None
        return self._captured.replay(self._sizes[place], step)


class _Captured:
    """The pieces of a model with its cache, and the tensors that they read and write."""

    def __init__(
        self, model: LlamaModel, cache: Tensor, layers: Sequence[int], most_rows: int
    ) -> None:
        config = model.config
        self._model, self._caches, self._layers = model, cache.unbind(0), layers
        self._shape = llama.attention_shape(config, cache)
        self._pieces: dict[int, list[Replay]] = {}
        scratch = (cache.shape[1] - 1) * self._shape.block_size
        # Tokens, positions and slots.
        self._padding = torch.tensor([[0], [0], [scratch]], dtype=torch.int32, device=model.device)
        self._rows = self._padding.repeat(1, most_rows)
        zeros = partial(torch.zeros, dtype=model.dtype, device=model.device)
        attended = config.num_heads * config.head_dim
        self._queries, self._attended = zeros(most_rows, attended), zeros(most_rows, attended)
        self._state = zeros(most_rows, config.hidden_size)
        self._stored = {n: torch.zeros_like(self._state) for n in {*layers, config.num_layers}}

    def capture(self, capture_one: Capture, size: int) -> None:
        # The first replay is later, so a capture runs padded rows.
        count = self._model.config.num_layers
        self._pieces[size] = [
            capture_one(
                partial(self._run, size, layer),
                self._queries[:size] if layer < count else self._stored[count][:size],
            )
            for layer in range(count + 1)
        ]

    def _run(self, size: int, layer: int) -> None:
        """Run from the attention of the layer before to that of `layer`."""
        model, state = self._model, self._state[:size]
        config, backend = model.config, model.backend
        tokens, positions, slots = self._rows[:, :size].unbind(0)
        if layer == 0:
            x = model.embedded(tokens)
        else:
            before = model.layers[layer - 1]
            x = llama.after_attention(state, self._attended[:size], before, config, backend)
            x = llama.mlp_block(x, before, config, backend)
        if layer in self._stored:
            self._stored[layer][:size].copy_(x)
        if layer == config.num_layers:
            return
        own = model.layers[layer]
        rope = model.rope if own.window is None else model.local_rope or model.rope
        none = tokens[:0]  # a piece attends to nothing, so its step has no sequences
        step = StepTensors(*(tokens, positions, slots), *(none, none, self._rows[:0], none), 0, 0)
        attention = backend.plan(step, self._shape, rope)
        queries = llama.before_attention(x, own, config, self._caches[layer], attention, backend)
        self._queries[:size].copy_(queries.flatten(1))
        state.copy_(x)

    def replay(self, size: int, step: StepTensors) -> tuple[Tensor, list[Tensor]]:
        model, count = self._model, step.token_ids.shape[0]
        own = (step.token_ids, step.positions, step.slots)
        torch.stack(own, out=self._rows[:, :count])
        self._rows[:, count:size] = self._padding
        attention = model.backend.plan(step, self._shape, model.rope)
        queries = self._queries[:count].view(count, -1, self._shape.head_dim)
        attended = self._attended[:count]
        *pieces, last = self._pieces[size]
        for piece, layer, cache in zip(pieces, model.layers, self._caches, strict=True):
            piece()
            attended.copy_(llama.attend(queries, layer, cache, attention))
        last()
        states = {layer: stored[:count] for layer, stored in self._stored.items()}
        return states[len(pieces)], [states[layer] for layer in self._layers]
