"""What a layout reader gets and gives."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from moegraft.adapters.only import checked_parts
from moegraft.adapters.read import AdapterSource, Pairs, paired
from moegraft.adapters.spec import ModelSpec
from moegraft.errors import AdapterError, shown
from moegraft.types import SiteFactors


@dataclass(frozen=True)
class ReadOptions:
    """The caller's say where a file leaves room for doubt.

    Attributes:
        orientation: of 3-D expert parameters, see :mod:`moegraft.adapters.layouts.peft_fused`.
            None = decide by evidence, refuse when there is none.
        expert_b_layout: column order of a fused B. ``rank_major`` (PEFT) has the expert index
            fastest; ``grouped_by_expert`` has one block of columns per expert. None = the file's
            own marker, else PEFT's.
        skip: regular expressions of tensor names to leave out; the report lists what they matched.
        only: parts of the model to keep, ``experts``, ``linear``, ``router``, or projections of
            the experts, ``gate``, ``up``, ``down``; none = all. Everything must bind even so; the
            report lists what was then left out.
        gate_up_rows: order of the rows of B in a 3-D ``gate_up_proj``: ``concatenated`` is
            [gate | up], ``interleaved`` g0, u0, g1, u1, .. None = concatenated where the model
            packs its own weights so; on other models the file is refused.
    """

    orientation: Literal["normal", "swapped"] | None = None
    expert_b_layout: Literal["rank_major", "grouped_by_expert"] | None = None
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    gate_up_rows: Literal["concatenated", "interleaved"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "only", checked_parts(self.only))
        skip: Any = self.skip
        if isinstance(skip, str):  # one pattern; its letters would match nearly everything
            object.__setattr__(self, "skip", (skip,))
        elif not isinstance(skip, Collection) or not all(isinstance(p, str) for p in skip):
            raise AdapterError(f"skip={shown(skip)} must be a list of regular expressions.")
        for pattern in self.skip:
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise AdapterError(
                    f"skip {shown(pattern)} is not a regular expression: {error}."
                ) from error
        _check_choice("orientation", self.orientation, ("normal", "swapped"))
        _check_choice("gate_up_rows", self.gate_up_rows, ("concatenated", "interleaved"))
        _check_choice("expert_b_layout", self.expert_b_layout, ("rank_major", "grouped_by_expert"))


def _check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise AdapterError(f"{name}={shown(value)} is not one of {', '.join(choices)}.")


@dataclass
class LayoutResult:
    """What one reader made of the keys it understood.

    Attributes:
        factors: site name -> factors.
        used: tensor names that are in ``factors``.
        refused: tensor name -> why this layout can't serve it.
        experts: experts site -> projection -> how many experts have a factor in the file, where
            that is fewer than ``factors`` say: some entries of a stack may be padding.
        evidence: why the layout applies; "" when it found nothing.
        notes: warnings for the report.
    """

    factors: dict[str, SiteFactors] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    experts: dict[str, dict[str, int]] = field(default_factory=dict)
    evidence: str = ""
    notes: list[str] = field(default_factory=list)

    def refuse(self, keys: Mapping[str, str] | list[str], reason: str) -> None:
        """Refuse all ``keys`` for one reason."""
        self.refused.update(dict.fromkeys(keys, reason))


class Layout(Protocol):
    """One on-disk layout."""

    name: str

    def read(
        self, source: AdapterSource, pending: set[str], spec: ModelSpec, options: ReadOptions
    ) -> LayoutResult:
        """Claim the keys of ``pending`` that are in this layout.

        Every key that looks like this layout must end in ``used`` or ``refused``.
        """
        ...


def pair_up(source: AdapterSource, pending: set[str]) -> Pairs:
    """Group pending lora_A/lora_B tensors by module: module -> leaf -> (key, tensor).

    A second tensor for the same module and leaf is left out, so it is refused in the end.
    """
    if not pending:
        return {}
    if len(pending) == len(source.tensors):
        return source.pairs
    return paired(source.keys, {n: t for n, t in source.tensors.items() if n in pending})


def missing_partner(parts: Collection[str]) -> str:
    """Return the leaf that a module of :func:`pair_up` lacks; "" when it has both."""
    return next((leaf for leaf in ("lora_A", "lora_B") if leaf not in parts), "")


def not_a_pair(lora_a: torch.Tensor, lora_b: torch.Tensor) -> str:
    """Return why two tensors are not 2-D factors of one rank >= 1; "" when they are."""
    if lora_a.dim() == lora_b.dim() == 2 and lora_a.shape[0] == lora_b.shape[1] > 0:
        return ""
    return f"A {tuple(lora_a.shape)} and B {tuple(lora_b.shape)} are not [r, in], [out, r], r >= 1"
