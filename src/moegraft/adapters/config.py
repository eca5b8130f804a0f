"""adapter_config.json: what a LoRA's tensors don't say themselves (scales, targets, producer)."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moegraft.errors import AdapterError

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

    @staticmethod
    def parse(raw: Mapping[str, Any]) -> AdapterConfig:
        """Check and read a config; raises :class:`AdapterError` naming the field at fault."""
        peft_type = raw.get("peft_type", "LORA")
        if peft_type != "LORA":
            raise AdapterError(
                f"adapter_config.json says peft_type={peft_type!r}; only LORA adapters are served."
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
            peft_version=str(raw.get("peft_version") or ""),
            raw=raw,
        )

    def rank_for(self, name: str, tensor_rank: int) -> int:
        """Return the config's rank for a module or parameter path, else the tensors' rank.

        PEFT's rule: the first pattern with ``re.match(rf"(.*\\.)?({key})$", name)`` wins.
        """
        found = _first_match(self.rank_pattern, name)
        if found is not None:
            return int(found)
        return self.r if self.r is not None else tensor_rank

    def scale_for(self, name: str, tensor_rank: int) -> float:
        """Return alpha/r, or alpha/sqrt(r) with rslora; alpha and r are looked up separately.

        Without any alpha, alpha is r: the scale is 1, or sqrt(r) with rslora, whatever the order
        of keys.
        """
        rank = self.rank_for(name, tensor_rank)
        alpha = _first_match(self.alpha_pattern, name)
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
        return f"PEFT {self.peft_version}" if self.peft_version else "unknown"


def _first_match(patterns: Mapping[str, Any], name: str) -> float | None:
    for key, value in patterns.items():
        if re.match(_whole(key), name):
            return float(value)
    return None


def _whole(key: str) -> str:
    """Return the expression that PEFT matches a module's path with."""
    return rf"(.*\.)?({key})$"


def _check_init(init: object) -> None:
    if isinstance(init, str) and init.lower().startswith(_INITS_THAT_CHANGE_THE_BASE):
        raise AdapterError(
            f"adapter_config.json says init_lora_weights={init!r}: this changes the base weights "
            "too, so the factors don't fit the original model. Save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion; or, if this model already has the changed "
            "base weights, set init_lora_weights to true."
        )


def _number(raw: Mapping[str, Any], name: str, kind: type) -> Any:
    value = raw.get(name)
    return None if value is None else _checked_number(value, name, kind)


def _checked_number(value: object, name: str, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise AdapterError(f"adapter_config.json: {name}={value!r} is not a number.")
    # The comparison with a float's largest value also holds for whole numbers of any length.
    if not abs(value) <= sys.float_info.max or (kind is int and value < 1):
        raise AdapterError(f"adapter_config.json: {name}={value!r} is out of range.")
    if kind is int and value != int(value):
        raise AdapterError(f"adapter_config.json: {name}={value!r} is not a whole number.")
    return kind(value)


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"adapter_config.json: {name}={value!r} is not true or false.")
    return bool(value)


def _names(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = raw.get(name) or ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple, set)) or not all(isinstance(v, str) for v in value):
        raise AdapterError(f"adapter_config.json: {name} must be a list of names, got {value!r}.")
    return tuple(value)


def _pattern(raw: Mapping[str, Any], name: str, kind: type) -> dict[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise AdapterError(f"adapter_config.json: {name} must be an object, got {value!r}.")
    for key in value:
        try:
            re.compile(_whole(key))
        except (re.error, OverflowError, RecursionError) as error:
            raise AdapterError(
                f"adapter_config.json: {name} key {key!r} is not a regular expression: {error}."
            ) from error
    return {key: _checked_number(v, f"{name}: {key}", kind) for key, v in value.items()}
