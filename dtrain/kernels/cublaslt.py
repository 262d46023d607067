"""GEMMs by cuBLASLt, with the fastest of the kernels that it proposes.

torch takes the first proposal. For a transformer's layers on an H200 the best of eight is 5 to 8% faster per GEMM
(docs/performance.md has whole steps). So each kind of GEMM (shapes, layout, dtypes) is timed once, after it has
occurred a few times. ctypes calls the library that torch has loaded, because torch has no function that takes an
algorithm.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dtrain.kernels import LARGE_PRODUCT

# Constants of cublasLt.h (CUDA 12 and 13)
COMPUTE_FLOAT32, SCALE_FLOAT32 = 68, 0
TYPES = {torch.float16: 2, torch.bfloat16: 14, torch.float32: 0}  # fp32 for outputs only: torch has TF32
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS = 3, 4, 7, 8  # attributes of a GEMM's description
ADD_BIAS = 4  # an epilogue
WORKSPACE, REDUCTIONS, ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # attributes of a preference
IN_PLACE, IN_FLOAT32 = 1, 2  # where partial results of split-K are added: in the output's dtype, or in fp32

LARGE = LARGE_PRODUCT  # tests use smaller ones
MEETINGS = 3  # occurrences before a kind is timed: if the number of rows varies, most kinds never occur again
MOST_KINDS = 512
PROPOSALS = 8
WORKSPACE_BYTES = 2**25
ROUNDS, CALLS = 5, 4  # a proposal's time is the shortest of ROUNDS rounds of CALLS calls each


class Proposal(ctypes.Structure):
    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("status", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    ]  # fmt: skip


class Refused(Exception):
    """The library cannot do a GEMM; torch can do all of them."""


class CublasLt:
    """The library's functions; a nonzero status raises Refused."""

    def __init__(self, name: str) -> None:
        # PyDLL keeps the GIL, because a call only queues work; RTLD_NOLOAD finds torch's copy only
        self.functions = ctypes.PyDLL(name, mode=os.RTLD_NOLOAD)
        self.handles: dict[int, ctypes.c_void_p] = {}
        self.workspaces: dict[tuple[int, int], Tensor] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.functions, "cublasLt" + name)

        def checked(*arguments: Any) -> None:
            if status := function(*arguments):
                raise Refused(f"cublasLt{name} gave status {status}")

        setattr(self, name, checked)
        return checked

    def handle(self, device: int) -> ctypes.c_void_p:
        if device not in self.handles:
            handle = ctypes.c_void_p()
            with torch.cuda.device(device):
                self.Create(ctypes.byref(handle))
            self.handles[device] = handle
        return self.handles[device]

    def workspace(self, device: int, stream: int) -> Tensor:
        """One per stream: two GEMMs on one stream never run concurrently."""
        if (device, stream) not in self.workspaces:
            where = torch.device("cuda", device)
            self.workspaces[device, stream] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=where)
        return self.workspaces[device, stream]


