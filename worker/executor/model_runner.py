"""The executor that runs a real model: plain ints in, sampled tokens out.

Weights move to the host and back in place: the tensors stay the same objects, so that code which
holds one (a tied head, a fused layer) need not know.
"""

import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

# Set before torch loads OpenMP, which reads it once: threads that spin while they wait stall each
# other for hundreds of milliseconds a step when any other load runs on their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# oneDNN keeps a compiled product for every number of rows it has seen, by default for a thousand
# shapes and over a megabyte each; steps have any number of rows. A few dozen serve a steady batch.
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

import torch
from torch import Tensor

from worker.config import KvTransferConfig
from worker.errors import DeviceMemoryError
from worker.executor import kv_cache
from worker.executor.adapters import DeviceAdapters
from worker.executor.answers import PendingAnswers, Verification
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.drafting.interface import draft_requests
from worker.executor.graphs import DecodeGraphs
from worker.executor.interface import Finished, Ticket, with_history, with_tokens
from worker.executor.memory import give_back
from worker.executor.state import DeviceState
from worker.executor.step_batch import StepBatch
from worker.models.llama import LlamaModel
from worker.ops.cpu.native import NativeDraws
from worker.ops.rejection import STANDARD
from worker.ops.sample import TORCH_SAMPLER, Sampler, draw_rows
from worker.types import Adapter, ModelOutput, ScheduledSequence, SchedulerOutput


