"""Order between launches, with programmatic dependent launch (Hopper and newer).

A kernel may let the next launch start its programs early (:func:`launch_next`). What earlier
launches wrote may be read after :func:`launch_wait`, which returns when all of them are complete,
or, for one block of rows, after :func:`wait_for` on a counter that the writers :func:`signal`.
Without dependent launch all of these do nothing: launches of a stream follow one another anyway.

How a layer uses it::

    route    waits for everything before it
    gate_up  waits for route; its programs signal ``h`` of their block
    down     waits for ``h`` of its block
    delta    the first programs of gate_up and down, or a launch before them: signals ``state`` of
             its pairs, for which gate_up's programs wait behind their K loop
    finalize waits for everything, and adds down's delta

So the launches flow into one another: the first programs of down run while the last ones of gate_up
still do, and the factors are read beside the weights. Three rules keep it right:

* **Progress.** Programs of a launch start only when every program of the launch before it has
  called ``launch_next`` or ended, and those of one launch in the order of their numbers. So whoever
  spins waits for programs that run already, and those never wait for anything behind them.
* **Completion.** The last program of every launch calls ``launch_wait`` before it ends, so a launch
  is complete only when all before it are: whoever waits for one has waited for all.
* **What may be read without a wait.** What was complete when the launch before passed its
  ``launch_wait``, if that came before its ``launch_next``: the routing, for every GEMM; the
  segments of a step's tokens and the factors that it holds, for its later linears.

Within one launch the second half of the first rule holds without dependent launch too; what is
here waits only with it, :mod:`.linear_split` in any case.

Memory order: the writer's stores, a barrier of its program, a release; the reader's acquire, a
barrier of its program, its loads.
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


@triton.jit
def launch_end(PDL: tl.constexpr):
    """The last program waits for all launches before, so that this one completes after them."""
    if PDL:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            gdc_wait()


@triton.jit
def signal(counter_ptr, amount, PDL: tl.constexpr):
    """Add to a counter once everything that this program has stored is visible."""
    if PDL:
        tl.debug_barrier()
        tl.atomic_add(counter_ptr, amount, sem="release", scope="gpu")


@triton.jit
def mark(state_ptrs, has_delta, mask):
    """Count one more part of these pairs' delta as there: +1, and +256 if it has any value."""
    tl.debug_barrier()
    amount = tl.zeros_like(state_ptrs.to(tl.int64)).to(tl.int32) + 1 + has_delta.to(tl.int32) * 256
    tl.atomic_add(state_ptrs, amount, mask=mask, sem="release", scope="gpu")


@triton.jit
def wait_marked(state_ptrs, parts, mask, PDL: tl.constexpr):
    """Wait until all parts of these pairs' delta are there; return which pairs have one."""
    if PDL:
        state = tl.atomic_add(state_ptrs, 0, mask=mask, sem="acquire", scope="gpu")
        while tl.min(tl.where(mask, state % 256, parts), 0) < parts:
            state = tl.atomic_add(state_ptrs, 0, mask=mask, sem="acquire", scope="gpu")
        tl.debug_barrier()
    else:
        state = tl.load(state_ptrs, mask=mask, other=0)
    return mask & (state >= 256)


@triton.jit
def peek(counter_ptr, PDL: tl.constexpr):
    """Read a counter early, so that :func:`wait_for` need not ask when it is full already."""
    if PDL:
        return tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    else:
        return 0


@triton.jit
def wait_for(counter_ptr, seen, amount, PDL: tl.constexpr):
    """Wait until a counter has reached ``amount``; what its writers stored may be read then.

    ``seen`` is what :func:`peek` returned, or 0.
    """
    if PDL:
        while seen < amount:
            seen = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()
