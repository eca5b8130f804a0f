"""Times of the layer at one T: today's kernels, the CUDA ones and their variants, bf16; checked first."""
import json
import sys
import time
from dataclasses import replace

import torch
from cases import DEV, call, case

from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.fused import run_layer
from moegraft.backends.triton.tiles import choose_config
from moegraft.backends.cuda import products
from moegraft.bench.cases import make_case, random_layer
from moegraft.bench.harness import Timer, l2_bytes
from moegraft.bench.options import DecodeRequest
from moegraft.bench.shapes import model_shape
from moegraft.problem import Problem

real_sources = products.sources


def ahead(spec):
    source, headers = real_sources(spec)
    old = "cp.async.cg.shared.global [%0], [%1], 16, %2;"
    assert old in headers["hopper.h"]
    new = old.replace("global [", "global.L2::128B [")
    return source, {**headers, "hopper.h": headers["hopper.h"].replace(old, new)}


warm, args = "--warm" in sys.argv, [a for a in sys.argv[1:] if a != "--warm"]
fmt, model = args[0], args[1]
made: dict = {}
timer = Timer(DEV, 20)


def stages(c, gu, dn):
    return replace(c, gate_up=replace(c.gate_up, num_stages=gu), down=replace(c.down, num_stages=dn))


def block(c, m):
    return replace(c, block_m=m)


def rel(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


for T in (int(t) for t in args[2].split(",")):
    c = case(fmt, model, T, made)
    n = len(c.sets)
    problem = Problem.of(c.weights, T, c.request.shape.top_k, 16)
    cuda, why = choose_config(problem, device_facts())
    assert cuda.cuda_fp4, why
    from moegraft.backends.triton.weights.tiles import quantised_config

    today = quantised_config(problem).overlapping(True)
    cuda = cuda.overlapping(True)
    variants = {"cuda": cuda, "today": today}
    for s in ((4, 4), (3, 4), (4, 3), (5, 5), (2, 2)):
        variants[f"cuda s{s[0]}{s[1]}"] = stages(cuda, *s)
    if T >= 256:
        variants["cuda m32"] = stages(block(cuda, 32), 3, 3)
        variants["cuda m64"] = stages(block(cuda, 64), 2, 2)
    if T == 1:
        for q in (1, 2, 4):
            variants[f"cuda parts{q}"] = replace(cuda, gate_up_parts=q, down_parts=q)
    if T <= 64:
        variants["cuda d132"] = replace(cuda, delta_programs=132)
        variants["cuda d528"] = replace(cuda, delta_programs=528)
    if T >= 16:
        variants["cuda L2_128"] = cuda  # last but bf16: each copy asks the L2 for the line's rest
    wanted = {}
    for name, config in variants.items():
        found = {"fmt": fmt, "T": T, "tiles": name}
        products.sources = ahead if name == "cuda L2_128" else real_sources
        if name == "cuda L2_128":
            products.kernel.cache_clear()
        try:
            for lora in (False, True):
                if name.startswith("cuda d") and not lora:
                    continue
                got = run_layer(call(c, 0, lora), config)
                torch.cuda.synchronize()
                if "cuda" == name:
                    wanted[lora] = got
                    found["finite"] = bool(got.isfinite().all())
                    serial = run_layer(call(c, 0, lora), config.overlapping(False))
                    found["same_bits_serial"] = bool(torch.equal(got, serial))
                else:
                    found["err_lora" if lora else "err"] = round(rel(got, wanted[lora]), 6)
                if warm:
                    continue
                def run():
                    for i in range(n):
                        run_layer(call(c, i, lora), config)
                found["lora_us" if lora else "base_us"] = round(timer.measure(timer.capture(run), n).median * 1e6, 1)
            if name == "today" and not warm:
                t = c.traffic()
                found["traffic"] = {k: v for k, v in t.record().items() if isinstance(v, (int, float))}
        except Exception as e:  # noqa: BLE001
            found["error"] = f"{type(e).__name__}: {str(e)[:200]}"
        print(json.dumps(found), flush=True)
    products.kernel.cache_clear()
    products.sources = real_sources
    if warm:
        continue
    try:
        shape = model_shape(model)
        if "bf16" not in made:
            made["bf16"] = random_layer(shape, DEV)
        b = make_case(DecodeRequest(shape, T, 16, 8, 8), made["bf16"], made["t", model], l2_bytes(DEV))
        config, _ = choose_config(Problem.of(b.weights, T, shape.top_k, 16), device_facts())
        config = config.overlapping(True)
        def run():
            for i in range(len(b.sets)):
                run_layer(call(b, i, False), config)
        print(json.dumps({"fmt": "bf16", "model": model, "T": T, "base_us": round(timer.measure(timer.capture(run), len(b.sets)).median * 1e6, 1)}), flush=True)
    except Exception as e:  # noqa: BLE001
        print(json.dumps({"bf16": f"{type(e).__name__}: {str(e)[:200]}"}), flush=True)