@cache
def library() -> CublasLt | None:
    """Return cuBLASLt as torch has loaded it; None if torch is built without it."""
    if not torch.version.cuda:
        return None
    try:
        return CublasLt(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


def reserve(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Allocate a stream's workspace before capture: memory allocated during capture belongs to the graph."""
    lt = library() if is_used() else None
    if lt is not None:
        lt.workspace(device.index or 0, stream.cuda_stream)


copies_stay_alike = False  # set by Strategy.setup: True if ranks repeat a computation, as under tensor parallel


def is_used() -> bool:
    """False if each run or rank must produce the same bits, because timing decides which kernel is used."""
    return not copies_stay_alike and not torch.are_deterministic_algorithms_enabled() and library() is not None


# ---- one kind of GEMM ----------------------------------------------------------------------------------------


class Product:
    """out = a @ b (+ bias), or out += a @ b, for tensors like those given to the constructor.

    cuBLASLt is column-major: it computes out.T = b.T @ a.T, so its A is our b.
    """

    def __init__(self, lt: CublasLt, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
        self.lt, self.device = lt, out.device.index
        self.zero, self.one = ctypes.c_float(0.0), ctypes.c_float(1.0)
        self.description = ctypes.c_void_p()
        lt.MatmulDescCreate(ctypes.byref(self.description), COMPUTE_FLOAT32, SCALE_FLOAT32)
        self.set(TRANSPOSE_A, ctypes.c_int(int(is_transposed(b))))
        self.set(TRANSPOSE_B, ctypes.c_int(int(is_transposed(a))))
        if bias is not None:
            self.set(EPILOGUE, ctypes.c_int(ADD_BIAS))
            self.set(BIAS, ctypes.c_void_p(bias.data_ptr()))  # its alignment affects the proposals
        self.layouts = [self.layout(t) for t in (b, a, out)]
        self.lock = threading.Lock()  # autograd calls from its own thread
        self.proposals = self.ask(min(map(alignment, (a, b, out))), out.dtype == torch.float32)
        self.algorithm: Any = None

    def set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self.lt.MatmulDescSetAttribute(self.description, attribute, ctypes.byref(value), size)

    def layout(self, matrix: Tensor) -> ctypes.c_void_p:
        """Describe the memory layout, column-major: our rows are its columns."""
        rows, columns, stride = *matrix.shape, matrix.stride(0)
        if is_transposed(matrix):
            rows, columns, stride = columns, rows, matrix.stride(1)
        layout = ctypes.c_void_p()
        self.lt.MatrixLayoutCreate(
            ctypes.byref(layout), TYPES[matrix.dtype], ctypes.c_uint64(columns), ctypes.c_uint64(rows),
            ctypes.c_int64(stride),
        )  # fmt: skip
        return layout

    def ask(self, aligned: int, is_wide: bool) -> list[Proposal]:
        wish = ctypes.c_void_p()
        self.lt.MatmulPreferenceCreate(ctypes.byref(wish))
        reductions = ctypes.c_uint32(IN_FLOAT32 | IN_PLACE if is_wide else IN_FLOAT32)
        values: dict[int, Any] = {WORKSPACE: ctypes.c_size_t(WORKSPACE_BYTES), REDUCTIONS: reductions}
        for attribute, value in (values | {name: ctypes.c_uint32(aligned) for name in ALIGNMENTS}).items():
            self.lt.MatmulPreferenceSetAttribute(
                wish, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
            )
        found, count = (Proposal * PROPOSALS)(), ctypes.c_int()
        b, a, out = self.layouts
        self.lt.MatmulAlgoGetHeuristic(
            self.lt.handle(self.device), self.description, b, a, out, out, wish, PROPOSALS, found, ctypes.byref(count)
        )
        self.lt.MatmulPreferenceDestroy(wish)
        return [p for p in found[: count.value] if p.status == 0]

    def run(
        self, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, adds: bool = False, algorithm: Any = None
    ) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        workspace = self.lt.workspace(self.device, stream)
        with self.lock:
            if bias is not None:
                self.set(BIAS, ctypes.c_void_p(bias.data_ptr()))
            at = ctypes.c_void_p(out.data_ptr())
            self.lt.Matmul(
                self.lt.handle(self.device), self.description, ctypes.byref(self.one), ctypes.c_void_p(b.data_ptr()),
                self.layouts[0], ctypes.c_void_p(a.data_ptr()), self.layouts[1],
                ctypes.byref(self.one if adds else self.zero), at, self.layouts[2], at, self.layouts[2],
                ctypes.byref(algorithm or self.algorithm), ctypes.c_void_p(workspace.data_ptr()),
                ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(stream),
            )  # fmt: skip

    def choose(self, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
        """Time the proposals in turn, so that clock changes and concurrent collectives affect all of them."""
        times: dict[int, list[float]] = {i: [] for i in range(len(self.proposals))}
        with torch.cuda.device(self.device):
            for _ in range(ROUNDS):
                for i in list(times):
                    try:
                        times[i].append(self.timed(out, a, b, bias, self.proposals[i].algorithm))
                    except Refused:
                        del times[i]
        if not times:
            raise Refused("none of the proposed algorithms runs")
        best = min(times, key=lambda i: min(times[i]))  # the minimum: another process on the GPU can only add time
        self.algorithm = self.proposals[best].algorithm

    def timed(self, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, algorithm: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.run(out, a, b, bias, algorithm=algorithm)
        begin.record()
        for _ in range(CALLS):
            self.run(out, a, b, bias, algorithm=algorithm)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def is_transposed(matrix: Tensor) -> bool:
    return matrix.stride(1) != 1


def alignment(tensor: Tensor) -> int:
    """Return the largest power of two, up to 256, that divides the address."""
    return min(256, tensor.data_ptr() & -tensor.data_ptr())


# ---- all of them ---------------------------------------------------------------------------------------------

_products: dict[Any, Product | None] = {}
_met: Counter[Any] = Counter()


def multiply(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, adds: bool = False) -> bool:
    """out = a @ b (+ bias), or out += a @ b, by the fastest kernel. Return False if it is left to torch.

    Proposals are timed with the real output tensor. So none are timed for out += a @ b: that would need a copy of `out`
    when a step uses the most memory.
    """
    if not is_used() or 2.0 * out.numel() * a.shape[1] < LARGE:
        return False
    given = [out, a, b] if bias is None else [out, a, b, bias]
    aligned = min(map(alignment, given))
    key = (*((t.shape, t.stride(), t.dtype) for t in given), aligned, out.device.index)
    if key not in _products:
        if len(_met) >= MOST_KINDS and key not in _met:
            return False
        _met[key] += 1
        if _met[key] < MEETINGS or adds or torch.cuda.is_current_stream_capturing():
            return False
        _products[key] = prepared(out, a, b, bias) if aligned >= 16 else None
    product = _products[key]
    if product is None:
        return False
    product.run(out, a, b, bias, adds)
    return True


def prepared(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Product | None:
    lt = library()
    plain = all(t.dim() == 2 and 1 in t.stride() for t in (a, b, out)) and not is_transposed(out)
    types = a.dtype == b.dtype != torch.float32 and a.dtype in TYPES and out.dtype in (a.dtype, torch.float32)
    if bias is not None:  # the library reads one contiguous value per column
        plain &= bias.shape == (out.shape[1],) and bias.stride(0) == 1 and bias.dtype == out.dtype
    if lt is None or not plain or not types:
        return None
    try:
        product = Product(lt, out, a, b, bias)
        product.choose(out, a, b, bias)
    except Refused as reason:
        shapes = " × ".join(str(tuple(t.shape)) for t in (a, b))
        logging.getLogger(__name__).warning("the matmul %s falls back to torch: %s", shapes, reason)
        return None
    return product
