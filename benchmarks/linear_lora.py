"""What ``linear_lora`` adds to the dense linears of a decode step, per way to cut the work.

A captured graph runs, for each of a few layers: a read of more than the L2 (in place of the
expert weights that stream by), the base product, and the adapters' launch. The same graph with
adapters in its first layer alone is timed too, so that what a step does once is in both; what is
reported is the difference per layer. Every result is checked against fp64 first, after several
replays.

    python benchmarks/linear_lora.py                             # both kernels as they are chosen
    python benchmarks/linear_lora.py --variant split:chunk=256,n=64 --variant old
    python benchmarks/linear_lora.py --sweep --sites o --tokens 64 --adapters 1

A variant is ``old``, ``split`` or ``split:`` with some of: ``chunk``, ``k`` (block_k), ``n``
(block_n), ``w`` (num_warps), ``s`` and ``e`` (most programs that shrink and expand). On a machine
without a GPU it runs tiny sizes in Triton's interpreter, as a test of itself.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from moegraft.adapters.bank import AdapterBank  # noqa: E402
from moegraft.backends.triton.device import device_facts  # noqa: E402
from moegraft.backends.triton.linear_lora import (  # noqa: E402
    LinearTile,
    choose_tile,
    linear_lora_group,
)
from moegraft.backends.triton.linear_split import SplitTile, choose_split  # noqa: E402
from moegraft.bench import records  # noqa: E402
from moegraft.bench.harness import L2_TIMES, Timer, l2_bytes  # noqa: E402
from moegraft.bench.read_kernel import read_all  # noqa: E402
from moegraft.bench.report import text_table  # noqa: E402
from moegraft.factor_table import SiteTable  # noqa: E402
from moegraft.packing import pack_adapter  # noqa: E402
from moegraft.sites import Site, linear_site  # noqa: E402
from moegraft.testing import assert_delta_close, random_factors  # noqa: E402
from moegraft.types import SiteFactors, TokenSlots  # noqa: E402

SCHEMA = "moegraft.linear/1"
DEVICE, DTYPE = torch.device("cuda" if GPU else "cpu"), torch.bfloat16 if GPU else torch.float32
#: (in, widths) of Qwen3-30B-A3B's linears that read the same x.
SITES = {"qkv": (2048, (4096, 512, 512)), "o": (4096, (2048,))} if GPU else {
    "qkv": (96, (64, 32, 32)), "o": (128, (48,))}  # fmt: skip
SWEEP = [
    f"split:chunk={chunk},n={n},w={w}"
    for chunk, n, w in itertools.product((128, 256, 512), (64, 128, 256), (2, 4))
]
FLUSH = (4096, 16, 8)


@dataclass(frozen=True)
class Layer:
    """One layer's linears of one input: factors, weights, x, and where the result goes."""

    tables: tuple[SiteTable, ...]
    held: tuple[tuple[SiteFactors, ...], ...]
    weight: torch.Tensor
    x: torch.Tensor
    out: torch.Tensor

    @property
    def widths(self) -> list[int]:
        """Columns of each linear."""
        return [table.site.projections[0].out_features for table in self.tables]

    def base(self) -> None:
        """Compute the base product into ``out``."""
        torch.mm(self.x, self.weight, out=self.out)


