"""The GPU backend, in Triton: kernels for decode-shaped batches, and for many rows per expert.

    route -> gate_up_activation (+ delta) -> down (+ delta) -> finalize

:mod:`moegraft.backends.triton.fused` is the whole layer, :mod:`.prefill` the same for many rows per
expert, :mod:`.unfused` from plain stages (modes ``two_stream`` and ``serial``; activations that are
functions), :mod:`.normed` that with a norm behind each expert, :mod:`.launch` each kernel's launch,
:mod:`.tiles` what tiles they get. Each kernel file says which stages it replaces.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch

from moegraft.backends import Choice
from moegraft.call import LayerRun, Mode
from moegraft.problem import Problem
from moegraft.quant.formats import UNQUANTIZED, why_no_format

#: finalize keeps one bit per choice.
MAX_TOP_K = 64
DTYPES = ("bfloat16", "float16", "float32")
#: Weight formats with kernels, and the least compute capability that has their number types.
FORMATS = {
    "fp8-block": 89,
    "fp8-block-w8a16": 89,
    "fp8-channel": 89,
    "fp8-tensor": 89,
    "nvfp4": 80,
    "mxfp4": 80,
}


def supports(problem: Problem, mode: Mode | None = None) -> str | None:
    """Return None when this backend can run the problem, else the reason why not."""
    from moegraft.backends.triton.device import device_facts, is_interpreted

    if find_spec("triton") is None:
        return "the package triton is not installed"
    if problem.device_type != ("cpu" if is_interpreted() else "cuda"):
        return f"the tensors are on {problem.device_type}, this backend runs on NVIDIA GPUs"
    if not is_interpreted() and (not torch.cuda.is_available() or torch.version.cuda is None):
        return "torch finds no NVIDIA GPU"
    if problem.weight_format != UNQUANTIZED:
        reason = why_no_format(problem.weight_format)
        if reason is None and problem.weight_format not in FORMATS:
            reason = f"weight format {problem.weight_format!r} has no kernels here yet"
        if reason is not None:
            return reason
    sizes = (problem.hidden, problem.intermediate)
    if problem.weight_format in ("nvfp4", "mxfp4") and any(size % 8 for size in sizes):
        return f"H and I are {sizes}; 4-bit weights need multiples of 8 here, whole 4-byte words"
    if problem.dtype not in DTYPES:
        return f"weights are {problem.dtype}; implemented: {', '.join(DTYPES)}"
    if problem.top_k > MAX_TOP_K:
        return f"top_k is {problem.top_k}; implemented: up to {MAX_TOP_K}"
    facts = device_facts()
    least = FORMATS.get(problem.weight_format, 80)
    if facts.capability < least:
        return (
            f"{facts.name} has compute capability {facts.capability / 10}, "
            f"{problem.weight_format} weights need {least / 10}"
        )
    if problem.activation == "custom" and mode in ("in_kernel", "fused_serial"):
        return f"mode {mode!r} can't run an activation given as a function; two_stream, serial can"
    if problem.post_norm and mode not in (None, "serial", "base"):
        return f"mode {mode!r} can't run experts with a norm behind them; serial and base can"
    if mode == "in_kernel" and not (facts.has_dependent_launch or facts.interpreted):
        return f"mode 'in_kernel' needs compute capability 9.0, {facts.name} is older"
    return None


def choose(problem: Problem, mode: Mode | None = None) -> Choice:
    """Return what runs a supported problem."""
    from moegraft.backends.triton.device import device_facts
    from moegraft.backends.triton.fused import run_layer
    from moegraft.backends.triton.listed_layer import listed_layer
    from moegraft.backends.triton.normed import run_normed
    from moegraft.backends.triton.prefill.config import is_for_fp8, prefill_config, why_portable
    from moegraft.backends.triton.prefill.layer import run_prefill
    from moegraft.backends.triton.stages import TritonStages
    from moegraft.backends.triton.tiles import choose_config
    from moegraft.backends.triton.unfused import MAX_TWO_STREAM_TOKENS, run_unfused

    facts = device_facts()
    config, source = choose_config(problem, facts)
    custom = problem.activation == "custom"
    if problem.post_norm:
        normed = TritonStages(config.overlapping(False))
        why = f"experts with a norm behind them run on plain stages: {config}"
        return Choice(normed, mode or "serial", why, partial(run_normed, stages=normed))
    if mode is None:
        fused: Mode = "in_kernel" if facts.has_dependent_launch else "fused_serial"
        mode = "serial" if custom else fused
    stages = TritonStages(config.overlapping(False))
    pdl = facts.has_dependent_launch and mode in ("in_kernel", "base") and not custom
    config = config.overlapping(pdl)
    run: LayerRun = partial(run_layer, config=config)
    if not facts.interpreted:
        run = listed_layer(problem, config, None)
    if custom or mode in ("two_stream", "serial"):
        run = partial(run_unfused, config=config, two_stream=mode == "two_stream")
    elif (tiles := prefill_config(problem, facts)) is not None:
        run = partial(run_prefill, config=tiles, other=config)
        if not facts.interpreted:
            run = listed_layer(problem, config, tiles)
        why = f"many rows per expert: {tiles}"
        if facts.capability == 90 and not tiles.hopper and (reason := why_portable(problem)):
            why += f"; portable GEMMs: {reason}"
        return Choice(stages, mode, why, run)
    elif is_for_fp8(problem) and facts.capability == 90 and (reason := why_portable(problem)):
        source += f", not GEMMs for many rows ({reason})"
    if mode == "two_stream" and problem.num_tokens > MAX_TWO_STREAM_TOKENS:
        source += f", on one stream (T > {MAX_TWO_STREAM_TOKENS})"
    return Choice(stages, mode, f"{source}: {config}", run)
