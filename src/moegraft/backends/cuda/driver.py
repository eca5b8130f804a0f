"""The few functions of the CUDA driver that kernels of our own need, through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from typing import TypeAlias

import torch

from moegraft.backends.launch_list import Unlisted, Watch, watching
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


class TensorMap(ctypes.Structure):
    """A CUtensorMap.

    Attributes:
        matrix: what it was made from, the address first.
    """

    _fields_ = (("words", c_uint64 * (_MAP_BYTES // 8)),)
    matrix: tuple[int, ...]


#: An argument of a kernel: a map, or a structure whose pointers are ``c_void_p``.
Argument: TypeAlias = TensorMap | ctypes.Structure

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

    def launch(self, programs: int, *arguments: Argument, overlap: bool = False) -> None:
        """Launch on the current stream; arguments are copied, as the function takes them.

        Args:
            programs: of the launch.
            arguments: of the function.
            overlap: begin as soon as all programs of the launch before have allowed it or ended;
                the function itself waits for what it reads of earlier launches.
        """
        launch = _Launch(
            (programs, 1, 1), (self.threads, 1, 1), self.shared_bytes, 0,
            ctypes.addressof(_OVERLAP), int(overlap),
        )  # fmt: skip
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        self.launch_as(launch, arguments, stream)
        watch = watching()
        if watch is not None:
            watch.add(lambda watch: _Listed(self, launch, arguments, watch))

    def launch_as(
        self, launch: _Launch, arguments: Sequence[Argument | ctypes.Array[c_uint64]], stream: int
    ) -> None:
        """Launch with a configuration, but for the stream, that is there already."""
        launch = _Launch.from_buffer_copy(launch)
        launch.stream = stream
        pointers = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        code = _driver().cuLaunchKernelEx(ctypes.byref(launch), self._function, pointers, None)
        _check(code, "launch a kernel")


class _Listed:
    """A launch that was written down: its arguments are made anew with other addresses."""

    def __init__(
        self, kernel: Kernel, launch: _Launch, arguments: Sequence[Argument], watch: Watch
    ) -> None:
        self._kernel, self._launch = kernel, launch
        self._arguments = [moving(argument, watch) for argument in arguments]

    def __call__(self, bases: Sequence[int], stream: int) -> None:
        """Launch it again."""
        self._kernel.launch_as(self._launch, [make(bases) for make in self._arguments], stream)


def moving(
    argument: Argument, watch: Watch
) -> Callable[[Sequence[int]], TensorMap | ctypes.Array[c_uint64]]:
    """Return what makes an argument for tensors at other addresses: a map, or the same bytes.

    Raises:
        Unlisted: it points to memory that is not the call's.
    """
    if isinstance(argument, TensorMap):
        source, offset = watch.place(argument.matrix[0])
        sizes = argument.matrix[1:]
        return lambda bases: _encoded(bases[source] + offset, *sizes)
    if ctypes.sizeof(argument) % 8:
        raise Unlisted(f"{type(argument).__name__} is not made of words of 8 bytes")
    kind = c_uint64 * (ctypes.sizeof(argument) // 8)
    words = tuple(kind.from_buffer_copy(argument))
    # A structure that extends another one names its own fields alone.
    fields = [f for base in type(argument).__mro__ for f in vars(base).get("_fields_", ())]
    pointers = [field[0] for field in fields if field[1] is c_void_p]
    at = [getattr(type(argument), name).offset // 8 for name in pointers]
    places = [(i, *watch.place(words[i])) for i in at if words[i]]

    def make(bases: Sequence[int]) -> ctypes.Array[c_uint64]:
        found = list(words)
        for i, source, offset in places:
            found[i] = bases[source] + offset
        return kind(*found)

    return make


@lru_cache(maxsize=4096)
def _encoded(
    address: int, kind: int, rows: int, columns: int, row_bytes: int, box_rows: int,
    box_columns: int,
) -> TensorMap:  # fmt: skip
    memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    at = -ctypes.addressof(memory) % _MAP_ALIGNMENT
    found = TensorMap.from_buffer(memory, at)
    found.matrix = (address, kind, rows, columns, row_bytes, box_rows, box_columns)
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(found), c_int(kind), c_uint32(2), c_void_p(address),
        (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(row_bytes),
        (c_uint32 * 2)(box_columns, box_rows), (c_uint32 * 2)(1, 1), c_int(0),
        c_int(_SWIZZLE_128), c_int(_PROMOTE_256), c_int(0),
    )  # fmt: skip
    _check(code, f"make a tensor map of [{rows}, {columns}]")
    return found


def tensor_map(matrix: torch.Tensor, box_rows: int, box_columns: int) -> TensorMap:
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
