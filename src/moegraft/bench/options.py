"""What to measure: options of the command line as checked data; needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moegraft.bench.shapes import ModelShape, is_number, model_shape
from moegraft.errors import MoegraftError

#: The plan's own choice, beside the names of :data:`moegraft.call.Mode`.
AUTO = "auto"
MODES = (AUTO, "in_kernel", "fused_serial", "two_stream", "serial")
KINDS = ("separate", "fused", "shared_outer")
DECODE_TOKENS = "1,4,16,32,64,128,256"
CPU_TOKENS = "1,8,64,512"


@dataclass(frozen=True)
class DecodeRequest:
    """One row of a measurement.

    Attributes:
        shape: the model's layer.
        tokens: T.
        rank: of every adapter.
        live: adapters that the batch uses, by its tokens in turn.
        slots: adapters that the table holds.
        kind: ``separate``: one A each for gate and up; ``fused``: one A for both;
            ``shared_outer``: also gate/up's A and down's B are shared by all experts.
        modes: overlap modes to time.

    Example: q30, 64 tokens, 8 of 64 adapters of rank 16 live: tokens 0, 8, 16 .. use the first.
    """

    shape: ModelShape
    tokens: int
    rank: int = 16
    live: int = 8
    slots: int = 64
    kind: str = "separate"
    modes: tuple[str, ...] = (AUTO,)

    def __post_init__(self) -> None:
        for name in ("tokens", "rank", "live", "slots"):
            if getattr(self, name) < 1:
                raise MoegraftError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.live > self.slots:
            raise MoegraftError(
                f"{self.live} adapters can't be live in {self.slots} slots; raise --slots."
            )
        if self.kind not in KINDS:
            raise MoegraftError(
                f"There is no kind of adapter {self.kind!r}; choose {', '.join(KINDS)}."
            )
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            raise MoegraftError(f"Unknown modes {unknown}; choose from {', '.join(MODES)}.")

    @property
    def bytes_needed(self) -> int:
        """Device bytes of weights and adapters; the larger of all kinds, without work buffers."""
        return self.shape.weight_bytes + self.slots * self.shape.adapter_bytes(self.rank)

    def title(self) -> str:
        """Return one line for people."""
        return (
            f"{self.shape.name} T={self.tokens} rank={self.rank} {self.kind}, "
            f"{self.live} of {self.slots} adapters live"
        )


def parse_ints(text: str, option: str) -> tuple[int, ...]:
    """Return the numbers of ``"1,4,16"``; MoegraftError names the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(is_number(part) for part in parts):
        raise MoegraftError(f"{option} {text!r}: give whole numbers above 0, such as 1,16,64.")
    return tuple(int(part) for part in parts)


def parse_names(text: str) -> tuple[str, ...]:
    """Return the words of ``"a,b"``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def decode_requests(
    models: Iterable[str],
    tokens: str = DECODE_TOKENS,
    ranks: str = "16",
    adapters: str = "8",
    slots: int = 64,
    kinds: str = "separate",
    modes: str = AUTO,
) -> tuple[DecodeRequest, ...]:
    """Return the product of all options, those with the same weights and tables side by side."""
    if not parse_names(kinds):
        raise MoegraftError(f"--kind {kinds!r} names none; choose from {', '.join(KINDS)}.")
    return tuple(
        DecodeRequest(model_shape(model), t, rank, live, slots, kind, parse_names(modes))
        for model in models
        for rank in parse_ints(ranks, "--rank")
        for kind in parse_names(kinds)
        for live in parse_ints(adapters, "--adapters")
        for t in parse_ints(tokens, "--tokens")
    )


#: What ``--suite record`` measures of each model: the main table, many slots, the overlap modes
#: side by side, one adapter, a high rank, and factors that experts share.
_RECORD: tuple[dict[str, Any], ...] = (
    {"slots": 8},
    {"tokens": "64,128,256", "kinds": "shared_outer", "slots": 8},
    {"tokens": "64,256", "ranks": "64", "slots": 8},
    {"tokens": "16,64,256"},
    {"tokens": "16,64,256", "modes": "in_kernel,fused_serial,two_stream,serial"},
    {"tokens": "16,64,256", "adapters": "1"},
)
_QUICK: tuple[dict[str, Any], ...] = ({"tokens": "1,16,64", "modes": "auto"},)
SUITES = {"record": _RECORD, "quick": _QUICK}


def suite_requests(suite: str, models: Iterable[str]) -> tuple[DecodeRequest, ...]:
    """Return the requests of a suite for each model, the main table of all models first.

    Raises:
        MoegraftError: an unknown suite.
    """
    if suite not in SUITES:
        raise MoegraftError(f"There is no suite {suite!r}; choose one of {', '.join(SUITES)}.")
    names = tuple(models)
    main, *others = SUITES[suite]
    tables = [(main, name) for name in names]
    tables += [(options, name) for name in names for options in others]
    return tuple(
        request for options, name in tables for request in decode_requests([name], **options)
    )
