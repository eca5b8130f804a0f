"""What ``bench prefill`` measures: options of the command line as checked data; needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moegraft.bench.options import (
    AUTO,
    KINDS,
    UNQUANTIZED,
    DecodeRequest,
    default_models,
    parse_ints,
    parse_names,
)
from moegraft.bench.shapes import model_shape
from moegraft.errors import MoegraftError

#: How the adapters lie in a batch.
SEQUENCES, INTERLEAVED, ONE, BASE_ONLY = "sequences", "interleaved", "one", "base"
BATCHES = (SEQUENCES, INTERLEAVED, ONE, BASE_ONLY)
PREFILL_TOKENS = "512,1024,2048,8192,32768"
#: Bytes per element of h, of x and y in 16 bits, and of what unfused stages keep in fp32.
_HALF, _FULL = 2, 4
#: Copies of a layer's rows at one time: graphs of base, LoRA and grouped products, an eager call.
_COPIES = 4


@dataclass(frozen=True)
class PrefillRequest(DecodeRequest):
    """One row of a measurement at prefill sizes; the other attributes as in decode.

    Attributes:
        batch: ``sequences``: each adapter has one run of neighbouring tokens; ``interleaved``:
            token by token in turn; ``one``: all tokens use one adapter; ``base``: the graph with
            adapters, when all rows are base rows.

    Example: q30, 4,096 tokens in ``sequences``, 8 adapters: tokens 0 .. 511 use the first.
    """

    batch: str = SEQUENCES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch not in BATCHES:
            raise MoegraftError(
                f"There is no batch {self.batch!r}; choose from {', '.join(BATCHES)}."
            )
        if self.batch == ONE and self.live != 1:
            raise MoegraftError(f"A batch 'one' uses one adapter, not {self.live}.")

    @property
    def bytes_needed(self) -> int:
        """Device bytes of weights, adapters and rows of pairs; the most that any mode takes."""
        shape, pairs = self.shape, self.tokens * self.shape.top_k
        inter, hidden = shape.intermediate, shape.hidden
        per_pair = hidden * (_HALF + _FULL) + inter * (_HALF + shape.sides * _FULL)
        return super().bytes_needed + _COPIES * pairs * per_pair

    def title(self) -> str:
        """Return one line for people."""
        return f"{super().title()}, batch {self.batch}"


def prefill_requests(
    models: Iterable[str],
    tokens: str = PREFILL_TOKENS,
    ranks: str = "16",
    adapters: str = "8",
    slots: int = 8,
    kinds: str = "separate",
    batches: str = SEQUENCES,
    modes: str = AUTO,
    weight_format: str = UNQUANTIZED,
) -> tuple[PrefillRequest, ...]:
    """Return the product of all options; a batch ``one`` comes once, whatever ``adapters``."""
    for option, text, known in (("--kind", kinds, KINDS), ("--batch", batches, BATCHES)):
        if not parse_names(text):
            raise MoegraftError(f"{option} {text!r} names none; choose from {', '.join(known)}.")
    found = (
        PrefillRequest(
            model_shape(model),
            t,
            rank,
            1 if batch == ONE else live,
            slots,
            kind,
            parse_names(modes),
            weight_format,
            batch,
        )
        for model in models
        for rank in parse_ints(ranks, "--rank")
        for kind in parse_names(kinds)
        for batch in parse_names(batches)
        for live in parse_ints(adapters, "--adapters")
        for t in parse_ints(tokens, "--tokens")
    )
    return tuple(dict.fromkeys(found))


#: What ``--suite record`` measures of each model: the main curve, other orders of the adapters,
#: one adapter, no adapter in the graph with adapters, and a high rank.
_RECORD: tuple[dict[str, Any], ...] = (
    {"tokens": f"{PREFILL_TOKENS},65536"},
    {"tokens": "512,2048,8192", "batches": INTERLEAVED},
    {"tokens": "2048,8192", "batches": f"{ONE},{BASE_ONLY}"},
    {"tokens": "2048,8192", "ranks": "64"},
)
_QUICK: tuple[dict[str, Any], ...] = ({"tokens": "512,8192"},)
PREFILL_SUITES = {"record": _RECORD, "quick": _QUICK}
#: Of quantised weights: the case that has bars.
FORMAT_PREFILL_SUITES = {"record": ({"tokens": "8192"},), "quick": _QUICK}


def default_prefill_models(weight_format: str) -> tuple[str, ...]:
    """Return the models that are measured when none is named; one for a format."""
    found = default_models(weight_format)
    return found if weight_format == UNQUANTIZED else found[:1]


def prefill_suite(
    suite: str, models: Iterable[str], weight_format: str = UNQUANTIZED
) -> tuple[PrefillRequest, ...]:
    """Return the requests of a suite, model by model.

    Raises:
        MoegraftError: an unknown suite or format.
    """
    if suite not in PREFILL_SUITES:
        raise MoegraftError(
            f"There is no suite {suite!r}; choose one of {', '.join(PREFILL_SUITES)}."
        )
    tables = (PREFILL_SUITES if weight_format == UNQUANTIZED else FORMAT_PREFILL_SUITES)[suite]
    return tuple(
        request
        for name in models
        for options in tables
        for request in prefill_requests([name], **options, weight_format=weight_format)
    )