def make_layers(which: str, num_tokens: int, options: argparse.Namespace) -> list[Layer]:
    """Make the layers over one bank that holds as many adapters as there are slots to serve."""
    size_k, widths = SITES[which]
    names = [[f"{layer}.{i}" for i in range(len(widths))] for layer in range(options.layers)]
    sites: list[list[Site]] = [
        [linear_site(name, size_k, width) for name, width in zip(of_layer, widths, strict=True)]
        for of_layer in names
    ]
    flat = [site for of_layer in sites for site in of_layer]
    adapters = max(options.adapters)
    bank = AdapterBank(
        flat, num_slots=max(options.slots, adapters), max_rank=options.max_rank or options.rank,
        dtype=DTYPE, device=DEVICE, arena_bytes=1 << (28 if GPU else 22),
    )  # fmt: skip
    held: dict[str, list[SiteFactors]] = {site.name: [] for site in flat}
    for slot in range(adapters):
        for i, site in enumerate(flat):
            seed = 1000 * slot + i
            found = random_factors(site, options.rank, scale=2.0, seed=seed, dtype=DTYPE)
            held[site.name].append(found)
        factors = {name: of_site[slot] for name, of_site in held.items()}
        bank.write(slot, f"adapter {slot}", pack_adapter(factors, bank.layout, DTYPE))
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=DEVICE, generator=generator).to(DTYPE)

    layers = []
    for of_layer in sites:
        layers.append(
            Layer(
                tuple(bank.site_table(site.name) for site in of_layer),
                tuple(tuple(held[site.name]) for site in of_layer),
                draw(size_k, sum(widths)) * size_k**-0.5,
                draw(num_tokens, size_k),
                torch.empty(num_tokens, sum(widths), dtype=DTYPE, device=DEVICE),
            )
        )
    return layers


def parse_variant(
    text: str, num_tokens: int, layer: Layer, options: argparse.Namespace
) -> LinearTile | SplitTile | None:
    """Return the tile that a variant means for a case; None where it does not exist."""
    name, _, settings = text.partition(":")
    size_k, table = layer.x.shape[1], layer.tables[0]
    if name == "old":
        return choose_tile(
            num_tokens, table.num_slots, sum(layer.widths), table.max_rank, DTYPE.itemsize
        )
    tile = choose_split(num_tokens, size_k, table.max_rank, DTYPE.itemsize)
    if tile is None:
        return None
    names = {"chunk": "chunk", "k": "block_k", "n": "block_n", "w": "num_warps",
             "s": "shrink_programs", "e": "expand_programs"}  # fmt: skip
    pairs = (part.split("=") for part in settings.split(",") if part)
    changes: dict[str, Any] = {names[key]: int(value) for key, value in pairs}
    if "chunk" in changes:
        changes.setdefault("block_k", min(changes["chunk"], 512))
    return replace(tile, **changes)


