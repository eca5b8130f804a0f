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
#: As :data:`moegraft.quant.formats.UNQUANTIZED`, whose module needs torch.
UNQUANTIZED = "unquantized"
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
        weight_format: ``unquantized``, or one of :data:`moegraft.quant.FORMATS`.

    Example: q30, 64 tokens, 8 of 64 adapters of rank 16 live: tokens 0, 8, 16 .. use the first.
    """

    shape: ModelShape
    tokens: int
    rank: int = 16
    live: int = 8
    slots: int = 64
    kind: str = "separate"
    modes: tuple[str, ...] = (AUTO,)
    weight_format: str = UNQUANTIZED

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
        if self.quantised:
            _check_format(self.shape, self.weight_format)

    @property
    def quantised(self) -> bool:
        """True when the weights are measured in a format, and in bf16 beside it."""
        return self.weight_format != UNQUANTIZED

    @property
    def bytes_needed(self) -> int:
        """Device bytes of weights and adapters; the larger of all kinds, without work buffers."""
        shape, quantised = self.shape, 0
        if self.quantised:
            from moegraft.quant.formats import format_of

            found, inter = format_of(self.weight_format), shape.intermediate
            gate_up = shape.sides * found.num_bytes(inter, shape.hidden)
            quantised = shape.num_experts * (gate_up + found.num_bytes(shape.hidden, inter))
        return shape.weight_bytes + quantised + self.slots * shape.adapter_bytes(self.rank)

    def title(self) -> str:
        """Return one line for people."""
        name = f"{self.shape.name} {self.weight_format}" if self.quantised else self.shape.name
        return (
            f"{name} T={self.tokens} rank={self.rank} {self.kind}, "
            f"{self.live} of {self.slots} adapters live"
        )


def _check_format(shape: ModelShape, weight_format: str) -> None:
    """Raise :class:`MoegraftError` unless a model's layer can have a format."""
    from moegraft.quant.formats import FORMATS, why_no_format

    reason = why_no_format(weight_format)
    if reason is not None:
        raise MoegraftError(f"--format: {reason}.")
    if shape.kind == "gpt_oss" and FORMATS[weight_format].block[0] > 1:
        raise MoegraftError(
            f"--format {weight_format}: its blocks of {FORMATS[weight_format].block[0]} rows would "
            f"mix gate and up of {shape.name}, which are interleaved; take another format or model."
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
    weight_format: str = UNQUANTIZED,
) -> tuple[DecodeRequest, ...]:
    """Return the product of all options, those with the same weights and tables side by side."""
    if not parse_names(kinds):
        raise MoegraftError(f"--kind {kinds!r} names none; choose from {', '.join(KINDS)}.")
    return tuple(
        DecodeRequest(
            model_shape(model), t, rank, live, slots, kind, parse_names(modes), weight_format
        )
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
#: Of quantised weights: the cases that have bars.
FORMAT_SUITES = {"record": ({"tokens": "1,16,64,256", "slots": 8},), "quick": _QUICK}


def default_models(weight_format: str) -> tuple[str, ...]:
    """Return the models that are measured when none is named: those that a format has bars for."""
    return {"nvfp4": ("q30",), "mxfp4": ("gpt_oss_20b",)}.get(weight_format, ("q30", "q35"))


def suite_requests(
    suite: str, models: Iterable[str], weight_format: str = UNQUANTIZED
) -> tuple[DecodeRequest, ...]:
    """Return the requests of a suite for each model, the main table of all models first.

    Raises:
        MoegraftError: an unknown suite or format.
    """
    if suite not in SUITES:
        raise MoegraftError(f"There is no suite {suite!r}; choose one of {', '.join(SUITES)}.")
    names = tuple(models)
    main, *others = (SUITES if weight_format == UNQUANTIZED else FORMAT_SUITES)[suite]
    tables = [(main, name) for name in names]
    tables += [(options, name) for name in names for options in others]
    return tuple(
        request
        for options, name in tables
        for request in decode_requests([name], **options, weight_format=weight_format)
    )
