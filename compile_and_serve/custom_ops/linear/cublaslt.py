"""y = x Wᵀ (+ residual) by cuBLASLt, with the algorithm chosen by measuring.

Shape legend: T tokens, I input features, O output features.

`F.linear` takes the algorithm that cuBLASLt's heuristic puts first. Of the first few, another is often faster; and a residual that the
product's epilogue adds costs one read, where an addition of its own reads and writes the sum once more. cuBLASLt is column-major: it
computes yᵀ = W xᵀ of the same memory.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.tuning.tuner import choices_of, fastest

log = logging.getLogger(__name__)

TORCH = "torch"  # in the place of an algorithm: F.linear
_CANDIDATES = 5  # of the heuristic's list: each costs some milliseconds a shape and range
_MANY_TOKENS, _CANDIDATES_OF_MANY = 257, 8  # which are measured in idle moments
_WORKSPACE_BYTES = 64 << 20
_CUDA_R_32F, _CUDA_R_16BF, _COMPUTE_32F = 0, 14, 68
_DESC_TRANSA, _PREF_MAX_WORKSPACE_BYTES = 3, 1
_PREF_MIN_ALIGNMENTS, _ALIGNMENT = (5, 6, 7, 8), 16  # of W, x, residual and y, in bytes


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLtError(RuntimeError):
    """A call of the library returned a status other than success."""


def _check(status: int, what: str) -> None:
    if status:
        raise CublasLtError(f"cuBLASLt's {what} failed with status {status}")


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library that torch itself uses; None (logged, with the reason) where it is not found."""
    name = f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        log.warning("cuBLASLt's algorithms are not chosen among, torch's choice is used: %s", error)
        return None
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library


@functools.cache
def _version() -> int:
    """An algorithm's bytes mean the same to one version of the library only."""
    library = _library()
    return 0 if library is None else int(library.cublasLtGetVersion())


@functools.cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    library, handle = _library(), ctypes.c_void_p()
    assert library is not None
    with torch.cuda.device(device):
        _check(library.cublasLtCreate(ctypes.byref(handle)), "cublasLtCreate")
    return handle


class _Product:
    """The descriptors of one product's shapes; `residual_stride` 0: without one."""

    def __init__(
        self, device: torch.device, num_tokens: int, out_features: int, in_features: int,
        x_stride: int, residual_stride: int,
    ) -> None:  # fmt: skip
        self._layouts: list[ctypes.c_void_p] = []
        library = _library()
        assert library is not None
        self._library, self._handle = library, _handle(device)
        self._num_tokens = num_tokens
        self._shapes = f"{num_tokens} x {in_features} by {out_features}"
        self._operation = ctypes.c_void_p()
        status = library.cublasLtMatmulDescCreate(ctypes.byref(self._operation), _COMPUTE_32F, _CUDA_R_32F)
        _check(status, "cublasLtMatmulDescCreate")
        _set(library.cublasLtMatmulDescSetAttribute, self._operation, _DESC_TRANSA, ctypes.c_int32(1))
        self._layouts = [
            self._layout(rows, columns, stride)
            for rows, columns, stride in (
                (in_features, out_features, in_features),
                (in_features, num_tokens, x_stride),
                (out_features, num_tokens, residual_stride or out_features),
                (out_features, num_tokens, out_features),
            )
        ]
        self._beta = ctypes.c_float(1.0 if residual_stride else 0.0)
        self._workspace_bytes: dict[str, int | None] = {}
        self._algorithms: list[str] | None = None

    def __del__(self) -> None:
        if not self._layouts:  # it was never made
            return
        for layout in self._layouts:
            self._library.cublasLtMatrixLayoutDestroy(layout)
        self._library.cublasLtMatmulDescDestroy(self._operation)

    def _layout(self, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        status = self._library.cublasLtMatrixLayoutCreate(
            ctypes.byref(layout), _CUDA_R_16BF, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
        )
        _check(status, "cublasLtMatrixLayoutCreate")
        return layout

    def algorithms(self) -> list[str]:
        """The heuristic's first ones that run, best first, by name; none where the library refuses, which is logged."""
        if self._algorithms is None:
            try:
                self._algorithms = self._found()
            except CublasLtError as error:
                log.warning("torch's product is used for %s: %s", self._shapes, error)
                self._algorithms = []
        return self._algorithms

    def _found(self) -> list[str]:
        preference, count = ctypes.c_void_p(), ctypes.c_int()
        most = _CANDIDATES_OF_MANY if self._num_tokens >= _MANY_TOKENS else _CANDIDATES
        found = (_Heuristic * most)()
        _check(self._library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "cublasLtMatmulPreferenceCreate")
        set_preference = functools.partial(_set, self._library.cublasLtMatmulPreferenceSetAttribute, preference)
        set_preference(_PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(_WORKSPACE_BYTES))
        for attribute in _PREF_MIN_ALIGNMENTS:
            set_preference(attribute, ctypes.c_uint32(_ALIGNMENT))
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._operation, *self._layouts, preference, most, found, ctypes.byref(count)
        )
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        _check(status, "cublasLtMatmulAlgoGetHeuristic")
        names = [bytes(result.algorithm).hex() for result in found[: count.value]]
        return [name for name in names if self.takes(name)]

    def takes(self, name: str) -> bool:
        """Whether the algorithm runs for these shapes: one found for another number of tokens may not."""
        if name not in self._workspace_bytes:
            result = _Heuristic()
            status = self._library.cublasLtMatmulAlgoCheck(
                self._handle, self._operation, *self._layouts, ctypes.byref(_algorithm(name)), ctypes.byref(result)
            )
            fits = status == 0 and result.workspace_bytes <= _WORKSPACE_BYTES
            self._workspace_bytes[name] = int(result.workspace_bytes) if fits else None
        return self._workspace_bytes[name] is not None

    def run(
        self, name: str, x_TI: torch.Tensor, residual_TO: torch.Tensor | None, weight_OI: torch.Tensor
    ) -> torch.Tensor:
        """The product by an algorithm that it `takes`."""
        size = self._workspace_bytes[name]
        assert size is not None
        out_TO = torch.empty(x_TI.shape[0], weight_OI.shape[0], dtype=x_TI.dtype, device=x_TI.device)
        workspace = torch.empty(size, dtype=torch.uint8, device=x_TI.device)
        weight_layout, x_layout, residual_layout, out_layout = self._layouts
        status = self._library.cublasLtMatmul(
            self._handle, self._operation, _ONE, _address(weight_OI), weight_layout, _address(x_TI), x_layout,
            ctypes.byref(self._beta), _address(out_TO if residual_TO is None else residual_TO), residual_layout,
            _address(out_TO), out_layout, ctypes.byref(_algorithm(name)), _address(workspace), ctypes.c_size_t(size),
            ctypes.c_void_p(torch.cuda.current_stream(x_TI.device).cuda_stream),
        )  # fmt: skip
        _check(status, "cublasLtMatmul")
        return out_TO


