"""The few functions of the CUDA driver that kernels of our own need, through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache

import torch

from moegraft.errors import MoegraftError

_SHARED_MEMORY_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEPENDENT_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_BFLOAT16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
_SWIZZLE_128 = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PROMOTE_256 = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64


class DriverError(MoegraftError):
    """A call of the CUDA driver failed."""


@cache
def _driver() -> ctypes.CDLL:
    found = ctypes.CDLL("libcuda.so.1")
    found.cuLaunchKernel.argtypes = (
        c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p
    )  # fmt: skip
    found.cuLaunchKernelEx.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p)
    return found


def _check(code: int, what: str) -> None:
    if code:
        text = c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        why = (text.value or b"unknown").decode()
        raise DriverError(f"The CUDA driver can't {what}: {why} (error {code}).")


class Kernel:
    """One function of a compiled module, loaded into the current context.

    Args:
        cubin: machine code for this GPU.
        name: of the function.
        shared_bytes: dynamic shared memory of each launch.
        threads: of a program.

    Raises:
        DriverError: the driver refuses it.
    """

    def __init__(self, cubin: bytes, name: str, shared_bytes: int, threads: int) -> None:
        self.shared_bytes, self.threads = shared_bytes, threads
        self._module, self._function = c_void_p(), c_void_p()
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), cubin), f"load {name}")
        code = driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode())
        _check(code, f"find {name}")
        code = driver.cuFuncSetAttribute(self._function, _SHARED_MEMORY_ATTRIBUTE, shared_bytes)
        _check(code, f"give {name} {shared_bytes} bytes of shared memory")

    def launch(
        self, programs: int, *arguments: ctypes._CData | ctypes.Array[ctypes.c_char]
    ) -> None:
        """Launch on the current stream; arguments are copied, as the function takes them."""
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        code = _driver().cuLaunchKernel(
            self._function, programs, 1, 1, self.threads, 1, 1, self.shared_bytes,
            torch.cuda.current_stream().cuda_stream, pointers, None,
        )  # fmt: skip
        _check(code, "launch a kernel")

    def launch_dependent(
        self, programs: int, *arguments: ctypes._CData | ctypes.Array[ctypes.c_char]
    ) -> None:
        """As :meth:`launch`, but programs may start before the launch in front is complete.

        They do once all of its programs have allowed it; see backends/triton/sync.py.
        """
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        attribute = _Attribute(_DEPENDENT_LAUNCH, 0, 1)
        config = _Config(
            programs, 1, 1, self.threads, 1, 1, self.shared_bytes,
            torch.cuda.current_stream().cuda_stream, ctypes.pointer(attribute), 1,
        )  # fmt: skip
        code = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        _check(code, "launch a dependent kernel")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: what it is, and a union of 64 bytes."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_int * 15))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        ("stream", c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", c_uint),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _encoded(
    address: int, rows: int, columns: int, row_bytes: int, box_rows: int, box_columns: int
) -> ctypes.Array[ctypes.c_char]:
    memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    at = -ctypes.addressof(memory) % _MAP_ALIGNMENT
    found = (ctypes.c_char * _MAP_BYTES).from_buffer(memory, at)
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(found), c_int(_BFLOAT16), c_uint32(2), c_void_p(address),
        (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(row_bytes),
        (c_uint32 * 2)(box_columns, box_rows), (c_uint32 * 2)(1, 1), c_int(0),
        c_int(_SWIZZLE_128), c_int(_PROMOTE_256), c_int(0),
    )  # fmt: skip
    _check(code, f"make a tensor map of [{rows}, {columns}]")
    return found


def tensor_map(
    matrix: torch.Tensor, box_rows: int, box_columns: int
) -> ctypes.Array[ctypes.c_char]:
    """Return the map of a bfloat16 matrix ``[rows, columns]`` for the copy engine.

    Tiles of ``box_rows x box_columns`` have rows of 128 bytes in shared memory, swizzled.

    Raises:
        DriverError: rows that are not on 16 bytes, or sizes that the copy engine doesn't take.
    """
    assert matrix.dtype == torch.bfloat16 and matrix.dim() == 2 and matrix.stride(1) == 1
    rows, columns = matrix.shape
    return _encoded(matrix.data_ptr(), rows, columns, matrix.stride(0) * 2, box_rows, box_columns)
