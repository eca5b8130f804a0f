"""What decode with quantised weights on one H200 should reach; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from moegraft.bench.bars import Bar, Outcome, against_peer_base, of_base, of_lora, outcomes, ratio
from moegraft.bench.records import Record


def _share(record: Record) -> float | None:
    return of_lora(record, "share_of_limit")


def _against_bf16(record: Record) -> float | None:
    return ratio(record.get("bf16_base", {}).get("us"), of_base(record, "us"))


_LIMIT = "LoRA, share of its limit"
_PEER = "LoRA over the best peer without LoRA"
_BF16 = "bf16 base over base"
_MODELS = ("q30", "q35")
_fp8 = partial(Bar, weight_format="fp8-block")
_peer = partial(_fp8, _PEER, measure=against_peer_base, at_most=True)
BARS = (
    _fp8(_LIMIT, _MODELS, (64,), _share, 0.90),
    _peer(models=_MODELS, tokens=(1, 16, 64), bar=1.10),
    _peer(models=("q30",), tokens=(256,), bar=1.2),
    _peer(models=("q35",), tokens=(256,), bar=1.3),
    *(
        Bar(what, (model,), (64,), measure, bar, stretch, weight_format=weight_format)
        for weight_format, model in (("nvfp4", "q30"), ("mxfp4", "gpt_oss_20b"))
        for what, measure, bar, stretch in (
            (_BF16, _against_bf16, 2.2, 3.0),
            (_LIMIT, _share, 0.65, 0.85),
        )
    ),
)


def decode_bars(found: Sequence[Record]) -> list[Outcome]:
    """Return the bars of decode records, as :func:`moegraft.bench.bars.outcomes`."""
    return outcomes(BARS, found)