class ModelRunner:
    """Owns the model, the KV cache and the device's state; implements `Executor`.

    `load` loads the model again after it was dropped; `allocate_cache` returns a cache of zeros.
    Drawn drafts are verified by `rejection_method`.
    `graphs` need one more block in the cache, and in that of the drafter.
    """

    def __init__(
        self,
        model: LlamaModel,
        load: Callable[[], LlamaModel],
        allocate_cache: Callable[[], Tensor],
        drafter: CachedDrafter | None = None,
        rejection_method: str = STANDARD,
        graphs: DecodeGraphs | None = None,
        adapters: DeviceAdapters | None = None,
    ) -> None:
        self._load = load
        self._allocate_cache = allocate_cache
        self._model: LlamaModel | None = model
        self._offloaded: OffloadedWeights | None = None
        self._drafter = drafter
        self._rejection_method = rejection_method
        self._sampler = _sampler(model)
        with torch.inference_mode():
            self._cache: Tensor | None = allocate_cache()
        self._saver = kv_cache.BlockSaver()
        self._adapters = adapters
        self._graphs = graphs
        self.device = model.device
        room, most_drafts = (None, 0) if graphs is None else (graphs.room, graphs.most_drafts)
        self._state = DeviceState(self._cache.shape[4], model.device, room, most_drafts)
        self._deferred: deque[_Deferred] = deque()
        self.last_output = ModelOutput({})
        self._is_shut_down = False
        self._capture()

    def submit(self, step: SchedulerOutput) -> Ticket:
        """Launch all of a step except its drafting. A step that follows one whose drafts were not
        made by a graph is launched when that has been collected, and so are those behind it.
        """
        graphs = self._graphs
        must_defer = step.follows and (graphs is None or not graphs.can_follow(step.sequences))
        if self._deferred or must_defer:
            self._deferred.append(_Deferred(self, step))
            return self._deferred[-1]
        return self._submit(step)

    @property
    def drafts_in_graphs(self) -> bool:
        drafts = None if self._drafter is None else self._drafter.captured()
        return self._graphs is not None and drafts is not None

    def collect_deferred(self) -> ModelOutput:
        """Run the oldest deferred step, now that the one before it has been collected. Steps that
        follow would be deferred as well until the engine waits once.
        """
        try:
            step = with_tokens(self._deferred[0].step, self.last_output)
            return dataclasses.replace(self._submit(step).collect(), may_be_followed=False)
        finally:
            self._deferred.popleft()

    @torch.inference_mode()
    def _submit(self, step: SchedulerOutput) -> Ticket:
        model, cache = self._awake()
        # First: copies and loads may overwrite the evicted blocks that are saved.
        self._saver.save(cache, step.kv_saves, model.native is not None)
        if step.block_copies:
            kv_cache.copy_blocks(cache, step.block_copies)
            if self._drafter is not None:
                self._drafter.copy_blocks(step.block_copies)
        for load in step.kv_loads:
            kv_cache.write_tokens(cache, load, model.native is not None)
            if self._drafter is not None:
                self._drafter.load(load)
        if self._adapters is not None:
            self._adapters.put(step.adapters)
        if not step.sequences:
            return Finished(ModelOutput({}))
        try:
            return self._launch(step, model, cache)
        except torch.OutOfMemoryError as error:
            reason = str(error)
        # The exception is released here, and with it the step's tensors.
        self._state.forget()
        give_back(model.device)
        raise DeviceMemoryError(reason)

    def _launch(self, step: SchedulerOutput, model: LlamaModel, cache: Tensor) -> Ticket:
        drafter = self._drafter
        verification = None
        if drafter is not None:
            proposals = drafter.proposals(step.sequences)
            verification = Verification(proposals, self._rejection_method)
        if self._graphs is not None:
            shared = (self._sampler, self._with_history, verification)
            replayed = self._graphs.submit(step.sequences, *shared)
            if replayed is not None:
                ticket, has_drafted = replayed
                left = None if has_drafted else drafter
                return _ModelTicket(step, ticket, left, self)
        sequences = [self._with_history(sequence) for sequence in step.sequences]
        adapted = None if self._adapters is None else self._adapters.plan(sequences)
        batch = StepBatch(sequences, self._state, adapters=adapted)
        step_in_pieces = None
        if self._graphs is not None:
            step_in_pieces = self._graphs.pieces.states_and_inputs(batch.tensors)
        layers = () if drafter is None else drafter.layers
        states, inputs = step_in_pieces or model.states_and_inputs(batch.tensors, cache, layers)
        if drafter is not None:
            drafter.record(batch, states, inputs)
        hidden = states.index_select(0, batch.tensors.sample_rows)
        answers = PendingAnswers(
            batch, hidden, model.logits, verification, self._sampler, normed=model.normed
        )
        answers.store(self._state)
        return _ModelTicket(step, answers, drafter, self)

    @property
    def kv_shape(self) -> tuple[str, int, int, int]:
        _, cache = self._awake()
        layers, _, _, heads, _, dim = cache.shape
        return str(cache.dtype).removeprefix("torch."), layers, heads, dim

    @property
    def kv_facts(self) -> tuple[object, ...]:
        model, cache = self._awake()
        # The cosines of position 1 show every difference in the rotation.
        facts = str(model.dtype), model.rope.cos[1:2].float().cpu().numpy().tobytes()
        scales = [layer.kv_scales for layer in model.layers if layer.kv_scales is not None]
        if cache.itemsize > 1 or not scales:
            return facts
        # Of one head, which all numbers of ranks have alike if the scales are those of layers.
        return *facts, torch.stack([own[:, 0] for own in scales]).cpu().numpy().tobytes()

    @torch.inference_mode()
    def read_kv(self, blocks: Sequence[int], num_tokens: int, into: Tensor | None = None) -> Any:
        model, cache = self._awake()
        try:
            return kv_cache.read_tokens(cache, blocks, num_tokens, model.native is not None, into)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(str(error)) from None

    def kv_pool(self, transfer: KvTransferConfig) -> kv_cache.KvPool | None:
        return kv_cache.open_pool(transfer, self._awake()[1], self.read_kv)

    def host_memory(self, num_bytes: int) -> memoryview:
        model, _ = self._awake()
        return kv_cache.host_memory(num_bytes, model.device)

    def read_adapter(self, adapter: Adapter) -> Future[Any]:
        if self._adapters is None:
            raise RuntimeError("the executor was built without adapters")
        return self._adapters.read(adapter)

    def _with_history(self, sequence: ScheduledSequence) -> ScheduledSequence:
        """Add the pending token to the history of draws that depend on it; waits for that token."""
        if not sequence.takes_pending or not any(s.params.needs_history for s in sequence.samples):
            return sequence
        return with_history(sequence, self._state.last_token(sequence.seq_id))

    @torch.inference_mode()
    def _capture(self) -> None:
        if self._graphs is not None:
            self._graphs.capture(*self._awake(), self._state, self._drafter)

    def _awake(self) -> tuple[LlamaModel, Tensor]:
        if self._is_shut_down:
            raise RuntimeError("the executor is shut down")
        if self._model is None or self._offloaded is not None or self._cache is None:
            raise RuntimeError("the executor sleeps: wake it before a step")
        return self._model, self._cache

    @torch.inference_mode()
    def sleep(self, level: int) -> None:
        """Free the KV cache at level 1, weights too at 2; at 1 a GPU's weights move to the host."""
        if level < 1:
            return
        self._cache = None
        if self._graphs is not None:
            # Graphs hold the addresses of the cache and the weights.
            self._graphs.drop()
        if self._drafter is not None:
            self._drafter.sleep(level)
        if level > 1:
            self._model = self._offloaded = None
        elif self._model is not None and self._model.device.type != "cpu":
            weights = (self._model, self._drafter and self._drafter.weights)
            self._offloaded = self._offloaded or OffloadedWeights(weights)

    @torch.inference_mode()
    def wake(self, tags: frozenset[str]) -> None:
        """Restore "weights" (read anew after level 2) and "kv_cache". Raises `ModelError`."""
        if self._is_shut_down:
            raise RuntimeError("the executor is shut down")
        if "weights" in tags:
            if self._offloaded is not None:
                self._offloaded.restore()
                self._offloaded = None
            self._model = self._model or self._load()
        if "kv_cache" in tags and self._cache is None:
            self._cache = self._allocate_cache()
        if self._drafter is not None:
            self._drafter.wake(tags, self._model)
        if self._cache is not None and self._model is not None and self._offloaded is None:
            self._capture()

    def shutdown(self) -> None:
        """Drop the weights and the cache. Idempotent."""
        self._is_shut_down = True
        if self._adapters is not None:
            self._adapters.shutdown()
        self._model = self._cache = self._offloaded = self._drafter = self._graphs = None


