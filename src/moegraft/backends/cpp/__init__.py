"""The compiled CPU backend: C++ kernels, built on first use where there is a compiler.

A whole layer is one call (``source/layer.h``), so is the LoRA of a linear (``source/linear.h``).
Each weight is read once, as it lies; LoRA is computed per segment (adapter, expert) in the same
tiles; bfloat16 is multiplied by the processor where it can, else widened in registers; sums are
fp32 in an order that depends neither on the batch nor on the adapters.
"""

from __future__ import annotations

from moegraft import processor
from moegraft.backends import Choice
from moegraft.backends.cpp.build import BuildError
from moegraft.backends.cpp.layer import CompiledLayer
from moegraft.backends.cpp.library import ACTIVATIONS, best_library
from moegraft.backends.cpp.linear import CompiledStages
from moegraft.backends.cpu import supports as torch_supports
from moegraft.backends.cpu.grouped import ALL_ROWS
from moegraft.call import Mode
from moegraft.problem import Problem

#: Rows per expert from which on torch's AMX tiles outrun vectors. (By the instructions' rates, not
#: measured: no machine with AMX was at hand.)
AMX_ROWS = 64


def supports(problem: Problem, mode: Mode | None = None) -> str | None:
    """Return None when this backend can run the problem, else the reason why not."""
    refusal = torch_supports(problem, mode)
    if refusal is not None:
        return refusal
    if problem.weight_format != "unquantized":
        return f"weight format {problem.weight_format!r} is read by torch's operators only"
    if problem.activation not in ACTIVATIONS:
        return f"activation {problem.activation!r} is a Python function; compiled kernels call none"
    if problem.post_norm:
        return "the norm behind the experts is a Python function; compiled kernels call none"
    library = best_library()
    return f"no compiled kernels: {library}" if isinstance(library, BuildError) else None


def choose(problem: Problem, mode: Mode | None = None) -> Choice:
    """Return the stages for a problem and one line that says why."""
    library = best_library()
    assert not isinstance(library, BuildError), library
    rows = problem.num_pairs / problem.num_experts
    if problem.dtype == "bfloat16" and "amx_bf16" in processor.flags() and rows >= AMX_ROWS:
        why = (
            f"base by torch's bfloat16 products, which use AMX ({rows:.0f} rows per expert >= "
            f"{AMX_ROWS}); linears compiled for {library.instructions.name}"
        )
        return Choice(
            CompiledStages("stacked", "segments", ALL_ROWS, library=library), mode or "serial", why
        )
    found = library.instructions
    how = "as it lies"
    if problem.dtype == "bfloat16":
        how = "by bfloat16 instructions" if found.bf16 else "widened to fp32"
    elif problem.dtype == "float16":
        how = "widened to fp32"
    why = f"compiled for {found.name}: {problem.dtype} {how}, whole layers in one call"
    stages = CompiledStages("stacked", library=library)
    return Choice(stages, mode or "serial", why, CompiledLayer(library))
