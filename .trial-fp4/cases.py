"""Layers of random 4-bit weights, made on the GPU in a second, and their inputs."""
import dataclasses
import math

import torch

from moegraft.bench.cases import make_case, random_table, style_of
from moegraft.bench.harness import l2_bytes
from moegraft.bench.options import DecodeRequest
from moegraft.bench.shapes import model_shape
from moegraft.types import ExpertWeights, WeightLayout
from moegraft.weight_scales import WeightScales

DEV = torch.device("cuda")


def weights(fmt: str, model: str) -> ExpertWeights:
    """Random codes; scales so that gate, up and y are of size 1."""
    s = model_shape(model)
    act, layout = style_of(s)
    layout = WeightLayout(layout.gate_up_order, True)
    g = torch.Generator(DEV).manual_seed(0)
    E, H, I = s.num_experts, s.hidden, s.intermediate
    width = 16 if fmt == "nvfp4" else 32

    def codes(rows, cols):
        return torch.randint(0, 256, (E, rows, cols // 2), dtype=torch.uint8, device=DEV, generator=g)

    def scales(rows, cols):
        shape = (E, rows, cols // width)
        if fmt == "nvfp4":  # e4m3 codes of about 16 to 240
            found = torch.randint(88, 120, shape, dtype=torch.uint8, device=DEV, generator=g)
            return found.view(torch.float8_e4m3fn)
        power = 127 - round(math.log2(cols**0.5 * 3))
        return torch.randint(power - 1, power + 2, shape, dtype=torch.uint8, device=DEV, generator=g)

    def whole(cols, *shape):
        if fmt != "nvfp4":
            return None
        base = 1 / (cols**0.5 * 3 * 80)
        return base * (0.5 + torch.rand(*shape, device=DEV, generator=g))

    def bias(n):
        if s.kind != "gpt_oss":
            return None
        return torch.randn(E, n, device=DEV, generator=g).mul(0.5).bfloat16()

    parts = 1 if layout.gate_up_order == "interleaved" else 2
    return ExpertWeights(
        codes(2 * I, H), codes(H, I), bias(2 * I), bias(H), act, layout, fmt,
        WeightScales(scales(2 * I, H), scales(H, I), whole(H, E, parts), whole(I, E)),
    )


def case(fmt: str, model: str, T: int, made: dict, rank: int = 16):
    r = DecodeRequest(model_shape(model), T, rank, 8, 8, weight_format=fmt)
    key = (fmt, model)
    if key not in made:
        made[key] = weights(fmt, model)
    if ("t", model) not in made:
        made["t", model] = random_table(r.shape, rank, 8, "separate", DEV)
    return make_case(r, made[key], made["t", model], l2_bytes(DEV))


def call(c, i: int, lora: bool):
    from moegraft.call import LayerCall
    from moegraft.types import TokenSlots

    s = c.sets[i]
    return LayerCall(s.x, s.topk_ids, s.topk_weights, c.weights, c.table, TokenSlots.captured(c.slots) if lora else None)
