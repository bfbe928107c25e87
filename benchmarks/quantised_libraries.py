"""What multiplies float32 rows by GGUF blocks on a CPU: libraries, and our kernel twice.

Each engine is built from the weights of one decode step and multiplies all of them in a call. An
engine whose library is absent raises ImportError or OSError while it is built.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import quantised_kernels

BLOCK = 32
Array = npt.NDArray[Any]
Inputs = dict[int, Array]
# The rows by number of columns → products, one for each matrix, and some engines' own buffers.
Step = Callable[[Inputs], list[Array]]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [n, k] in blocks: quants of 0..15 with minima (Q4_1), or signed bytes (Q8_0)."""

    quants: Array
    scales: Array
    minima: Array | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.quants.shape[0], self.quants.shape[1]

    @property
    def num_bytes(self) -> int:
        """As a GGUF file stores it."""
        per_block = 34 if self.minima is None else 20
        return self.quants.size // BLOCK * per_block

    def dense(self) -> Array:
        """The weights in float32, which holds them exactly but for the rounding of q * d + m."""
        weights = self.quants.astype(np.float32) * np.repeat(self.scales.astype(np.float32), 32, 1)
        if self.minima is not None:
            weights += np.repeat(self.minima.astype(np.float32), 32, 1)
        return weights

    def four_bits(self) -> tuple[Array, Array, Array]:
        """Quants, scales and minima of 4 bits, by rounding where there are 8."""
        if self.minima is not None:
            return self.quants, self.scales.astype(np.float32), self.minima.astype(np.float32)
        scales = self.scales.astype(np.float32) * 17
        quants = np.clip(np.rint(self.quants / 17.0) + 8, 0, 15).astype(np.uint8)
        return quants, scales, -8 * scales


def nibbles(quants: Array) -> Array:
    """Neighbours to a byte, the earlier one low: [n, k] → [n, k / 2]."""
    packed: Array = quants[:, 0::2] | (quants[:, 1::2] << 4)
    return packed


def onednn_float32(matrices: list[Blocks], threads: int) -> Step:
    """What the worker does by default: the weights decoded to float32."""
    import torch

    from worker.ops.linear import make_linear

    torch.set_num_threads(threads)
    linears = [make_linear(torch.from_numpy(matrix.dense())) for matrix in matrices]
    columns = [matrix.shape[1] for matrix in matrices]

    def step(inputs: Inputs) -> list[Array]:
        rows = {k: torch.from_numpy(x) for k, x in inputs.items()}
        with torch.inference_mode():
            return [f(rows[k]).numpy() for f, k in zip(linears, columns, strict=True)]

    return step


def torch_int4(matrices: list[Blocks], threads: int) -> Step:
    """aten's product with 4-bit weights in groups of 32. torchao's layout for CPUs calls it, too;
    its kernels for 8-bit activations are in no wheel for a CPU (0.18).
    """
    import torch

    torch.set_num_threads(threads)
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    packed = []
    for matrix in matrices:
        quants, scales, minima = matrix.four_bits()
        factors = np.stack([scales.T, (minima + 8 * scales).T], axis=-1)
        weight = pack(torch.from_numpy(quants.astype(np.int32)), 1)
        packed.append((weight, torch.from_numpy(np.ascontiguousarray(factors)), matrix.shape[1]))

    def step(inputs: Inputs) -> list[Array]:
        rows = {k: torch.from_numpy(x) for k, x in inputs.items()}
        with torch.inference_mode():
            return [product(rows[k], w, BLOCK, f).numpy() for w, f, k in packed]

    return step


