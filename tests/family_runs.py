"""One run of an experts class with adapters, and the table of all of them in docs/models.md.

``python tests/family_runs.py`` writes the table anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import moegraft
from families import (
    Family,
    adapter_for,
    all_families,
    families,
    hidden_of,
    merged,
    outside_classes,
)
from moegraft.adapters import bind, check_bound, make_source
from moegraft.hosts.transformers import Graft
from moegraft.hosts.transformers.outside import outside_of
from moegraft.hosts.transformers.unserved import why_no_experts
from moegraft.types import Activation

DOC = Path(__file__).parent.parent / "docs" / "models.md"
TABLE = ("<!-- table: begin -->\n", "\n<!-- table: end -->")
OUTSIDE = ("<!-- outside: begin -->\n", "\n<!-- outside: end -->")
#: Rows of the batch: adapters of ranks 2 and 3 with a base row in between.
ROWS: tuple[str | None, ...] = ("a", None, "b", "a")


@dataclass(frozen=True, eq=False)
class FamilyRun:
    """A mixed batch on one tiny model, beside its merged models.

    Attributes:
        graft: the attached model with adapters ``a`` and ``b`` on every site.
        found: what it computes for :data:`ROWS`.
        expected: what the plain model and the merged ones compute for the same rows.
        base: what the plain model computes for all rows.
    """

    graft: Graft
    found: torch.Tensor
    expected: torch.Tensor
    base: torch.Tensor

    @property
    def served(self) -> bool:
        """Every row is that of its own merged model, and the adapters change much."""
        size = self.base.norm()
        equal = (self.found - self.expected).norm() <= 1e-5 * size
        return bool(equal) and bool((self.expected - self.base).norm() > 1e-2 * size)


@cache
def run_of(name: str) -> FamilyRun:
    """Run a family by the name of its experts class."""
    family = all_families()[name]
    graft = moegraft.attach(family.build())
    ids = torch.randint(3, 64, (len(ROWS), 6), generator=torch.Generator().manual_seed(0))
    plain: dict[str | None, torch.Tensor] = {None: hidden_of(family.build(), ids)}
    for seed, adapter in enumerate("ab"):
        tensors, config = adapter_for(graft.spec, seed), {"r": 2 + seed, "lora_alpha": 4}
        graft.load_tensors(adapter, tensors, config)
        bound = bind(make_source(tensors, config), graft.spec)
        check_bound(bound.report, graft.spec)
        plain[adapter] = hidden_of(merged(family.build(), bound), ids)
    found = hidden_of(graft, ids, adapters=list(ROWS))
    expected = torch.stack([plain[row][i] for i, row in enumerate(ROWS)])
    return FamilyRun(graft, found, expected, plain[None])


def specials(family: Family, run: FamilyRun) -> list[str]:
    """What is not as in most classes, in words; read off the attached model."""
    sites = [site for site in run.graft.spec.sites if site.kind == "experts"]
    layers = list(run.graft.layers.values())
    config: Any = run.graft.model.config
    layout, weights = sites[0].layout, layers[0].weights
    found: list[str] = []
    if layout.gate_up_order != "gate_first":
        found.append({"no_gate": "no gate"}.get(layout.gate_up_order, layout.gate_up_order))
    if not layout.out_major:
        found.append("`[in, out]` storage")
    if weights.gate_up_bias is not None:
        found.append("biases")
    activations = dict.fromkeys(_words(layer.weights.activation) for layer in layers)
    found += [words for words in activations if words]
    if weights.post_norm is not None:
        found.append("norm behind each expert")
    names = {part for path, _ in run.graft.model.named_modules() for part in path.split(".")}
    if any(part.startswith("shared_") for part in names):
        found.append("shared expert")
    if len(sites) < config.num_hidden_layers:
        found.append("dense or other layers between")
    if len({site.projection("down").in_features for site in sites}) > 1:
        found.append("experts of several widths")
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        found.append("mixed attention")
    if not any(site.kind == "router" for site in run.graft.spec.sites):
        linears = [site.name.split(".") for site in run.graft.spec.sites if site.kind == "linear"]
        plain = any({"router", "gate"} & set(parts) for parts in linears)
        found.append("router of plain linears" if plain else "router takes no adapter")
    leaves = sorted(_leaves(run.graft))
    if leaves:
        found.append(f"no adapters on {', '.join(leaves)}")
    outside = outside_of(run.graft.model.get_submodule(sites[0].name))
    if outside is not None:
        found.append(f"outside of the interface: {outside.how}")
    return found


def table() -> str:
    """The table as Markdown, one row per experts class of the installed transformers."""
    lines = [
        "| Experts class | Model | Special | LoRA equals merged |",
        "| --- | --- | --- | --- |",
    ]
    for name, family in all_families().items():
        run = run_of(name)
        model = family.model.__module__.split(".")[2]
        words = "; ".join(specials(family, run)) or "-"
        lines.append(f"| `{name}` | {model} | {words} | {'yes' if run.served else 'NO'} |")
    return "\n".join(lines)


def outside_table() -> str:
    """The classes that don't use the interface, with what is said when LoRA targets them."""
    lines = ["| Model | Class | Reason |", "| --- | --- | --- |"]
    for model, names in outside_classes().items():
        for name in names:
            reason = why_no_experts(type(name, (nn.Module,), {})())
            if reason is not None:
                lines.append(f"| {model} | `{name}` | {reason} |")
    return "\n".join(lines)


def documented() -> tuple[str, str, str]:
    """The transformers version and the two tables that docs/models.md has."""
    text = DOC.read_text()
    head, _, body = _inside(text, TABLE).partition("\n\n")
    return head.rsplit(" ", 1)[1].rstrip(":."), body, _inside(text, OUTSIDE)


def _inside(text: str, marks: tuple[str, str]) -> str:
    return text.split(marks[0])[1].split(marks[1])[0]


def _replaced(text: str, marks: tuple[str, str], body: str) -> str:
    before, after = text.split(marks[0])[0], text.split(marks[1])[1]
    return f"{before}{marks[0]}{body}{marks[1]}{after}"


def _words(activation: Activation) -> str:
    if activation.kind == "custom":
        return "activation of its own, run as it is"
    words = "" if activation.kind == "silu" else activation.kind
    if activation.limit is not None:
        words = f"{words} clamped at {activation.limit:g}".strip()
    return words


def _leaves(graft: Graft) -> set[str]:
    """Last parts of the outermost paths that take no adapter, but for embeddings."""
    found = {path for path, why in graft.spec.refused.items() if "embedding" not in why}
    parts = [path.rpartition(".") for path in found]
    return {f"`{name}`" for parent, _, name in parts if parent not in found}


def write() -> None:
    """Put the tables of this run in their places in docs/models.md."""
    inside, outside = len(families()), len(all_families()) - len(families())
    head = f"{inside} classes and {outside} outside, transformers {transformers.__version__}:"
    text = _replaced(DOC.read_text(), TABLE, f"{head}\n\n{table()}")
    DOC.write_text(_replaced(text, OUTSIDE, outside_table()))


if __name__ == "__main__":
    write()
