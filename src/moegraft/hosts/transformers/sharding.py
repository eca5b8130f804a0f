"""Models that transformers has sharded over ranks: what of each module is here.

transformers holds sharded parameters as DTensors and gives each sharded module a forward of its
own, which brings the input, runs the module on this rank's plain tensors, and combines the outputs.
Adapters join inside of that: on the module's own input and output, in whatever state these are.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from moegraft.adapters.spec import ModelSpec
from moegraft.errors import UnsupportedError
from moegraft.hosts.transformers.outside import outside_of
from moegraft.hosts.transformers.spec import weight_layout
from moegraft.parallel import ExpertPlacement, ExpertShard, LinearShard, Part, RankShards
from moegraft.parallel.adapter import SiteShard

_EP = (
    "moegraft serves ep_implementation='all_reduce' (or 'auto') with ep_size equal to tp_size, "
    "where every rank has the whole batch."
)


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, in place; the tensor itself when it is whole."""
    found: Any = tensor.detach()
    return found.to_local() if is_sharded(tensor) else found


def is_distributed(model: nn.Module) -> bool:
    """True when some of the model is on other ranks."""
    marked = any(getattr(module, "_is_expert_parallel", False) for module in model.modules())
    return marked or any(is_sharded(parameter) for parameter in model.parameters())


def model_shards(model: Any, spec: ModelSpec) -> RankShards | None:
    """Return what of each site is on this rank; None when the model is whole.

    Raises:
        UnsupportedError: it is sharded in a way in which adapters would be wrong; says why.
    """
    _check_mesh(model)
    if not is_distributed(model):
        if (getattr(model, "_tp_size", None) or 1) > 1:
            raise UnsupportedError(
                f"The model was loaded for {model._tp_size} ranks, but none of its parameters is a "
                "DTensor, so what is on this rank is not known: transformers 5.17 to 5.23 are."
            )
        return None
    shards: dict[str, SiteShard] = {}
    for site in spec.sites:
        module = model.get_submodule(site.name)
        if site.kind == "experts":
            shards[site.name] = _expert_shard(site.name, module)
        elif site.kind == "router":
            _check_router(site.name, module)
            shards[site.name] = LinearShard()
        else:
            shards[site.name] = _linear_shard(site.name, module)
    return RankShards(spec.sites, shards)


def style_of(path: str, module: nn.Module) -> Mapping[str, Any] | None:
    """Return what transformers' forward around a linear is made of; None when it has none.

    Returns:
        ``self`` (the style), ``mesh``, ``original_forward`` and ``module``.

    Raises:
        UnsupportedError: a sharded linear whose outputs are combined in another way.
    """
    parts = _closure(module) if getattr(module, "_is_hooked", False) else {}
    if {"self", "mesh", "original_forward"} <= set(parts):
        return parts
    if not parts and not any(is_sharded(p) for p in module.parameters(recurse=False)):
        return None
    raise UnsupportedError(
        f"{path} is sharded, and how its forward combines the outputs of the ranks is not known "
        "here, so its adapters would be lost or count twice. The tensor parallel styles of "
        "transformers 5.17 to 5.23 are known."
    )


def _closure(module: nn.Module) -> Mapping[str, Any]:
    """Return what the forward that shadows a module's own refers to."""
    shadow = module.__dict__.get("forward")
    return inspect.getclosurevars(shadow).nonlocals if inspect.isfunction(shadow) else {}


def _check_mesh(model: Any) -> None:
    config = getattr(model.config, "distributed_config", None)
    sizes = {name: getattr(config, name, None) or 1 for name in ("pp_size", "fsdp_size", "dp_size")}
    if sizes["pp_size"] > 1:
        raise UnsupportedError(
            f"The model is split into {sizes['pp_size']} pipeline stages; this host serves tensor "
            "and expert parallel models."
        )
    if max(sizes.values()) > 1:
        raise UnsupportedError(
            "The model is sharded by FSDP: its ranks have different batches, and gather each "
            "layer's weights for it. This host serves tensor and expert parallel models."
        )


def _one_mesh(path: str, name: str, parameter: Any) -> tuple[Any, int, int]:
    """Return (placement, rank, size) of a DTensor that is sharded over one dimension of ranks."""
    if len(parameter.placements) != 1:
        raise UnsupportedError(
            f"{path}.{name} is sharded over several dimensions of ranks ({parameter.placements})."
        )
    mesh = parameter.device_mesh
    return parameter.placements[0], mesh.get_local_rank(), mesh.size()


