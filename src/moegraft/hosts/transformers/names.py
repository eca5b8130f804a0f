"""Names of single experts in the checkpoints of model families that don't use the usual ones."""

from __future__ import annotations

from moegraft.adapters.writers import ExpertNames

_W = ExpertNames("w1", "w3", "w2")
_SPARSE_BLOCK = ExpertNames("w1", "w3", "w2", "block_sparse_moe")
_FAMILIES = {
    "mixtral": _SPARSE_BLOCK,
    "minimax": _SPARSE_BLOCK,
    "minimax_m2": _SPARSE_BLOCK,
    "phimoe": _SPARSE_BLOCK,
    "lfm2_moe": _W,
}


def expert_names(model_type: str) -> ExpertNames:
    """Return how checkpoints of a family name an expert's projections (``config.model_type``)."""
    return _FAMILIES.get(model_type, ExpertNames())