class Case:
    """The layers of one group of sites and number of tokens."""

    def __init__(self, which: str, num_tokens: int, options: argparse.Namespace) -> None:
        self.options = options
        self.layers = make_layers(which, num_tokens, options)
        size = max(L2_TIMES * l2_bytes(DEVICE), 1 << 20)
        block = FLUSH[0] * FLUSH[1]
        programs = -(-size // (4 * block)) if GPU else 1
        self.other = torch.zeros(programs * block, dtype=torch.int32, device=DEVICE)
        self.sums = torch.empty(programs, dtype=torch.int32, device=DEVICE)
        self.timer = Timer(DEVICE, options.repeats)

    def run(self, add: Callable[[Layer], None], with_adapters: int) -> None:
        """Run all layers once, the first ``with_adapters`` of them with adapters."""
        for i, layer in enumerate(self.layers):
            read_all(self.other, self.sums, *FLUSH)
            layer.base()
            if i < with_adapters:
                add(layer)

    def measure(self, slots: torch.Tensor, tile: LinearTile | SplitTile) -> dict[str, float]:
        """Check one way to cut the work, then time it; microseconds per layer."""
        live = tuple(sorted({int(slot) for slot in slots.tolist() if slot >= 0}))
        kept: list[TokenSlots] = []

        def add(layer: Layer) -> None:
            outs = list(layer.out.split(layer.widths, 1))
            linear_lora_group(layer.x, layer.tables, kept[-1], outs, tile=tile, pdl=self.pdl)

        def step(with_adapters: int) -> None:
            kept.append(TokenSlots(slots, live))  # segments are part of each step
            self.run(add, with_adapters)

        number = len(self.layers)
        one = self.timer.capture(lambda: step(1))
        replay = self.timer.capture(lambda: step(number))
        for _ in range(3):
            replay()
        self.check(slots)
        # In turn, so that a drift of the clock meets both.
        added, base = [], []
        for _ in range(self.options.turns):
            base.append(self.timer.measure(one).median * 1e6)
            added.append((self.timer.measure(replay).median * 1e6 - base[-1]) / (number - 1))
        added.sort()
        return {
            "us": added[len(added) // 2], "us_low": added[0], "us_high": added[-1],
            "layer_us": sorted(base)[len(base) // 2] / number,
        }  # fmt: skip

    @property
    def pdl(self) -> bool:
        """Whether launches may overlap."""
        return device_facts().has_dependent_launch and not self.options.no_pdl

    def check(self, slots: torch.Tensor) -> None:
        """Compare what the last replay left with fp64, layer by layer."""
        for layer in self.layers:
            got, x = layer.out.clone(), layer.x.double()
            layer.base()
            base = layer.out.double()
            expected = base.clone()
            for columns, held in zip(expected.split(layer.widths, 1), layer.held, strict=True):
                for slot, factors in enumerate(held):
                    factor = factors.projections["linear"]
                    a, b = factor.lora_A[0].to(x), factor.lora_B[0].to(x)
                    columns[slots == slot] += factor.scale * (x[slots == slot] @ a.T) @ b.T
            assert_delta_close(got, layer.out, expected, base)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    found = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    found.add_argument("--sites", default="qkv,o")
    found.add_argument("--tokens", type=numbers, default="1,4,16,64" if GPU else "1,20")
    found.add_argument("--adapters", type=numbers, default="1,8")
    found.add_argument("--rank", type=int, default=16)
    found.add_argument("--max-rank", type=int, help="of the bank; the rank unless given")
    found.add_argument("--slots", type=int, default=8, help="of the bank")
    found.add_argument("--variant", action="append", help="may be repeated")
    found.add_argument("--sweep", action="store_true", help="18 ways to split, beside the default")
    found.add_argument("--layers", type=int, default=6 if GPU else 2)
    found.add_argument("--repeats", type=int, default=15 if GPU else 1)
    found.add_argument("--turns", type=int, default=5 if GPU else 1)
    found.add_argument("--no-pdl", action="store_true")
    found.add_argument("--commit")
    found.add_argument("--out", type=Path, help="add records to this file")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when a result was wrong."""
    options = parser().parse_args(arguments)
    variants = options.variant or ["old", "split"]
    if options.sweep:
        variants = [*variants, *SWEEP]
    head = records.header(SCHEMA, options.commit)
    rows, failed = [], False
    for which, num_tokens in itertools.product(options.sites.split(","), options.tokens):
        case = Case(which, num_tokens, options)
        for adapters, variant in itertools.product(options.adapters, variants):
            tile = parse_variant(variant, num_tokens, case.layers[0], options)
            if adapters > num_tokens or tile is None:
                continue
            tokens = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE) % adapters
            found: dict[str, Any]
            try:
                found = case.measure(tokens, tile)
            except AssertionError as error:
                found, failed = {"error": str(error).splitlines()[0]}, True
            record = {
                **head, "sites": which, "tokens": num_tokens, "adapters": adapters,
                "rank": options.rank, "slots": options.slots, "variant": variant,
                "tile": str(tile), "pdl": case.pdl, **found,
            }  # fmt: skip
            if options.out:
                records.append(options.out, record)
            figures = [
                f"{found[k]:.2f}" for k in ("us", "us_low", "us_high", "layer_us") if k in found
            ]
            rows.append([which, str(num_tokens), str(adapters), variant, *(figures or ["-"] * 4)])
            print("  ".join(rows[-1]), found.get("error", ""), file=sys.stderr, flush=True)
    print(text_table(("sites", "T", "adapters", "variant", "us", "low", "high", "layer"), rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
