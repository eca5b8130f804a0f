"""The yardstick: PEFT, one adapter at a time, each on a fresh copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moegraft.demo.batch import Batch


@dataclass(frozen=True)
class RowCheck:
    """One row of the mixed batch against the same row under PEFT alone.

    Attributes:
        same: True when all new tokens are identical.
        tokens: how many were compared.
        first_difference: index of the first new token that differs, None when none does.
        margin: how far the reference's two best logits are apart there; a margin near zero means
            a tie that rounding decides.
    """

    same: bool
    tokens: int
    first_difference: int | None = None
    margin: float | None = None


def peft_models(base: Any, adapters: Mapping[str, Path]) -> dict[str | None, Any]:
    """Return adapter name -> a PEFT model on its own copy of ``base``; None -> ``base`` itself."""
    from peft import PeftModel

    models: dict[str | None, Any] = {None: base}
    for name, folder in adapters.items():
        fresh = copy.deepcopy(base)
        models[name] = PeftModel.from_pretrained(fresh, str(folder)).eval()
    return models


def compare_rows(
    batch: Batch, new_ids: torch.Tensor, models: Mapping[str | None, Any], new_tokens: int
) -> list[RowCheck]:
    """Run every adapter's rows alone under PEFT and compare them with the mixed batch's.

    Args:
        batch: the mixed batch.
        new_ids: what it wrote, ``[rows, up to new_tokens]``.
        models: see :func:`peft_models`.
        new_tokens: limit that it ran with.
    """
    mixed = _filled(new_ids, new_tokens, batch.pad_id)
    checks: dict[int, RowCheck] = {}
    for name, model in models.items():
        rows = batch.rows_of(name)
        if not rows:
            continue
        part = batch.select(rows)
        with torch.no_grad():
            out = model.generate(**part.arguments(new_tokens))
        expected = _filled(out[:, part.length :], new_tokens, batch.pad_id)
        for row, wanted in zip(rows, expected, strict=True):
            checks[row] = _compare(model, batch.select([row]), mixed[row], wanted)
    return [checks[row] for row in sorted(checks)]


def _compare(model: Any, row: Batch, got: torch.Tensor, wanted: torch.Tensor) -> RowCheck:
    different = (got != wanted).nonzero().flatten().tolist()
    if not different:
        return RowCheck(True, len(wanted))
    first = int(different[0])
    ids = torch.cat([row.input_ids[0], wanted[:first]])[None]
    mask = torch.cat([row.attention_mask[0], torch.ones(first, dtype=torch.int64)])[None]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[0, -1].float()
    best: Sequence[float] = logits.topk(2).values.tolist()
    return RowCheck(False, len(wanted), first, best[0] - best[1])


def _filled(ids: torch.Tensor, length: int, pad_id: int) -> torch.Tensor:
    """Pad ``[rows, n]`` on the right to ``length``: a batch stops when its last row ends."""
    return torch.nn.functional.pad(ids, (0, length - ids.shape[1]), value=pad_id)