def _sampler(model: LlamaModel) -> Sampler:
    if model.kernels is not None:
        return Sampler(NativeDraws(model.kernels))
    if model.device.type == "cpu":
        return TORCH_SAMPLER
    return Sampler(partial(draw_rows, draw=model.backend.draw), model.backend.mask)


@dataclass(frozen=True, slots=True)
class _ModelTicket:
    step: SchedulerOutput
    answers: Ticket
    drafter: CachedDrafter | None
    runner: ModelRunner

    def collect(self) -> ModelOutput:
        self.runner.last_output = self._drafted()
        return self.runner.last_output

    @torch.inference_mode()
    def _drafted(self) -> ModelOutput:
        """Return the step's result, with the requested drafts. Both the draws and the drafts are
        waited for: the device is idle before and after drafting, so the clock measures all of it.
        """
        output = self._answered()
        requests = draft_requests(self.step.sequences, output) if self.drafter is not None else []
        if self.drafter is None or not requests:
            return output
        started = time.perf_counter()
        drafted = self.drafter.propose(requests, self.step.num_tokens)
        seconds = time.perf_counter() - started
        reading = min(drafted.catch_up_seconds, seconds)
        return dataclasses.replace(
            output,
            drafts=drafted.drafts,
            drafting_seconds=seconds - reading,
            catch_up_seconds=reading,
            may_be_followed=len(drafted.drafts) == len(requests) and self.runner.drafts_in_graphs,
        )

    def _answered(self) -> ModelOutput:
        try:
            return self.answers.collect()
        except torch.OutOfMemoryError as error:
            reason = str(error)
        give_back(self.runner.device)
        raise DeviceMemoryError(reason)


@dataclass(frozen=True, slots=True)
class _Deferred:
    runner: ModelRunner
    step: SchedulerOutput

    def collect(self) -> ModelOutput:
        return self.runner.collect_deferred()


class OffloadedWeights:
    """The weights of a model, held on the host while the device's memory is free."""

    def __init__(self, model: object) -> None:
        self._held: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        dense = (tensor for tensor in _tensors(model) if tensor.layout is torch.strided)
        storages = (tensor.untyped_storage() for tensor in dense)  # which tensors may share
        for storage in {storage.data_ptr(): storage for storage in storages}.values():
            held = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            held.copy_(storage)
            storage.resize_(0)
            self._held.append((storage, held))

    @property
    def num_bytes(self) -> int:
        """The number of bytes that were freed on the device."""
        return sum(held.nbytes() for _, held in self._held)

    def restore(self) -> None:
        """Give every tensor its memory and its values back. Call once."""
        for storage, held in self._held:
            storage.resize_(held.nbytes())
            storage.copy_(held)
        self._held.clear()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in dataclasses, sequences and plain objects, to any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif type(value).__module__.startswith("worker."):
        for item in vars(value).values():
            yield from _tensors(item)
