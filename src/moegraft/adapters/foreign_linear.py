"""The slot tensors of an engine's linears, as tables that one launch can serve together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moegraft.adapters.foreign_pool import ForeignFactor, ForeignPool
from moegraft.errors import AdapterError
from moegraft.factor_table import SiteTable
from moegraft.sites import Projection, Site, linear_site


class LinearPool:
    """Tables over the slot tensors of one linear, or of the slices of a merged one (q, k and v).

    Args:
        name: the linear's, for messages.
        lora_a: per slice vLLM's ``[S, 1, R, in]``; all have the same ``in``.
        lora_b: per slice vLLM's ``[S, 1, out, R]``; read in place where it is stored rank-major.
        packed: all entries of ``lora_a`` are one tensor ``[S, 1, rows, in]``, SGLang's: a slot of
            rank r has the first slice's A in rows 0 to r, the next one's behind them, and so on.

    Attributes:
        pool: the slices as projections ``0``, ``1``, .. of one site.
        tables: one per slice, each a linear's; they share base address and records, so that a
            :class:`moegraft.linear.LinearLoraGroup` of them is one launch on a GPU.

    Raises:
        AdapterError: shapes, dtypes, devices or alignment don't fit.

    Example: q, k and v of 64, 16 and 16 columns over 32 inputs: A three times ``[S, 1, R, 32]``, B
    ``[S, 1, 64, R]`` and twice ``[S, 1, 16, R]``.
    """

    def __init__(
        self,
        name: str,
        lora_a: Sequence[torch.Tensor],
        lora_b: Sequence[torch.Tensor],
        *,
        packed: bool = False,
    ) -> None:
        if len(lora_a) != len(lora_b) or not lora_a:
            raise AdapterError(f"{name}: {len(lora_a)} slices of A and {len(lora_b)} of B.")
        for tensor in (*lora_a, *lora_b):
            if tensor.dim() != 4:
                raise AdapterError(
                    f"{name}: slot tensors {tuple(tensor.shape)} must be [S, 1, R, in], "
                    "[S, 1, out, R]."
                )
        self._packed = packed
        sizes = [(a.shape[3], b.shape[2]) for a, b in zip(lora_a, lora_b, strict=True)]
        projections = tuple(Projection(str(i), *size) for i, size in enumerate(sizes))
        self.pool = ForeignPool(
            Site(name, "linear", projections),
            {
                projection.name: ForeignFactor(a, b, behind=i if packed else 0)
                for i, (projection, a, b) in enumerate(
                    zip(projections, lora_a, lora_b, strict=True)
                )
            },
        )
        whole = self.pool.table
        assert whole.host_ranks is not None
        self.tables = tuple(
            SiteTable(
                linear_site(f"{name}[{i}]", *size),
                whole.arena,
                whole.records[:, i : i + 1],
                None,
                b.shape[3],
                host_ranks=whole.host_ranks[:, i : i + 1],
            )
            for i, (size, b) in enumerate(zip(sizes, lora_b, strict=True))
        )

    def load(self, slot: int, ranks: Sequence[int], scale: float = 1.0) -> None:
        """Say which rank each slice of a slot holds now (0 = none); scale 1 where B has it in it.

        Raises:
            AdapterError: no such slot, a rank over the pool's, or two ranks where A is packed; the
                slot holds what it held.
        """
        if self._packed and len({*ranks} - {0}) > 1:
            raise AdapterError(
                f"{self.pool.site.name}: ranks {list(ranks)}, but the slices' A lie behind one "
                "another in one tensor, by one rank."
            )
        self.pool.load(slot, {str(i): rank for i, rank in enumerate(ranks)}, scale)

    def clear(self, slot: int) -> None:
        """Say that a slot holds nothing."""
        self.pool.clear(slot)
