"""What an adapter file says by itself, before any model is known."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from moegraft.adapters.read import AdapterSource
from moegraft.errors import count

_EXPERT = re.compile(r"^(?P<module>.*\bexperts)\.(?P<expert>\d+)\.(?P<projection>\w+)$")
_STACKED = re.compile(
    r"^(?P<module>.*\bexperts)\.(?P<projection>w[123]|(gate|up|down|gate_up)_proj)$"
)
_FUSED = re.compile(r"^(?P<module>.*\bexperts)(?P<wraps>(\.base_layer)*)$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")

#: What a tensor is, for people; keys are the leaves of :mod:`moegraft.adapters.keys`.
_LEAVES = {
    "lora_B_bias": "bias of lora_B",
    "dora": "DoRA magnitude",
    "embedding": "embedding LoRA",
    "full": "full tensor",
}


def config_facts(source: AdapterSource) -> dict[str, Any]:
    """Return what adapter_config.json says, by the names it uses; absent things are left out."""
    config, raw = source.config, source.config.raw
    facts: dict[str, Any] = {
        "producer": config.producer,
        "base_model": raw.get("base_model_name_or_path"),
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "scale": None if config.r is None else config.scale_for("", config.r),
        "use_rslora": config.use_rslora,
        "use_dora": bool(raw.get("use_dora")),
        "target_modules": raw.get("target_modules"),
        "target_parameters": list(config.target_parameters),
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "modules_to_save": raw.get("modules_to_save"),
        "bias": raw.get("bias"),
        "lora_B_layout": raw.get("lora_B_layout"),
        "veomni_lora": raw.get("veomni_lora"),
    }
    kept = ("use_rslora", "use_dora")
    return {name: value for name, value in facts.items() if value or name in kept}


def tensor_groups(source: AdapterSource) -> list[dict[str, Any]]:
    """Return the tensors by place (layer and expert numbers as ``*``) and leaf, with shapes."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, key in source.keys.items():
        groups.setdefault((_general(key.module), key.leaf), []).append(name)
    found = []
    for (module, leaf), names in groups.items():
        shapes = Counter(tuple(source.tensors[n].shape) for n in names)
        found.append(
            {
                "module": module,
                "kind": _LEAVES.get(leaf, leaf),
                "count": len(names),
                "shapes": [list(shape) for shape in sorted(shapes)],
                "dtypes": sorted({_dtype(source.tensors[n]) for n in names}),
                "bytes": sum(
                    source.tensors[n].numel() * source.tensors[n].element_size() for n in names
                ),
            }
        )
    return found


def guesses(source: AdapterSource) -> list[str]:
    """Return what the names and shapes let one guess about the model; one line each."""
    found = []
    layers = sorted({int(n) for key in source.keys.values() for n in _LAYER.findall(key.module)})
    if layers:
        span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
        found.append(f"{count(len(layers), 'layer')} with tensors ({span})")
    found += _guess_per_expert(source)
    found += _guess_per_projection(source)
    found += _guess_fused(source)
    if not _has_experts(source):
        found.append("no tensor is on experts: attention, routers or dense layers only")
    return found


def _guess_per_expert(source: AdapterSource) -> list[str]:
    experts: set[int] = set()
    projections: set[str] = set()
    for key in source.keys.values():
        match = _EXPERT.match(key.module)
        if match:
            experts.add(int(match["expert"]))
            projections.add(match["projection"])
    if not experts:
        return []
    return [
        f"one factor pair per expert: {count(len(experts), 'expert')} "
        f"({', '.join(sorted(projections))}), "
        f"the model has at least {max(experts) + 1}"
    ]


def _guess_per_projection(source: AdapterSource) -> list[str]:
    """Guess from factors of whole experts modules, named by projection: experts and sharing."""
    experts: dict[str, set[int]] = {}
    for name, key in source.keys.items():
        match = _STACKED.match(key.module)
        if match and key.leaf in ("lora_A", "lora_B"):
            shape = source.tensors[name].shape
            sizes = experts.setdefault(f"{match['projection']}.{key.leaf}", set())
            sizes.add(shape[0] if len(shape) == 3 else 1)
    if not experts:
        return []
    num_experts = max(size for sizes in experts.values() for size in sizes)
    shared = sorted(name for name, sizes in experts.items() if sizes == {1})
    projections = sorted({name.partition(".")[0] for name in experts})
    behind = f", for all experts at once: {', '.join(shared)}" if shared else ""
    size = count(num_experts, "expert") if num_experts > 1 else "number of experts unknown"
    return [f"one factor pair per projection ({', '.join(projections)}): {size}{behind}"]


def _guess_fused(source: AdapterSource) -> list[str]:
    """Guess from the first experts module with fused factors: experts, sizes, orientation."""
    shapes: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
    for name, key in source.keys.items():
        match = _FUSED.match(key.module)
        if match and key.leaf in ("lora_A", "lora_B"):
            depth = match["wraps"].count(".base_layer")
            parts = shapes.setdefault(match["module"], {}).setdefault(depth, {})
            parts[key.leaf] = tuple(source.tensors[name].shape)
    if not shapes:
        return []
    module, wraps = next(iter(shapes.items()))
    found = [f"fused experts: {count(len(wraps), 'wrapped parameter')} per experts module"]
    first = wraps[max(wraps)].get("lora_A")
    rank = source.config.rank_for(f"{module}.gate_up_proj", source.config.r or 0)
    if first and rank and first[0] % rank == 0:
        found.append(f"{count(first[0] // rank, 'expert')}, if the rank there is {rank}")
    if len(wraps) == 2:
        found += _guess_sizes(wraps[max(wraps)], wraps[min(wraps)])
    return found


def _guess_sizes(
    gate_up: Mapping[str, tuple[int, ...]], down: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Tell H, I and the orientation from the inner (gate_up) and outer (down) shapes."""
    pairs = [(p.get("lora_A", ()), p.get("lora_B", ())) for p in (gate_up, down)]
    if any(len(a) != 2 or len(b) != 2 for a, b in pairs):
        return []
    (up_in, up_out), (down_in, down_out) = ((a[1], b[0]) for a, b in pairs)
    normal = up_in == down_out and up_out in (down_in, 2 * down_in)
    swapped = up_out == down_in and up_in in (down_out, 2 * down_out)
    if normal and not swapped:
        return [f"hidden size {up_in}, experts' size {down_in}; orientation normal"]
    if swapped and not normal:
        return [f"hidden size {up_out}, experts' size {down_out}; orientation swapped (old PEFT)"]
    if normal:
        return ["sizes are equal: only the model or the PEFT version tells the orientation"]
    return ["the two parameters do not look like gate_up and down of one module"]


def _has_experts(source: AdapterSource) -> bool:
    return any("experts" in key.module.split(".") for key in source.keys.values())


def _general(module: str) -> str:
    """Replace layer and expert numbers by ``*``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
