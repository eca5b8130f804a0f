"""Order between launches, with programmatic dependent launch (Hopper and newer).

A kernel may let the next launch start its programs early (``launch_next``); what the launches
before it wrote may be read only after ``launch_wait``, which returns when they are complete.
Without dependent launch both do nothing: launches of a stream follow one another anyway.

How the LoRA kernels use it: the shrink waits for everything before it, then lets the GEMM start at
once. The GEMM needs nothing of the shrink for its whole K loop, so the two stream their bytes side
by side, and only then it waits. No flags, no spinning, nothing that a graph could freeze.

Every kernel that lets the next one start before its own wait is complete only when its wait has
returned, so whoever waits for it has waited for all before it too. A kernel may read, before its
wait, what was complete when the launch before it passed *its* wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def launch_wait(PDL: tl.constexpr):
    """Wait until all launches before this one are complete."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_next(PDL: tl.constexpr):
    """Let the next launch start its programs as soon as there is room."""
    if PDL:
        gdc_launch_dependents()
