"""adapter_config.json: what a LoRA's tensors don't say themselves (scales, targets, producer)."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moegraft.adapters.path_rules import PathRules
from moegraft.errors import AdapterError, shown

#: Config fields that change the maths in ways this reader does not implement.
_REFUSED_FIELDS = {
    "alora_invocation_tokens": "activated LoRA (only after an invocation sequence)",
    "layer_replication": "layer replication",
    "use_qalora": "QA-LoRA pooling",
    "arrow_config": "Arrow routing between adapters",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "use_bdlora": "block-diagonal LoRA",
    "megatron_config": "Megatron tensor-parallel LoRA",
}
#: Initialisations that change the base weights too: the factors are a delta to those, not to ours.
_INITS_THAT_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: Where a converted file says so: PEFT passes this field over, and warns of names it doesn't know.
CONVERTED_BY = "converted_by"
#: Scales are kept as fp32.
_LARGEST_SCALE = 3.4028234663852886e38


@dataclass(frozen=True)
class AdapterConfig:
    """The part of a PEFT config that serving needs.

    Attributes:
        r, lora_alpha: global rank and alpha; None when the config has none.
        use_rslora: scale is alpha/sqrt(r) instead of alpha/r.
        rank_pattern, alpha_pattern: regular expression -> value, see :meth:`rank_for`.
        target_parameters: parameter names that PEFT wrapped, such as ``mlp.experts.down_proj``.
        peft_version: version that wrote the file, "" when unknown.
        raw: the whole config as read.

    Example: ``AdapterConfig.parse({"r": 8, "lora_alpha": 16}).scale_for("x", 8)`` is 2.0.
    """

    r: int | None = None
    lora_alpha: float | None = None
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_parameters: tuple[str, ...] = ()
    peft_version: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ = self._ranks, self._alphas  # refuses expressions that can't be used

    @staticmethod
    def parse(raw: Mapping[str, Any]) -> AdapterConfig:
        """Check and read a config; raises :class:`AdapterError` naming the field at fault."""
        peft_type = raw.get("peft_type", "LORA")
        if peft_type != "LORA":
            raise AdapterError(
                f"adapter_config.json says peft_type={shown(peft_type)}; only LORA adapters are "
                "served."
            )
        for name, what in _REFUSED_FIELDS.items():
            if raw.get(name):
                raise AdapterError(f"adapter_config.json sets {name}: {what} is not served.")
        _check_init(raw.get("init_lora_weights"))
        return AdapterConfig(
            r=_number(raw, "r", int),
            lora_alpha=_number(raw, "lora_alpha", float),
            use_rslora=_flag(raw, "use_rslora"),
            rank_pattern=_pattern(raw, "rank_pattern", int),
            alpha_pattern=_pattern(raw, "alpha_pattern", float),
            target_parameters=_names(raw, "target_parameters"),
            peft_version=_version(raw.get("peft_version")),
            raw=raw,
        )

    @cached_property
    def _ranks(self) -> PathRules:
        return PathRules("rank_pattern", self.rank_pattern)

    @cached_property
    def _alphas(self) -> PathRules:
        return PathRules("alpha_pattern", self.alpha_pattern)

    def rank_for(self, name: str, tensor_rank: int) -> int:
        """Return the config's rank for a module or parameter path, else the tensors' rank.

        PEFT's rule: the first pattern with ``re.match(rf"(.*\\.)?({key})$", name)`` wins.
        """
        found = self._ranks.first(name)
        if found is not None:
            return int(found)
        return self.r if self.r is not None else tensor_rank

    @property
    def varies(self) -> bool:
        """True when ranks or alphas depend on names."""
        return bool(self.rank_pattern or self.alpha_pattern)

    def scale_for(self, name: str, tensor_rank: int) -> float:
        """Return alpha/r, or alpha/sqrt(r) with rslora; alpha and r are looked up separately.

        Without any alpha, alpha is r: the scale is 1, or sqrt(r) with rslora, whatever the order
        of keys.
        """
        rank = self.rank_for(name, tensor_rank)
        alpha = self._alphas.first(name)
        if alpha is None:
            alpha = self.lora_alpha if self.lora_alpha is not None else float(rank)
        scale = alpha / math.sqrt(rank) if self.use_rslora else alpha / rank
        if not abs(scale) <= _LARGEST_SCALE:
            raise AdapterError(
                f"{name}: the scale {scale:g} (alpha {alpha:g}, r {rank}) overflows."
            )
        return scale

    @property
    def producer(self) -> str:
        """Who wrote the file, as far as the config tells."""
        peft = f"PEFT {self.peft_version}" if self.peft_version else ""
        mapping = self.raw.get("auto_mapping")
        marks = mapping if isinstance(mapping, Mapping) else {}
        if isinstance(marks.get(CONVERTED_BY), str):
            return str(marks[CONVERTED_BY])
        if marks.get("unsloth_fixed") or "lora_B_layout" in self.raw:
            return f"Unsloth, with {peft}" if peft else "Unsloth"
        if "veomni_lora" in self.raw:
            return "VeOmni"
        return peft or "unknown (PEFT before 0.18, or another program)"


def _check_init(init: object) -> None:
    if isinstance(init, str) and init.lower().startswith(_INITS_THAT_CHANGE_THE_BASE):
        raise AdapterError(
            f"adapter_config.json says init_lora_weights={shown(init)}: this changes the base "
            "weights too, so the factors don't fit the original model. Save the adapter with "
            "PEFT's path_initial_model_for_weight_conversion; or, if this model already has the "
            "changed base weights, set init_lora_weights to true."
        )


def _version(value: object) -> str:
    """Return a version that can be shown; "" for anything that is none."""
    text = value if isinstance(value, str) else ""
    return text if text.isprintable() and len(text) <= 64 else ""


def _number(raw: Mapping[str, Any], name: str, kind: type) -> Any:
    value = raw.get(name)
    return None if value is None else _checked_number(value, name, kind)


def _checked_number(value: object, name: str, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise AdapterError(f"adapter_config.json: {name}={shown(value)} is not a number.")
    # The comparison with a float's largest value also holds for whole numbers of any length.
    if not abs(value) <= sys.float_info.max or (kind is int and value < 1):
        raise AdapterError(f"adapter_config.json: {name}={shown(value)} is out of range.")
    if kind is int and value != int(value):
        raise AdapterError(f"adapter_config.json: {name}={shown(value)} is not a whole number.")
    return kind(value)


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"adapter_config.json: {name}={shown(value)} is not true or false.")
    return bool(value)


def _names(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = raw.get(name) or ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple, set)) or not all(isinstance(v, str) for v in value):
        raise AdapterError(
            f"adapter_config.json: {name} must be a list of names, got {shown(value)}."
        )
    return tuple(value)


def _pattern(raw: Mapping[str, Any], name: str, kind: type) -> dict[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise AdapterError(f"adapter_config.json: {name} must be an object, got {shown(value)}.")
    if not all(isinstance(key, str) for key in value):
        raise AdapterError(f"adapter_config.json: a key of {name} is no text.")
    return {k: _checked_number(v, f"{name}: {shown(k)}", kind) for k, v in value.items()}
