"""The decode kernel over 4-bit weights: its source runs on the CPU, thread by thread."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_on_cpu import COMPILER, run
from moegraft.activations import apply_activation
from moegraft.backends.cuda import compiler
from moegraft.backends.cuda.compiler import CompileError
from moegraft.backends.cuda.driver import _Attribute, _Launch
from moegraft.backends.cuda.fp4_decode import Fp4Arguments, Fp4Spec
from moegraft.backends.cuda.products import sources
from moegraft.quant.experts import expert_matrix, quantise_experts
from moegraft.testing import ACTIVATIONS, LAYOUTS, random_weights, relative_error
from moegraft.types import ExpertWeights

BF16 = torch.bfloat16
needs_cpp = pytest.mark.skipif(COMPILER is None, reason="needs g++")
needs_compiler = pytest.mark.skipif(
    not compiler.has_compiler(), reason=compiler.why_no_compiler() or ""
)
#: Where column j of 8 goes, in the order that words are widened in.
ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def in_order(rows: torch.Tensor) -> torch.Tensor:
    """Put each 8 columns in the order of the kernel's copies."""
    return rows.unflatten(-1, (-1, 8))[..., ORDER].flatten(-2).contiguous()


def aligned(t: torch.Tensor) -> torch.Tensor:
    """Return the same values at an address that is a multiple of 16."""
    room = torch.empty(t.numel() * t.element_size() + 16, dtype=torch.uint8)
    at = -room.data_ptr() % 16
    found = room[at : at + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
    return found.copy_(t)


@dataclass
class Block:
    """One block of rows of expert ``expert``, and the launch that computes it."""

    weights: ExpertWeights
    spec: Fp4Spec
    rows: int
    expert: int
    x: torch.Tensor  # [rows, K], natural order
    seed: int = 0

    def run(self, folder: Path, early: bool = False, **options: Any) -> torch.Tensor:
        """Return the output ``[rows, N]`` in natural order."""
        spec, w, scales = self.spec, self.weights, self.weights.scales
        assert scales is not None
        side = w.down if spec.down else w.gate_up
        grid = scales.down if spec.down else scales.gate_up
        whole = scales.down_global if spec.down else scales.gate_up_global
        size_n = w.hidden if spec.down else w.intermediate
        generator = torch.Generator().manual_seed(self.seed)
        # Pairs in any order; each token chosen once, so that its pair says which token it is.
        pairs = torch.randperm(self.rows + 3, generator=generator)[: self.rows].int()
        tokens = pairs if spec.down else pairs * spec.top_k
        x = torch.full((self.rows + 3, spec.size_k), torch.nan, dtype=BF16)
        x[pairs.long()] = in_order(self.x)
        num_pairs = (self.rows + 3) * (1 if spec.down else spec.top_k)
        out = aligned(torch.full((num_pairs, size_n), torch.nan, dtype=BF16))
        h = aligned(torch.full((num_pairs, size_n), torch.nan, dtype=BF16))
        row_pair = torch.full((2 * spec.block_m,), 1 << 20, dtype=torch.int32)
        row_pair[spec.block_m : spec.block_m + self.rows] = tokens
        info = torch.tensor([0, self.expert * 256 + self.rows], dtype=torch.int32)
        counter = torch.tensor([0, 5], dtype=torch.int32)
        tiles = -(-size_n // spec.columns)
        bias = w.down_bias if spec.down else w.gate_up_bias
        topk_weights = torch.full((num_pairs,), torch.nan)
        topk_weights[tokens.long()] = torch.rand(self.rows, generator=generator) + 0.5
        keep = [aligned(x), aligned(side), aligned(grid.view(torch.uint8)), row_pair, info]
        p = Fp4Arguments(
            x=keep[0].data_ptr(), weight=keep[1].data_ptr(), scales=keep[2].data_ptr(),
            globals=0 if whole is None else whole.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(), topk_weights=topk_weights.data_ptr(),
            row_pair=row_pair.data_ptr(), block_info=info.data_ptr(),
            h_counter=counter.data_ptr(), h=0 if spec.down else h.data_ptr(), out=out.data_ptr(),
            x_stride=x.stride(0) * 2, weight_stride_e=side.stride(0),
            scale_stride_e=grid.stride(0), out_stride=size_n * 2,
            global_stride=0 if whole is None else whole.stride(0),
            bias_stride=0 if bias is None else bias.stride(0), size_n=size_n, num_tiles=tiles,
            num_pairs=num_pairs, h_tiles=5, splits=2,
        )  # fmt: skip
        if spec.delta is not None:
            sides = 2 if spec.gated else 1
            delta = aligned(torch.full((num_pairs, sides, size_n), torch.nan, dtype=spec.delta))
            slots = torch.full((self.rows + 3,), -1, dtype=torch.int32)
            states = torch.zeros(sides, num_pairs, dtype=torch.int32)
            for i, (row, given) in enumerate(options["deltas"].items()):
                pair = int(tokens[row])
                slots[pair // spec.top_k] = i
                for s, values in enumerate(given):
                    states[s, pair] = 2 if values is None else 2 + 256
                    if values is not None:
                        delta[pair, s] = values.to(spec.delta)
            p.slots, p.states, p.delta = slots.data_ptr(), states.data_ptr(), delta.data_ptr()
        # One block of no rows before the block.
        run(spec, p, 2 * tiles, folder, early)
        assert counter.tolist() == [0, 5 if spec.down else 5 + tiles]
        index = tokens.long()
        assert not out.isfinite().all(1)[[i for i in range(num_pairs) if i not in index]].any()
        found = out[index].float()
        if spec.down:
            return found / topk_weights[index][:, None]
        assert torch.equal(in_order(h[index]), out[index])
        return h[index].float()


def make(
    name: str, down: bool, sizes: tuple[int, int], rows: int, layout: str = "gate_first",
    activation: str = "silu", biases: bool = False, block_m: int = 16, stages: int = 3,
    delta: torch.dtype | None = None, parts: int = 1, warps: int = 4,
) -> Block:  # fmt: skip
    """Random weights of three experts; sizes are H and I."""
    hidden, inter = sizes
    plain = random_weights(
        3, hidden, inter, layout=LAYOUTS[layout], activation=ACTIVATIONS[activation], dtype=BF16,
        biases=biases,
    )  # fmt: skip
    weights = quantise_experts(plain, name)
    act, form = weights.activation, weights.layout
    gated = form.gated and not down
    spec = Fp4Spec(
        block_m, inter if down else hidden, stages, 2, name == "nvfp4", down, gated,
        1 if down else 3, delta=delta, kind=act.kind, alpha=act.alpha, limit=act.limit,
        up_shift=act.up_shift,
        bias=BF16 if biases else None, parts=parts, warps=warps,
    )  # fmt: skip
    if gated:
        gate, up = (form.columns(side, inter).start for side in ("gate", "up"))
        step = 2 if layout == "interleaved" else 1
        index = (0, 0) if step == 2 else (int(gate > 0), int(up > 0))
        spec = replace(spec, starts=(gate, up), step=step, global_index=index)
    x = torch.randn(rows, spec.size_k, generator=torch.Generator().manual_seed(rows)).to(BF16)
    return Block(weights, spec, rows, 1, x)


def expected(block: Block, deltas: dict[int, Any] | None = None) -> torch.Tensor:
    """The same rows by torch, fp64 products of exact weights."""
    w, spec = block.weights, block.spec
    matrix = expert_matrix(w, "down" if spec.down else "gate_up", block.expert).double()
    y = (block.x.double() @ matrix.T).float()
    bias = w.down_bias if spec.down else w.gate_up_bias
    if bias is not None:
        y += bias[block.expert].float()
    if spec.down:
        return y
    sides = ("gate", "up") if w.layout.gated else ("up",)
    for row, given in (deltas or {}).items():
        for side, values in zip(sides, given, strict=True):
            if values is not None:
                y[row, w.layout.columns(side, w.intermediate)] += values.to(spec.delta).float()
    return apply_activation(y, w.activation, w.layout, w.intermediate)


CASES: dict[str, dict[str, Any]] = {
    "nvfp4": {"name": "nvfp4", "sizes": (512, 64), "rows": 5},
    "mxfp4": {"name": "mxfp4", "sizes": (512, 64), "rows": 11},
    "up first": {"name": "nvfp4", "sizes": (256, 96), "rows": 16, "layout": "up_first"},
    "no gate": {
        "name": "nvfp4", "sizes": (256, 160), "rows": 9, "layout": "no_gate", "activation": "relu2",
    },
    "interleaved": {
        "name": "mxfp4", "sizes": (288, 96), "rows": 9, "layout": "interleaved",
        "activation": "clamped", "biases": True,
    },
    "interleaved nvfp4": {
        "name": "nvfp4", "sizes": (320, 96), "rows": 3, "layout": "interleaved", "biases": True,
    },
    "partial step": {"name": "nvfp4", "sizes": (416, 32), "rows": 2},
    "one step": {"name": "mxfp4", "sizes": (64, 64), "rows": 1, "stages": 4},
    "32 rows": {"name": "nvfp4", "sizes": (256, 64), "rows": 27, "block_m": 32},
    "64 rows": {"name": "mxfp4", "sizes": (256, 64), "rows": 51, "block_m": 64},
    "few of 64": {"name": "mxfp4", "sizes": (256, 64), "rows": 12, "block_m": 64},
    "four parts": {"name": "nvfp4", "sizes": (1280, 64), "rows": 3, "parts": 4, "stages": 2},
    "uneven parts": {"name": "mxfp4", "sizes": (672, 64), "rows": 9, "parts": 4},
    "eight warps": {"name": "nvfp4", "sizes": (288, 96), "rows": 7, "warps": 8},
    "eight warps of gpt-oss": {
        "name": "mxfp4", "sizes": (160, 352), "rows": 14, "warps": 8, "layout": "interleaved",
        "activation": "clamped", "biases": True,
    },
}  # fmt: skip


@needs_cpp
@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("down", [False, True], ids=["gate_up", "down"])
@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_block(case: str, down: bool, early: bool, tmp_path: Path) -> None:
    options = dict(CASES[case])
    if down:
        options["sizes"] = options["sizes"][::-1]
    block = make(down=down, **options)
    found = block.run(tmp_path, early)
    assert relative_error(found, expected(block)) < 4e-3


@needs_cpp
@pytest.mark.parametrize("delta", [BF16, torch.float32])
@pytest.mark.parametrize("case", ["nvfp4", "interleaved", "no gate", "64 rows"])
def test_deltas_reach_their_rows_alone(case: str, delta: torch.dtype, tmp_path: Path) -> None:
    block = make(down=False, **CASES[case], delta=delta)
    inter, sides = block.weights.intermediate, 2 if block.spec.gated else 1
    one, two = torch.randn(2, sides, inter, generator=torch.Generator().manual_seed(1))
    last: Any = [None, two[1]] if sides == 2 else [two[0]]
    deltas: dict[int, Any] = {0: list(one), block.rows - 1: last}
    found = block.run(tmp_path, deltas=deltas)
    assert relative_error(found, expected(block, deltas)) < 4e-3
    plain = replace(block, spec=replace(block.spec, delta=None)).run(tmp_path)
    assert torch.equal(found[1 : block.rows - 1], plain[1 : block.rows - 1])
    assert not torch.equal(found[0], plain[0]) and not torch.equal(found[-1], plain[-1])


@needs_cpp
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_one_hot_rows_read_the_exact_weights(name: str, tmp_path: Path) -> None:
    block = make(name, True, (144, 160), 16)
    scales = block.weights.scales
    assert scales is not None
    if scales.down_global is not None:
        exact = torch.exp2(torch.log2(scales.down_global).round())
        block.weights = replace(block.weights, scales=replace(scales, down_global=exact))
    matrix = expert_matrix(block.weights, "down", 1)
    for first in range(0, 160, 16):
        block.x = torch.eye(160, dtype=BF16)[first : first + 16]
        found = block.run(tmp_path)
        # Routing weights round once on the way there, once on the way back.
        wanted = matrix.T[first : first + 16]
        assert ((found - wanted).abs() <= wanted.abs() * 2**-8).all()


SPECS = {
    "q30 gate_up": Fp4Spec(16, 2048, 4, 3, True, False, True, 8, (0, 768), 1, (0, 1)),
    "q30 gate_up with adapters": Fp4Spec(
        16, 2048, 4, 3, True, False, True, 8, (768, 0), 1, (1, 0), delta=BF16
    ),
    "q30 gate_up of one token": Fp4Spec(
        16, 2048, 4, 1, True, False, True, 8, (0, 768), 1, (0, 1), parts=4
    ),
    "q30 down": Fp4Spec(16, 768, 4, 3, True, True, False, 1),
    "gpt-oss gate_up": Fp4Spec(
        64, 2880, 3, 2, False, False, True, 4, (0, 1), 2, delta=torch.float32, alpha=1.702,
        limit=7.0, up_shift=1.0, bias=BF16,
    ),
    "q30 gate_up of eight warps": Fp4Spec(
        32, 2048, 3, 2, True, False, True, 8, (0, 768), 1, (0, 1), delta=BF16, warps=8
    ),
    "gpt-oss down of 64 rows": Fp4Spec(
        64, 2880, 2, 3, False, True, False, 1, bias=BF16, weight=BF16
    ),
    "gpt-oss down": Fp4Spec(32, 2880, 4, 3, False, True, False, 1, bias=BF16, weight=BF16),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", SPECS)
def test_they_compile_for_hopper_without_spills(name: str) -> None:
    spec = SPECS[name]
    options = [*spec.options(), "--ptxas-options=-v"]
    code, log = compiler.compile_now(*sources(spec), options)
    assert code[:4] == b"\x7fELF"
    assert "Compiling entry function 'fp4_decode'" in log, log
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    assert spills == [0, 0], log


@needs_compiler
@pytest.mark.parametrize("name", SPECS)
def test_the_host_gives_as_much_shared_memory_as_the_source_lays_out(name: str) -> None:
    spec = SPECS[name]
    _, headers = sources(spec)
    layout = '#include "fp4_decode_layout.h"'
    room = spec.shared_bytes
    compiler.compile_now(f"{layout}\nstatic_assert(SHARED_END == {room});", headers, spec.options())
    with pytest.raises(CompileError, match="static assertion"):
        compiler.compile_now(
            f"{layout}\nstatic_assert(SHARED_END != {room});", headers, spec.options()
        )


def test_arguments_are_laid_out_as_the_driver_reads_them() -> None:
    assert (ctypes.sizeof(_Attribute), ctypes.sizeof(_Launch)) == (72, 56)
    offsets = _Launch.stream.offset, _Launch.attributes.offset, _Launch.num_attributes.offset
    assert offsets == (32, 40, 48)
