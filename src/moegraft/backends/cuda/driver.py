"""The few functions of the CUDA driver that kernels of our own need, through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache

import torch

from moegraft.errors import MoegraftError

_SHARED_MEMORY_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
#: CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; e4m3 is copied as CU_TENSOR_MAP_DATA_TYPE_UINT8.
_TYPES = {torch.bfloat16: 9, torch.float8_e4m3fn: 0}
_SWIZZLE_128 = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PROMOTE_256 = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64


class DriverError(MoegraftError):
    """A call of the CUDA driver failed."""


@cache
def _driver() -> ctypes.CDLL:
    found = ctypes.CDLL("libcuda.so.1")
    found.cuLaunchKernelEx.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p)
    return found


def _check(code: int, what: str) -> None:
    if code:
        text = c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        why = (text.value or b"unknown").decode()
        raise DriverError(f"The CUDA driver can't {what}: {why} (error {code}).")


class _Attribute(ctypes.Structure):
    """A CUlaunchAttribute whose value is one int."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_int * 15))


class _Launch(ctypes.Structure):
    """A CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared_bytes", c_uint),
        ("stream", c_void_p), ("attributes", c_void_p), ("num_attributes", c_uint),
    )  # fmt: skip


#: Lets a launch begin when the programs of the one before it allow that, not when they have ended.
_OVERLAP = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, 1)


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
        self,
        programs: int,
        *arguments: ctypes._CData | ctypes.Array[ctypes.c_char],
        overlap: bool = False,
    ) -> None:
        """Launch on the current stream; arguments are copied, as the function takes them.

        Args:
            programs: of the launch.
            arguments: of the function.
            overlap: begin as soon as all programs of the launch before have allowed it or ended;
                the function itself waits for what it reads of earlier launches.
        """
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        launch = _Launch(
            (programs, 1, 1), (self.threads, 1, 1), self.shared_bytes,
            torch.cuda.current_stream().cuda_stream, ctypes.addressof(_OVERLAP), int(overlap),
        )  # fmt: skip
        code = _driver().cuLaunchKernelEx(ctypes.byref(launch), self._function, pointers, None)
        _check(code, "launch a kernel")


@lru_cache(maxsize=4096)
def _encoded(
    address: int, kind: int, rows: int, columns: int, row_bytes: int, box_rows: int,
    box_columns: int,
) -> ctypes.Array[ctypes.c_char]:  # fmt: skip
    memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    at = -ctypes.addressof(memory) % _MAP_ALIGNMENT
    found = (ctypes.c_char * _MAP_BYTES).from_buffer(memory, at)
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(found), c_int(kind), c_uint32(2), c_void_p(address),
        (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(row_bytes),
        (c_uint32 * 2)(box_columns, box_rows), (c_uint32 * 2)(1, 1), c_int(0),
        c_int(_SWIZZLE_128), c_int(_PROMOTE_256), c_int(0),
    )  # fmt: skip
    _check(code, f"make a tensor map of [{rows}, {columns}]")
    return found


def tensor_map(
    matrix: torch.Tensor, box_rows: int, box_columns: int
) -> ctypes.Array[ctypes.c_char]:
    """Return the map of a bfloat16 or e4m3 matrix ``[rows, columns]`` for the copy engine.

    Tiles of ``box_rows x box_columns`` have rows of 128 bytes in shared memory, swizzled.

    Raises:
        DriverError: rows that are not on 16 bytes, or sizes that the copy engine doesn't take.
    """
    assert matrix.dim() == 2 and matrix.stride(1) == 1
    rows, columns = matrix.shape
    row_bytes = matrix.stride(0) * matrix.element_size()
    kind = _TYPES[matrix.dtype]
    return _encoded(matrix.data_ptr(), kind, rows, columns, row_bytes, box_rows, box_columns)