_ONE = ctypes.byref(ctypes.c_float(1.0))
_product = functools.lru_cache(maxsize=4096)(_Product)


@functools.cache
def _algorithm(name: str) -> _Algorithm:
    """An algorithm's name is its 64 bytes, in hexadecimal digits."""
    return _Algorithm.from_buffer_copy(bytes.fromhex(name))


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _set(function: Callable[..., int], descriptor: ctypes.c_void_p, attribute: int, value: object) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))  # type: ignore[arg-type]
    _check(function(descriptor, attribute, ctypes.byref(value), size), "attribute")  # type: ignore[arg-type]


def linear(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, residual_TO: torch.Tensor | None = None, first: int = 1
) -> torch.Tensor:
    """y = x Wᵀ (+ residual), summed in float32, by the fastest of torch's way and cuBLASLt's algorithms, measured once a range of T.

    x_TI, residual_TO: rows may be strided. → [T, O] in x's dtype. Other dtypes than bfloat16, and rows that do not begin at multiples of
    16 bytes or lie upon each other, are torch's. first: the fewest tokens that a caller comes with. Measuring waits for the device, which
    nothing may do inside a graph's capture: there, what was not measured is torch's.
    """

    def by_torch(weight_OI: torch.Tensor) -> torch.Tensor:
        y_TO = F.linear(x_TI, weight_OI)
        return y_TO if residual_TO is None else y_TO + residual_TO

    operands = [x_TI, weight_OI] if residual_TO is None else [x_TI, weight_OI, residual_TO]
    is_taken = all(map(_is_taken, operands)) and weight_OI.is_contiguous() and weight_OI.shape[0] * 2 % _ALIGNMENT == 0
    if not is_taken or _library() is None:
        return by_torch(weight_OI)
    num_tokens, in_features = x_TI.shape
    product = _product(
        x_TI.device, num_tokens, weight_OI.shape[0], in_features, x_TI.stride(0),
        residual_TO.stride(0) if residual_TO is not None else 0,
    )  # fmt: skip
    family = f"linear cuBLASLt {_version()} O={weight_OI.shape[0]} I={in_features}{'' if residual_TO is None else ' + residual'}"
    choice = choices_of(x_TI.device).known(family, num_tokens, first)
    if choice is None:
        runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {TORCH: by_torch}
        runs |= {name: functools.partial(product.run, name, x_TI, residual_TO) for name in product.algorithms()}
        choice = fastest(family, num_tokens, runs, weight_OI, first)
    if choice == TORCH or not product.takes(choice):
        return by_torch(weight_OI)
    return product.run(choice, x_TI, residual_TO, weight_OI)


def _is_taken(operand: torch.Tensor) -> bool:
    is_bfloat16 = operand.is_cuda and operand.dtype == torch.bfloat16 and operand.numel() > 0
    row_bytes = operand.stride(0) * operand.element_size()
    is_aligned = operand.data_ptr() % _ALIGNMENT == 0 and row_bytes % _ALIGNMENT == 0
    return is_bfloat16 and operand.stride(1) == 1 and operand.stride(0) >= operand.shape[1] and is_aligned
