"""Find the places of a transformers model where adapters can attach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from moegraft.adapters.spec import ModelSpec, is_other_tower
from moegraft.hosts.transformers.outside import outside_of
from moegraft.hosts.transformers.unserved import (
    has_own_forward,
    is_experts_module,
    why_no_experts,
    why_no_linear,
)
from moegraft.sites import Site, expert_site, linear_site
from moegraft.types import GateUpOrder, WeightLayout

#: Names of the output head in files, whatever the model calls it.
HEAD_NAMES = (
    *("lm_head", "model.lm_head", "unembed_tokens", "model.unembed_tokens"),
    *("output_layer", "embed_out"),
)


def weight_layout(module: Any) -> WeightLayout:
    """Return how an experts module packs gate and up."""
    outside = outside_of(module)
    if outside is not None:
        return outside.layout
    if not module.has_gate:
        return WeightLayout("no_gate", not module.is_transposed)
    order: GateUpOrder = "gate_first" if module.is_concatenated else "interleaved"
    return WeightLayout(order, not module.is_transposed)


def router_names(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (path, module, path of its experts) of routers with a ``weight`` [E, H] of their own.

    Not those whose logits come from a plain linear, which is served as one.
    """
    for path, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if not isinstance(experts, nn.Module) or not is_experts_module(experts):
            continue
        num_experts = _expert_sizes(experts)[0]
        for name, child in module.named_children():
            weight = child._parameters.get("weight")
            plain = isinstance(child, nn.Linear) and not has_own_forward(child)
            if plain or weight is None:
                continue
            # Its width may differ from the experts': nemotron_h routes before a projection. It may
            # have more rows: inkling weighs its shared experts too.
            rows = weight.shape[0]
            more = rows > num_experts and type(child).__name__.lower().endswith("router")
            if weight.dim() == 2 and (rows == num_experts or more):
                yield f"{path}.{name}", child, f"{path}.experts"


def _expert_sizes(module: Any) -> tuple[int, int, int]:
    """Return (E, H, I) from the down weights."""
    down = module.down_proj
    num_experts, first, second = down.shape
    out_major = weight_layout(module).out_major
    return (num_experts, first, second) if out_major else (num_experts, second, first)


def model_spec(model: nn.Module) -> ModelSpec:
    """Describe a model (real or on the meta device) to adapters; a sharded one as a whole."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(path)
    head = head_path(model)
    sites: list[Site] = []
    refused: dict[str, str] = {}
    routers = {path for path, _, _ in router_names(model)}
    for path, module in model.named_modules():
        aliases = tuple(names[id(module)][1:])
        if is_other_tower(path):
            continue
        reason = refused.get(path.rpartition(".")[0]) or why_no_experts(module)
        if reason is not None:
            refused[path] = reason
            continue
        if is_experts_module(module):
            site = expert_site(path, *_expert_sizes(module), weight_layout(module))
        elif path in routers:
            num_experts, hidden = module.weight.shape
            site = linear_site(path, hidden, num_experts, "router")
        elif isinstance(module, nn.Linear):
            parent, _, name = path.rpartition(".")
            reason = why_no_linear(model.get_submodule(parent), name, module)
            if reason is not None:
                refused[path] = reason
                continue
            site = linear_site(path, module.in_features, module.out_features)
            if path == head:
                aliases = (*aliases, *(name for name in HEAD_NAMES if name != path))
        elif path == head:
            refused[path] = "it is an output head that is no plain linear; LoRA on it is not served"
            continue
        else:
            if isinstance(module, nn.Embedding):
                refused[path] = "it is an embedding; LoRA on embeddings is not served"
            continue
        sites.append(_with_aliases(site, aliases))
    return ModelSpec(tuple(sites), refused, f"this {type(model).__name__}", serves_vectors=True)


def _with_aliases(site: Site, aliases: tuple[str, ...]) -> Site:
    return Site(site.name, site.kind, site.projections, site.num_experts, site.layout, aliases)


def head_path(model: Any) -> str | None:
    """Return the path of the output head; None for a model without one."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return next((path for path, module in model.named_modules() if module is head), None)
