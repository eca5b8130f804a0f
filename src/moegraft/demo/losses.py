"""The held-out loss of every adapter on every domain, computed in mixed batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

#: Passages per batch; every one is in it once per adapter and once for the base model.
_PASSAGES = 4


def heldout_losses(
    graft: Any,
    tokenizer: Any,
    adapters: Sequence[str],
    heldout: Mapping[str, Sequence[str]],
) -> dict[str | None, dict[str, float]]:
    """Return adapter (None = base) -> domain -> mean loss per token in nats.

    Args:
        graft: the attached model with the adapters loaded.
        tokenizer: its tokenizer.
        adapters: their names.
        heldout: domain -> passages.
    """
    names: list[str | None] = [None, *adapters]
    losses: dict[str | None, dict[str, float]] = {name: {} for name in names}
    for domain, texts in heldout.items():
        total = torch.zeros(len(names))
        count = 0
        for first in range(0, len(texts), _PASSAGES):
            part = list(texts[first : first + _PASSAGES])
            sums, tokens = _score(graft, tokenizer, names, part)
            total += sums
            count += tokens
        for name, value in zip(names, total.tolist(), strict=True):
            losses[name][domain] = value / count
    return losses


def _score(
    graft: Any, tokenizer: Any, names: Sequence[str | None], texts: list[str]
) -> tuple[torch.Tensor, int]:
    """Return the summed loss per name, and the number of predicted tokens, for some passages."""
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    ids = encoded["input_ids"].repeat(len(names), 1)
    mask = encoded["attention_mask"].repeat(len(names), 1)
    rows = [name for name in names for _ in texts]
    logits = graft.forward(input_ids=ids, attention_mask=mask, adapters=rows).logits
    predicted = mask[:, 1:].bool()
    loss = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none")
    sums = (loss * predicted).sum(1).view(len(names), len(texts)).sum(1)
    return sums, int(predicted[: len(texts)].sum())
