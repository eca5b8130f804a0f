"""Times of today's layer for other tiles; `warm` compiles one variant into Triton's cache."""
import json
import sys
from dataclasses import replace

import torch
from cases import DEV, call, case

from moegraft.backends.triton.config import GemmConfig
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.fused import run_layer
from moegraft.backends.triton.tiles import choose_config
from moegraft.bench.harness import Timer
from moegraft.problem import Problem

G = lambda n, k, w, s: GemmConfig(n, k, w, s, True)
VARIANTS = {
    "today": (None, None), "gu128": (G(128, 128, 4, 4), None), "gu128w8": (G(128, 128, 8, 4), G(128, 128, 8, 4)),
    "k256": (G(64, 256, 4, 3), G(128, 256, 4, 3)), "s3": (G(64, 128, 4, 3), G(128, 128, 4, 3)),
    "s5": (G(64, 128, 4, 5), G(128, 128, 4, 5)), "s2": (G(64, 128, 4, 2), G(128, 128, 4, 2)),
    "d64": (None, G(64, 128, 4, 4)), "k64": (G(64, 64, 4, 5), G(128, 64, 4, 5)), "k32": (G(128, 64, 4, 4), G(128, 64, 4, 4)),
}
fmt, model, T = sys.argv[1], sys.argv[2], int(sys.argv[3])
only = [v for v in sys.argv[4:] if v in VARIANTS] or list(VARIANTS)[:8]
c = case(fmt, model, T, {})
start, _ = choose_config(Problem.of(c.weights, T, c.request.shape.top_k, 16), device_facts())
timer = Timer(DEV, 20)
n = len(c.sets)
for name in only:
    gu, dn = VARIANTS[name]
    config = replace(start, gate_up=gu or start.gate_up, down=dn or start.down).overlapping(True)
    try:
        if "--warm" in sys.argv:
            run_layer(call(c, 0, False), config); torch.cuda.synchronize(); continue
        def base():
            for i in range(n): run_layer(call(c, i, False), config)
        us = timer.measure(timer.capture(base), n).median * 1e6
        print(json.dumps({"fmt": fmt, "T": T, "tiles": name, "base_us": round(us, 1)}), flush=True)
    except Exception as e:
        print(json.dumps({"fmt": fmt, "tiles": name, "error": str(e)[:160]}), flush=True)