def _onnx_model(matrices: list[Blocks], accuracy: int, *, float_zeros: bool) -> bytes:
    """One graph of all products: an input for each number of columns, an output for each matrix."""
    from onnx import TensorProto, helper, numpy_helper

    nodes, constants, outputs = [], [], []
    for index, matrix in enumerate(matrices):
        rows, columns = matrix.shape
        bits = 8 if matrix.minima is None else 4
        parts = {"w": matrix.quants, "s": matrix.scales.astype(np.float32)}
        if matrix.minima is None:
            parts["w"] = (matrix.quants.astype(np.int16) + 128).astype(np.uint8)
        else:
            parts["w"] = nibbles(matrix.quants)
            parts["z"] = -matrix.minima.astype(np.float32) / parts["s"]
            if not float_zeros:
                parts["z"] = nibbles(np.clip(np.rint(parts["z"]), 0, 15).astype(np.uint8))
        parts["w"] = parts["w"].reshape(rows, columns // BLOCK, -1)
        for name, values in parts.items():
            constants.append(numpy_helper.from_array(values, f"{name}{index}"))
        settings: dict[str, Any] = {"K": columns, "N": rows, "bits": bits, "block_size": BLOCK}
        names = [f"x{columns}", *(f"{name}{index}" for name in parts)]
        nodes.append(
            helper.make_node(
                "MatMulNBits",
                names,
                [f"y{index}"],
                domain="com.microsoft",
                accuracy_level=accuracy,
                **settings,
            )
        )
        outputs.append(helper.make_tensor_value_info(f"y{index}", TensorProto.FLOAT, ["m", rows]))
    inputs = [
        helper.make_tensor_value_info(f"x{columns}", TensorProto.FLOAT, ["m", columns])
        for columns in sorted({matrix.shape[1] for matrix in matrices})
    ]
    graph = helper.make_graph(nodes, "step", inputs, outputs, constants)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    return bytes(model.SerializeToString())


def onnxruntime(accuracy: int, *, float_zeros: bool) -> Callable[[list[Blocks], int], Step]:
    """MatMulNBits; accuracy level 4 rounds activations to 8 bits, 0 and 1 are float32."""

    def build(matrices: list[Blocks], threads: int) -> Step:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        model = _onnx_model(matrices, accuracy, float_zeros=float_zeros)
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        bindings: dict[int, tuple[Any, list[Array]]] = {}

        def bind(inputs: Inputs, m: int) -> tuple[Any, list[Array]]:
            binding = session.io_binding()
            for k, x in inputs.items():
                binding.bind_cpu_input(f"x{k}", x)
            outputs = [np.empty((m, matrix.shape[0]), np.float32) for matrix in matrices]
            for i, y in enumerate(outputs):
                arguments = ("cpu", 0, np.float32, y.shape, y.ctypes.data)
                binding.bind_output(f"y{i}", *arguments)
            return binding, outputs

        def step(inputs: Inputs) -> list[Array]:
            [m] = {len(x) for x in inputs.values()}
            if m not in bindings:
                bindings[m] = bind(inputs, m)
            binding, outputs = bindings[m]
            session.run_with_iobinding(binding)
            return outputs

        return step

    return build


def openvino(matrices: list[Blocks], threads: int) -> Step:
    """4- and 8-bit constants that OpenVINO decodes in its product."""
    import openvino as ov
    from openvino import opset13 as op

    inputs = {
        k: op.parameter([-1, k], np.float32, name=f"x{k}")
        for k in sorted({matrix.shape[1] for matrix in matrices})
    }
    products = []
    shared = []  # Constants of 4 bits lie in these as long as the model is used.
    for matrix in matrices:
        rows, columns = matrix.shape
        shape = [rows, columns // BLOCK, BLOCK]
        if matrix.minima is None:
            weight = op.constant(matrix.quants.reshape(shape))
        else:
            shared.append(nibbles(matrix.quants))
            weight = op.constant(ov.Tensor(shared[-1], shape, ov.Type.u4))
        values = op.convert(weight, np.float32)
        scales = matrix.scales.astype(np.float32)[:, :, None]
        if matrix.minima is not None:
            zeros = -matrix.minima.astype(np.float32)[:, :, None] / scales
            values = op.subtract(values, op.constant(zeros))
        values = op.multiply(values, op.constant(scales))
        values = op.reshape(values, op.constant(np.array([rows, columns])), False)
        products.append(op.matmul(inputs[columns], values, False, True))
    model = ov.Model(products, list(inputs.values()), "step")
    settings: dict[str, str | int] = {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    settings |= {"INFERENCE_NUM_THREADS": threads, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()

    def step(_alive: list[Array], rows: Inputs) -> list[Array]:
        request.infer([rows[k] for k in inputs], share_inputs=True)
        return [request.get_output_tensor(i).data for i in range(len(products))]

    return partial(step, shared)


def own_kernel(compiler: str) -> Callable[[list[Blocks], int], Step]:
    """Our loops, by `numba` or `g++`."""

    def build(matrices: list[Blocks], threads: int) -> Step:
        makers = {"numba": quantised_kernels.numba_kernels, "g++": quantised_kernels.cpp_kernels}
        kernels = makers[compiler](threads)
        words = []
        for matrix in matrices:
            if matrix.minima is None:
                words.append(quantised_kernels.pack_q8_0(matrix.quants, matrix.scales))
            else:
                parts = (matrix.quants, matrix.scales, matrix.minima)
                words.append(quantised_kernels.pack_q4_1(*parts))
        runs = [kernels["q8_0" if matrix.minima is None else "q4_1"] for matrix in matrices]
        buffers: dict[int, list[Array]] = {}

        def step(inputs: Inputs) -> list[Array]:
            sums = {k: x.reshape(len(x), -1, BLOCK).sum(-1) for k, x in inputs.items()}
            [m] = {len(x) for x in inputs.values()}
            if m not in buffers:
                shapes = [(m, matrix.shape[0]) for matrix in matrices]
                buffers[m] = [np.empty(shape, np.float32) for shape in shapes]
            for run, weight, matrix, y in zip(runs, words, matrices, buffers[m], strict=True):
                k = matrix.shape[1]
                run(weight, inputs[k], sums[k], y)
            return buffers[m]

        return step

    return build


@dataclass(frozen=True, slots=True)
class Engine:
    """A way to multiply, the packages it installs, and how it departs from exact blocks."""

    name: str
    build: Callable[[list[Blocks], int], Step]
    packages: tuple[str, ...]
    arithmetic: str

    def megabytes(self) -> int:
        """Size of the packages as installed."""
        total = 0
        for package in self.packages:
            for file in importlib.metadata.files(package) or ():
                path = file.locate()
                total += path.stat().st_size if path.is_file() else 0  # type: ignore[attr-defined]
        return round(total / 1e6)


ORT = ("onnxruntime",)
ENGINES = (
    Engine("oneDNN float32 (default)", onednn_float32, (), "weights decoded to float32"),
    Engine("g++, our loops", own_kernel("g++"), (), "exact"),
    Engine("numba, our loops", own_kernel("numba"), ("numba", "llvmlite"), "exact"),
    Engine("onnxruntime level 0", onnxruntime(0, float_zeros=True), ORT, "float32 zero points"),
    Engine("onnxruntime level 1", onnxruntime(1, float_zeros=False), ORT, "minima rounded"),
    Engine("onnxruntime level 4", onnxruntime(4, float_zeros=False), ORT, "minima rounded, int8 x"),
    Engine("openvino", openvino, ("openvino",), "float32 zero points"),
    Engine("torch int4", torch_int4, (), "head in 4 bits"),
)
