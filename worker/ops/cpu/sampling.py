"""Draws by the native kernel `sample.cpp`."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.ops.cpu.native import CpuKernels
from worker.ops.noise import Stream


class NativeDraws:
    """Implements `DrawKernel` with the threads of `kernels`, a row at a time."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def __call__(
        self,
        logits: Tensor,
        adjusted: Tensor | None,
        draws: npt.NDArray[np.void],
        stream: Stream,
    ) -> Tensor:
        """Draw by a table of `DRAWS`; tensors are contiguous and on the CPU."""
        ids = stream.token_ids
        self._kernels.library.pointsman_sample(
            self._kernels.engine,
            *(draws.ctypes.data, len(draws)),
            logits.data_ptr(),
            None if adjusted is None else adjusted.data_ptr(),
            logits.shape[1],
            None if ids is None else ids.data_ptr(),
            *(int(stream.purpose), stream.offset),
        )
        return torch.from_numpy(np.stack((draws["token"], draws["state"])))
