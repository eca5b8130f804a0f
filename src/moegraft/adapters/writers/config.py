"""The adapter_config.json of what was written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moegraft._version import __version__
from moegraft.adapters.config import CONVERTED_BY
from moegraft.adapters.spec import ModelSpec
from moegraft.adapters.writers.base import Written
from moegraft.errors import AdapterError, shorten
from moegraft.sites import VectorKind

#: Names of the vectors of linears in files.
VECTOR_LEAVES: dict[VectorKind, str] = {
    "lora_bias": "lora_B.bias",
    "dora": "lora_magnitude_vector",
}
_EXPERT = re.compile(r"\bexperts\.\d+\.")


def make_config(
    written: Sequence[Written], spec: ModelSpec, old: Mapping[str, Any], peft_version: str
) -> dict[str, Any]:
    """Return the JSON of a config that gives every place its rank and scale.

    Args:
        written: everything that is in the file.
        spec: the model; decides whether a target's short name means no more than what is there.
        old: the config of the source, for the task and the base model's name.
        peft_version: the oldest PEFT that writes this layout; "" = not PEFT's.
    """
    ranks = {place.name: place.rank for place in written}
    alphas = {place.name: _alpha(place) for place in written}
    names = {kind: [p.name for p in written if p.kind == kind] for kind in ("module", "parameter")}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": old.get("task_type") or "CAUSAL_LM",
        "base_model_name_or_path": old.get("base_model_name_or_path"),
        "auto_mapping": {CONVERTED_BY: f"moegraft {__version__}"},
        "inference_mode": True,
        "bias": "none",
        "lora_dropout": 0.0,
        "r": _most_common(ranks.values()),
        "lora_alpha": _most_common(alphas.values()),
        "target_modules": _modules(names["module"], spec),
        "target_parameters": _parameters(names["parameter"], spec) or None,
    }
    config["rank_pattern"] = _patterns(ranks, config["r"])
    config["alpha_pattern"] = _patterns(alphas, config["lora_alpha"])
    leaves = {leaf for place in written for leaf in VECTOR_LEAVES.values() if _has(place, leaf)}
    config["use_dora"] = VECTOR_LEAVES["dora"] in leaves
    config["lora_bias"] = VECTOR_LEAVES["lora_bias"] in leaves
    if peft_version:
        config["peft_version"] = peft_version
    return config


def check_for_peft(written: Sequence[Written], config: Mapping[str, Any]) -> None:
    """Refuse vectors that PEFT itself can't load.

    Raises:
        AdapterError: DoRA on some linears but not on all, or vectors beside target_parameters.
    """
    if not config["use_dora"] and not config["lora_bias"]:
        return
    what = "DoRA" if config["use_dora"] else "biases of lora_B"
    dora = VECTOR_LEAVES["dora"] if config["use_dora"] else ""
    others = [p.name for p in written if p.kind == "parameter" or (dora and not _has(p, dora))]
    if others:
        raise AdapterError(
            f"The adapter has {what} on some linears and none on {shorten(others)}, which PEFT "
            "can't load from one file: convert to another layout, or split the adapter."
        )


def _has(place: Written, leaf: str) -> bool:
    return any(key.endswith(f".{leaf}") for key in place.tensors)


def _alpha(place: Written) -> int | float:
    """Return an alpha whose alpha/r is the scale in fp32, which is what scales are kept in."""
    exact = place.scale * place.rank
    for alpha in (
        round(exact),
        exact,
        float(np.nextafter(exact, 0)),
        float(np.nextafter(exact, exact * 2)),
    ):
        if np.float32(alpha / place.rank) == np.float32(place.scale):
            return alpha
    raise AdapterError(f"{place.name}: no alpha gives scale {place.scale!r} at rank {place.rank}.")


def _most_common(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def _patterns(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """Return a pattern for what is not usual: by the path behind ``layers.N`` where that is one."""
    by_suffix: dict[str, set[Any]] = {}
    for name, value in values.items():
        by_suffix.setdefault(_suffix(name), set()).add(value)
    found = {}
    for name, value in values.items():
        if value == usual:
            continue
        suffix = _suffix(name)
        # A path that ends like another one (self_attn.q_proj, x.self_attn.q_proj) is spelled out.
        alone = len(by_suffix[suffix]) == 1 and not any(
            other != suffix and other.endswith(f".{suffix}") for other in by_suffix
        )
        found[suffix if alone else re.escape(name)] = value
    return found


def _suffix(name: str) -> str:
    """Return an expression for the path behind ``layers.N.``, for any expert's number."""
    tail = re.split(r"(?:^|\.)layers\.\d+\.", name)[-1]
    return re.sub(r"experts\\\.\d+\\\.", r"experts\\.\\d+\\.", re.escape(tail))


def _modules(names: Sequence[str], spec: ModelSpec) -> list[str]:
    """Return the target modules: last names where the model has no other module of that name."""
    found = set()
    linears = [site.name for site in spec.sites if site.kind == "linear"]
    for name in names:
        last = name.rpartition(".")[2]
        others = {site for site in linears if site.rpartition(".")[2] == last}
        found.add(last if _EXPERT.search(name) or others <= set(names) else name)
    return sorted(found)


def _parameters(names: Sequence[str], spec: ModelSpec) -> list[str]:
    """Return the target parameters: paths behind ``layers.N`` where all layers have them."""
    found = set()
    sites = [site.name for site in spec.sites if site.kind != "linear"]
    for name in names:
        path, _, leaf = name.rpartition(".")
        tail = re.split(r"(?:^|\.)layers\.\d+\.", path)[-1]
        alike = [site for site in sites if site == tail or site.endswith(f".{tail}")]
        found.add(f"{tail}.{leaf}" if all(f"{site}.{leaf}" in names for site in alike) else name)
    return sorted(found)
