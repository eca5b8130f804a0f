"""``bench cpu``: layers and a small model on this machine's CPU, beside limits and peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from moegraft import processor
from moegraft.bench import records
from moegraft.bench.cpu_layer import CpuLayerOptions, run_layers
from moegraft.bench.cpu_model import SmallModel, run_model
from moegraft.bench.options import CPU_TOKENS, parse_ints, parse_names
from moegraft.bench.records import Record
from moegraft.bench.shapes import ModelShape
from moegraft.errors import MoegraftError

#: What the bars are for: a layer of Qwen3-30B-A3B with a quarter of its experts.
BAR_SHAPE = ModelShape("q30-quarter", "Qwen3-30B-A3B, 32 experts", 32, 2048, 768, 8)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class CpuOptions:
    """What to measure.

    Attributes:
        shape: of the layer.
        tokens, dtypes: as lists of the command line.
        adapters, rank: live adapters.
        backends: of ours, the first is compared; empty = the plan's choice, and torch's operators.
        turns, seconds: most turns per case, and when no more begin.
        model: the small model, None = without that part.
        threads: of torch; None = as it is.
        commit: written to the records; None = asked from git.
    """

    shape: ModelShape = BAR_SHAPE
    tokens: str = CPU_TOKENS
    dtypes: str = "bfloat16,float32"
    adapters: int = 4
    rank: int = 16
    backends: str = ""
    turns: int = 15
    seconds: float = 20.0
    model: SmallModel | None = field(default_factory=SmallModel)
    threads: int | None = None
    commit: str | None = None

    def __post_init__(self) -> None:
        for name in ("adapters", "rank", "turns"):
            if getattr(self, name) < 1:
                raise MoegraftError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.threads is not None and self.threads < 1:
            raise MoegraftError(f"--threads must be at least 1, got {self.threads}.")
        unknown = [name for name in parse_names(self.dtypes) if name not in DTYPES]
        if unknown or not parse_names(self.dtypes):
            raise MoegraftError(f"--dtype {self.dtypes!r}: choose from {', '.join(DTYPES)}.")
        if self.shape.kind != "swiglu":
            raise MoegraftError(f"{self.shape.title} is no SwiGLU model; choose another.")
        parse_ints(self.tokens, "--tokens")


def run_cpu(options: CpuOptions, say: Callable[[str], None]) -> Iterator[Record]:
    """Measure everything; yields a record for each case.

    Raises:
        MoegraftError: something that is compared with is missing, or a way gives a wrong result.
    """
    before = torch.get_num_threads()
    try:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        head = {
            **records.header(records.CPU, options.commit),
            "device": processor.name(),
            "cores": processor.usable_cores(),
            "threads": torch.get_num_threads(),
            "instructions": _instructions(),
        }
        for found in _parts(options, say):
            yield {**head, **found, "bars": bars_of(found)}
    finally:
        torch.set_num_threads(before)


def _parts(options: CpuOptions, say: Callable[[str], None]) -> Iterator[Record]:
    backends = parse_names(options.backends)
    if not backends:
        backends = ("cpp", "cpu") if _instructions() else ("cpu",)
    for name in parse_names(options.dtypes):
        layer = CpuLayerOptions(
            shape=options.shape,
            tokens=parse_ints(options.tokens, "--tokens"),
            dtype=DTYPES[name],
            adapters=options.adapters,
            rank=options.rank,
            backends=backends,
            turns=options.turns,
            seconds=options.seconds,
        )
        yield from run_layers(layer, say)
    if options.model is not None:
        yield run_model(options.model, options.turns, options.seconds, say)


def _instructions() -> str | None:
    from moegraft.backends.cpp.build import BuildError
    from moegraft.backends.cpp.library import best_library

    library = best_library()
    return None if isinstance(library, BuildError) else library.instructions.name


#: At least so many times as fast as transformers' grouped_mm, by dtype and T.
_FASTER = {
    "bfloat16": {1: 1.0, 8: 1.0, 64: 1.3, 512: 3.0},
    "float32": {1: 1.0, 8: 1.0, 64: 1.5, 512: 1.0},
}
_OF_LIMIT, _WITH_LORA, _OF_PEFT = 2.5, 1.2, 30.0


def bars_of(record: Record) -> list[Record]:
    """Return a record's figures beside what they must reach; [] for other sizes."""
    ways = record["ways"]
    if record["part"] == "model":
        name = "times as fast as PEFT one by one"
        return [_bar(name, ways["peft"], ways["mixed"], _OF_PEFT, at_least=True)]
    if record["model"] != BAR_SHAPE.name or record["tokens"] not in _FASTER["bfloat16"]:
        return []
    ours = record["backends"][0]
    base, lora = ways[f"{ours} base"], ways[f"{ours} lora"]
    faster = _FASTER[record["dtype"]][record["tokens"]]
    found = [
        _bar("times as fast as grouped_mm", ways["grouped_mm"], base, faster, at_least=True),
        _bar("LoRA, times the base", lora, base, _WITH_LORA, at_least=False),
    ]
    if record["dtype"] == "bfloat16":
        limit = {"us": record["limit_us"], "us_least": record["limit_us_least"]}
        found.insert(1, _bar("times the limit", base, limit, _OF_LIMIT, at_least=False))
    return found


def _bar(name: str, above: Record, below: Record, bar: float, at_least: bool) -> Record:
    """Compare medians; the quotient of the least times stands beside, for busy machines."""
    value, least = above["us"] / below["us"], above["us_least"] / below["us_least"]
    met = value >= bar if at_least else value <= bar
    kind = "at least" if at_least else "at most"
    return {"name": name, "value": value, "of_least": least, "bar": bar, "bar_is": kind, "met": met}