def _linear_shard(path: str, module: Any) -> LinearShard:
    style_of(path, module)
    weight = module.weight
    if not is_sharded(weight):
        return LinearShard()
    placement, rank, size = _one_mesh(path, "weight", weight)
    if placement.is_replicate():
        return LinearShard()
    dim = placement.dim % 2 if placement.is_shard() else None
    here = tuple(local(weight).shape)
    if dim is not None:
        part = Part.of(weight.shape[dim], rank, size)
        if here[dim] == part.width:
            return LinearShard("column" if dim == 0 else "row", part)
    raise UnsupportedError(
        f"{path}.weight {tuple(weight.shape)} has {here} here by {placement}: of linears, plain "
        "slices of outputs or inputs are served."
    )


def _check_router(path: str, module: nn.Module) -> None:
    """Raise unless every rank routes with all of the weights."""
    if any(is_sharded(parameter) for parameter in module.parameters()):
        raise UnsupportedError(f"{path} is a router that is sharded; routers must be whole.")


def _expert_shard(path: str, module: Any) -> ExpertShard:
    layout = weight_layout(module)
    name = "gate_up_proj" if layout.gated else "up_proj"
    gate_up, down = getattr(module, name), module.down_proj
    num_experts, _, intermediate = _oriented(down, layout.out_major)
    if not is_sharded(gate_up) or not is_sharded(down):
        if getattr(module, "_is_expert_parallel", False):
            raise UnsupportedError(
                f"{path} is sharded by expert parallelism in a way that is not known here: its "
                f"weights are plain tensors. {_EP}"
            )
        if is_sharded(gate_up) or is_sharded(down):
            raise UnsupportedError(f"{path}: only one of {name} and down_proj is sharded.")
        return ExpertShard(
            ExpertPlacement.contiguous(num_experts, 0, 1), Part(0, intermediate, intermediate)
        )
    if outside_of(module) is not None:
        raise UnsupportedError(
            f"{path} is a {type(module).__name__}, which is outside of transformers' experts "
            "interface; such experts are served whole only."
        )
    placement, rank, size = _one_mesh(path, name, gate_up)
    here = _oriented(local(down), layout.out_major)
    columns = _oriented(local(gate_up), layout.out_major)[1]
    if placement.is_shard(0):
        _check_dispatch(path, module)
        counts = [Part.of(num_experts, r, size).width for r in range(size)]
        if here[0] == counts[rank]:
            return ExpertShard(
                ExpertPlacement.contiguous(num_experts, rank, size, counts),
                Part(0, intermediate, intermediate),
            )
    elif not getattr(module, "has_bias", False) and layout.gate_up_order in (
        "gate_first",
        "no_gate",
    ):
        part = Part.of(intermediate, rank, size)
        wide = part.width * (2 if layout.gated else 1)
        if (here[0], here[2], columns) == (num_experts, part.width, wide):
            return ExpertShard(ExpertPlacement.contiguous(num_experts, 0, 1), part)
    raise UnsupportedError(
        f"{path} is sharded by {placement} (down_proj {tuple(down.shape)} is "
        f"{tuple(local(down).shape)} here): served are whole experts per rank, and slices of the "
        "intermediate size of experts without biases whose gate and up lie one after the other."
    )


def _oriented(down: torch.Tensor, out_major: bool) -> tuple[int, int, int]:
    """Return a weight's shape as [E, out, in]."""
    experts, first, second = down.shape
    return (experts, first, second) if out_major else (experts, second, first)


def _check_dispatch(path: str, module: nn.Module) -> None:
    """Raise unless tokens stay where they are: rows that travel would lose their adapters."""
    parts = _closure(module)
    implementation = parts.get("implementation", parts.get("self"))
    name = type(implementation).__name__
    served = name in ("AllReduceEP", "MoeExpertsParallel") or (
        name == "AutoEP"
        and getattr(implementation, "all_reduce", None) is not None
        and getattr(implementation, "megamoe", None) is None
    )
    if not served:
        raise UnsupportedError(
            f"{path} gets its tokens through {name}, which moves rows between ranks without their "
            f"adapters' ids, or is not known here. {_EP}"
        )
