"""Tensor names of adapter files, taken apart."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

Leaf = Literal["lora_A", "lora_B", "lora_B_bias", "dora", "embedding", "full"]

_PREFIXES = ("base_model.model.", "base_model.")
_LEAVES: dict[str, Leaf] = {
    "lora_A": "lora_A",
    "lora_B": "lora_B",
    "lora_magnitude_vector": "dora",
    "lora_embedding_A": "embedding",
    "lora_embedding_B": "embedding",
    "trainable_tokens_delta": "embedding",
}
#: Names of an expert's projections in files: those of most models, and Mixtral's.
EXPERT_NAMES = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
#: How nearly all names end, each 14 characters long; then no leaf may come before that.
_USUAL_ENDS = (".lora_A.weight", ".lora_B.weight")
_ANY_LEAF = ("lora_", "trainable_tokens_delta")
_OTHER_LEAVES = re.compile("|".join(_ANY_LEAF))


class AdapterKey(NamedTuple):
    """One tensor's name.

    Attributes:
        module: dotted path of the adapted module without PEFT's prefix, ``base_layer`` kept.
        leaf: what the tensor is; ``full`` is any tensor that is no LoRA part.

    Example: ``base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight`` has module
    ``model.layers.0.mlp.experts.base_layer`` and leaf ``lora_A``.
    """

    module: str
    leaf: Leaf


def parse_keys(keys: Iterable[str]) -> dict[str, AdapterKey]:
    """Take many names apart, see :func:`parse_key`; nearly all are of the usual form."""
    names = list(keys)
    ends = [name[-14:] for name in names]
    usual = sum(map(ends.count, _USUAL_ENDS))
    if usual != len(names) or sum(map("\n".join(names).count, _ANY_LEAF)) != usual:
        return {name: parse_key(name) for name in names}
    # Each name ends in its one leaf.
    begins = [len(_PREFIXES[0]) * name.startswith(_PREFIXES[0]) for name in names]
    found = {}
    for name, end, begin in zip(names, ends, begins, strict=True):
        if not begin and name.startswith(_PREFIXES[1]):
            begin = len(_PREFIXES[1])
        found[name] = AdapterKey(name[begin:-14], "lora_A" if end[6] == "A" else "lora_B")
    return found


def parse_key(key: str) -> AdapterKey:
    """Take a tensor name apart. Understands names with and without PEFT's prefix, an adapter name
    (``lora_A.default.weight``) and a missing ``.weight``."""
    name = key
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    if name.endswith(_USUAL_ENDS) and not _OTHER_LEAVES.search(name, 0, len(name) - 14):
        return AdapterKey(name[:-14], "lora_A" if name[-8] == "A" else "lora_B")
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part in _LEAVES:
            leaf = _LEAVES[part]
            if leaf == "lora_B" and parts[-1] == "bias":
                leaf = "lora_B_bias"
            return AdapterKey(".".join(parts[:i]), leaf)
    return AdapterKey(name.rpartition(".")[0] if "." in name else name, "full")
