"""How LoRA factors lie in memory: one arena, found through a table of offsets.

Every (slot, projection) of a model has one 64-byte record; kernels read it, nothing else:

=====  =======  ==========================================================================
word   type     meaning
=====  =======  ==========================================================================
0      int64    offset of A from the arena's base, in 16-byte units
1      int64    offset of B, likewise. B is stored rank-major ``[Eb, R, out]``
2, 3   int64    elements between two experts' A (B); 0 = one entry shared by all experts
4, 5   int64    elements between two rank rows of A (B), a multiple of 16 bytes
6      2xint32  live rank (0 = no delta) and 1 if A is the same memory as the previous
                projection's A (gate and up of a fused adapter): shrink once
7      2xfp32   scale, unused
=====  =======  ==========================================================================

The live rank is a prefix of the rank rows, so odd ranks stay aligned. Behind the records of a
slot lies its expert map, int32 ``[E]`` per experts site: expert -> entry, -1 = no delta.
One contiguous row per slot holds both, so one stream-ordered copy flips all layers at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from moegraft.sites import Site

UNIT_BYTES = 16
RECORD_WORDS = 8
A_OFFSET, B_OFFSET, A_EXPERT_STRIDE, B_EXPERT_STRIDE, A_ROW_STRIDE, B_ROW_STRIDE = range(6)
#: Index into the record viewed as int32: live rank, shared-A flag. As fp32: scale.
RANK_I32, SHARED_A_I32, SCALE_F32 = 12, 13, 14


def align(elements: int, dtype: torch.dtype) -> int:
    """Round a number of elements up to a whole number of 16-byte units."""
    unit = UNIT_BYTES // dtype.itemsize
    return -(-elements // unit) * unit


@dataclass(frozen=True)
class TableLayout:
    """Where each site's records and expert map lie in a slot's table row.

    Attributes:
        sites: all sites, in order.
        first_record: site name -> index of its first record.
        map_offset: experts site name -> offset of its expert map in int32 words.
        row_words: int64 words in one slot's row.

    Example: one experts site (E=5, three projections) and one linear: 4 records = 32 words, the
    map starts at int32 word 64 and takes 5, so ``row_words`` is 35.
    """

    sites: tuple[Site, ...]
    first_record: Mapping[str, int]
    map_offset: Mapping[str, int]
    row_words: int

    @staticmethod
    def of(sites: Sequence[Site]) -> TableLayout:
        """Lay the sites out one after the other."""
        first: dict[str, int] = {}
        record = 0
        for site in sites:
            first[site.name] = record
            record += len(site.projections)
        map_offset: dict[str, int] = {}
        word = 2 * RECORD_WORDS * record
        for site in sites:
            if site.kind == "experts":
                map_offset[site.name] = word
                word += site.num_experts
        return TableLayout(tuple(sites), first, map_offset, (word + 1) // 2)

    def records(self, table: torch.Tensor, site: Site) -> torch.Tensor:
        """View a site's records of ``table`` ``[.., row_words]`` as ``[.., projections, 8]``."""
        start = self.first_record[site.name] * RECORD_WORDS
        width = len(site.projections) * RECORD_WORDS
        view = table[..., start : start + width]
        return view.unflatten(-1, (len(site.projections), RECORD_WORDS))

    def all_records(self, row: torch.Tensor) -> torch.Tensor:
        """View the records of all sites of one ``row`` ``[row_words]`` as ``[records, 8]``."""
        num_records = sum(len(site.projections) for site in self.sites)
        return row[: num_records * RECORD_WORDS].view(num_records, RECORD_WORDS)

    def ranks(self, row: torch.Tensor) -> torch.Tensor:
        """View the live ranks of all records of one ``row`` ``[row_words]``, as int32."""
        return self.all_records(row).view(torch.int32)[:, RANK_I32]

    def ranks_of(self, ranks: torch.Tensor, site: Site) -> torch.Tensor:
        """View a site's part of ``ranks`` ``[.., records]`` as ``[.., projections]``."""
        first = self.first_record[site.name]
        return ranks[..., first : first + len(site.projections)]

    def expert_map(self, table: torch.Tensor, site: Site) -> torch.Tensor | None:
        """View a site's expert map, int32 ``[.., E]``; None for linears and routers."""
        if site.kind != "experts":
            return None
        start = self.map_offset[site.name]
        return table.view(torch.int32)[..., start : start + site.num_experts]


@dataclass(frozen=True)
class PackedAdapter:
    """One adapter in the form the arena holds, ready for a single copy.

    Attributes:
        data: 1-D factors in the bank's dtype, every matrix row 16-byte aligned.
        row: int64 ``[row_words]`` table row whose offsets count from the start of ``data``.
        max_rank: the largest rank of any projection.
        spans: site name -> (begin, end) of its factors in ``data``, in elements; sites in the
            order of the model, their spans in any.
    """

    data: torch.Tensor
    row: torch.Tensor
    max_rank: int
    spans: Mapping[str, tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        """Bytes that the factors take in the arena."""
        return self.data.numel() * self.data.element_size()

    def with_data(self, data: torch.Tensor) -> PackedAdapter:
        """Return the same adapter with its factors in other memory."""
        return replace(self, data=data)

    def relocated(self, base_units: int, layout: TableLayout) -> torch.Tensor:
        """Return the table row with its offsets moved to ``base_units`` in the arena."""
        return moved_row(self.row, base_units, layout)


def moved_row(row: torch.Tensor, units: int, layout: TableLayout) -> torch.Tensor:
    """Return a copy of a table row whose factors lie ``units`` of 16 bytes further up."""
    row = row.clone()
    records = layout.all_records(row)
    live = records.view(torch.int32)[:, RANK_I32] > 0
    records[:, [A_OFFSET, B_OFFSET]] += live.long()[:, None] * units
    return row


def empty_row(layout: TableLayout) -> torch.Tensor:
    """Return the table row of an empty slot: every rank 0, every expert -1."""
    row = torch.zeros(layout.row_words, dtype=torch.int64)
    for site in layout.sites:
        expert_map = layout.expert_map(row, site)
        if expert_map is not None:
            expert_map.fill_(-1)
    return row
