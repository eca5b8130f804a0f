"""For ncu: a few layers of today's kernels, one launch after the other (no dependent launch)."""
import sys

import torch
from cases import call, case

from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.fused import run_layer
from moegraft.backends.triton.tiles import choose_config
from moegraft.problem import Problem

fmt, model, T = sys.argv[1], sys.argv[2], int(sys.argv[3])
c = case(fmt, model, T, {})
config, _ = choose_config(Problem.of(c.weights, T, c.request.shape.top_k, 16), device_facts())
config = config.overlapping(False)
for i in range(3):
    run_layer(call(c, i % len(c.sets), False), config)
torch.cuda.synchronize()
print("ok", config, flush=True)
