"""What the matrix kernels share: options, the matrix instruction per size, how they are loaded."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from moegraft.backends.cuda.compiler import cubin
from moegraft.backends.cuda.driver import Kernel

SOURCE = Path(__file__).parent / "source"
#: Numbers of activations and dtypes in the sources.
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
#: Rows of a block are computed in steps of this many.
ROW_STEP = 16


class Specialisation(Hashable, Protocol):
    """What one compilation of a source is made for.

    Attributes:
        name: of the source, without ``.cu``, and of its kernel.
    """

    name: ClassVar[str]

    @property
    def threads(self) -> int:
        """Threads of a program."""

    @property
    def block_m(self) -> int:
        """Rows of a block at most, a multiple of 16, at most 192."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, as the source lays it out, and room to align it."""

    def options(self) -> list[str]:
        """Return the compiler's options."""


def sources(spec: Specialisation) -> tuple[str, dict[str, str]]:
    """Return the source of a specialisation and its headers."""
    return (SOURCE / f"{spec.name}.cu").read_text(), headers(spec.block_m)


@cache
def kernel(spec: Specialisation, device: int) -> Kernel:
    """Return a specialisation on a GPU, compiled now unless it was before.

    Raises:
        CompileError, DriverError: it can't be had.
    """
    code = cubin(*sources(spec), spec.options())
    return Kernel(code, spec.name, spec.shared_bytes, spec.threads)


class Epilogue(Protocol):
    """What a specialisation says of what follows its product.

    Attributes:
        kind, alpha, limit, up_shift: of the activation; limit None = none.
        bias, weight: dtypes of bias and routing weights; bias None = none.
    """

    @property
    def kind(self) -> str: ...
    @property
    def alpha(self) -> float: ...
    @property
    def limit(self) -> float | None: ...
    @property
    def up_shift(self) -> float: ...
    @property
    def bias(self) -> torch.dtype | None: ...
    @property
    def weight(self) -> torch.dtype: ...


def epilogue_macros(spec: Epilogue) -> dict[str, object]:
    """Return the macros of an activation, a bias and routing weights."""
    return {
        "KIND": KINDS[spec.kind], "ALPHA": _float(spec.alpha),
        "HAS_LIMIT": int(spec.limit is not None), "LIMIT": _float(spec.limit or 0.0),
        "UP_SHIFT": _float(spec.up_shift), "BIAS": DTYPES[spec.bias] if spec.bias else 0,
        "WEIGHT": DTYPES[spec.weight],
    }  # fmt: skip


def _float(value: float) -> str:
    return f"{float(value)!r}f"


def base_options(block_m: int, macros: Mapping[str, object]) -> list[str]:
    """Return the compiler's options for blocks of up to ``block_m`` rows, with these macros."""
    cases = " ".join(f"CASE({i + 1})" for i in range(block_m // ROW_STEP))
    defines = {"BLOCK_M": block_m, "CASES": cases, **macros}
    return [
        "--gpu-architecture=sm_90a", "--std=c++17", "-default-device",
        *(f"-D{name}={value}" for name, value in defines.items()),
    ]  # fmt: skip


@cache
def headers(block_m: int) -> dict[str, str]:
    """Return the headers of the sources by name."""
    sizes = range(ROW_STEP, block_m + 1, ROW_STEP)
    return {
        **{path.name: path.read_text() for path in sorted(SOURCE.glob("*.h"))},
        "product.h": "#pragma once\n" + "".join(_product(n, t) for n in sizes for t in (0, 1)),
        "product_fp8.h": "#pragma once\n" + "".join(_product_fp8(n) for n in sizes),
    }


def _product(n: int, transposed: int) -> str:
    """Return the matrix instruction for ``n`` rows of a block; see ``hopper.h``."""
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
    last = f"%{count}, %{count + 1}, 1, 1, 1, {transposed}, 0;"
    return (
        f"template <> struct Product<{n}, {transposed}> {{\n"
        f"    static DEVICE void run(float (&d)[{count}], u64 a, u64 b) {{\n"
        f'        asm volatile("{name} {{{registers}}}, {last}"\n'
        f'                     : {operands} : "l"(a), "l"(b));\n'
        "    }\n};\n"
    )


def _product_fp8(n: int) -> str:
    """Return the FP8 matrix instruction for ``n`` rows of a block; see ``hopper_fp8.h``."""
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3"

    def function(called: str, operand: str, adds: int) -> str:
        operands = ", ".join(f'"{operand}"(d[{i}])' for i in range(count))
        last = f"%{count}, %{count + 1}, {adds}, 1, 1;"
        return (
            f"    static DEVICE void {called}(float (&d)[{count}], u64 a, u64 b) {{\n"
            f'        asm volatile("{name} {{{registers}}}, {last}"\n'
            f'                     : {operands} : "l"(a), "l"(b));\n'
            "    }\n"
        )

    functions = function("set", "=f", 0) + function("add", "+f", 1)
    return f"template <> struct ProductFp8<{n}> {{\n{functions}}};\n"
