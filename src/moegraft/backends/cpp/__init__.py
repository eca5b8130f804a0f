"""The compiled CPU backend: C++ kernels, built on first use where there is a compiler.

A whole layer is one call (``source/layer.h``), so is the LoRA of a linear (``source/linear.h``).
Each weight is read once, as it lies; LoRA is computed per segment (adapter, expert) in the same
tiles; bfloat16 is multiplied by the processor where it can, else widened in registers; sums are
fp32 in an order that depends neither on the batch nor on the adapters.
"""

from __future__ import annotations

from moegraft.backends import Choice
from moegraft.backends.cpp.build import BuildError
from moegraft.backends.cpp.layer import CompiledLayer
from moegraft.backends.cpp.library import ACTIVATIONS, best_library
from moegraft.backends.cpp.linear import CompiledStages
from moegraft.backends.cpu import supports as torch_supports
from moegraft.call import Mode
from moegraft.problem import Problem


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
    found = library.instructions
    how = "as it lies"
    if problem.dtype == "bfloat16":
        how = "by bfloat16 instructions" if found.bf16 else "widened in registers"
    elif problem.dtype == "float16":
        how = "widened in registers"
    why = f"compiled for {found.name}: {problem.dtype} {how}, whole layers in one call"
    stages = CompiledStages("stacked", library=library)
    return Choice(stages, mode or "serial", why, CompiledLayer(library))
