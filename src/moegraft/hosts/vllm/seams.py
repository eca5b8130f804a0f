"""Where vLLM lets others in, and where it is opened: what is replaced, all in one place.

- The tuple of LoRA wrapper classes, from which vLLM picks one per layer.
- ``FusedMoEModularMethod``, through vLLM's registry of out-of-tree operators: from 0.33 on a reload
  of weights makes a new kernel object, and moegraft's experts must be put into that one too.
- The name of the platform's punica wrapper class.
- The hash of the LoRA configuration, which names the folder of compiled models: with and without
  moegraft they differ.
- How adapters are read and added, see :mod:`moegraft.hosts.vllm.loading`, and what the HTTP server
  answers when one is refused, see :mod:`moegraft.hosts.vllm.answers`.
"""

from __future__ import annotations

import logging
from typing import Any

from moegraft._version import __version__
from moegraft.env import vllm_linears

logger = logging.getLogger("vllm.moegraft")
_METHOD = "FusedMoEModularMethod"


def reason_against() -> str | None:
    """Return None when everything that :func:`install` replaces is there, else what is not."""
    from vllm.lora import utils
    from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
    from vllm.model_executor.custom_op import op_registry_oot

    classes = getattr(utils, "_all_lora_classes", ())
    if FusedMoEWithLoRA not in classes or FusedMoE3DWithLoRA not in classes:
        return "vLLM's list of LoRA layers does not hold its experts layers"
    if _METHOD in op_registry_oot:
        return f"another plugin has replaced vLLM's {_METHOD}: {op_registry_oot[_METHOD]}"
    from vllm.platforms import current_platform

    from moegraft.hosts.vllm.punica import OURS

    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        return f"the platform is {current_platform.device_name}; served are CUDA and CPU"
    name = current_platform.get_punica_wrapper()
    return None if name in OURS else f"the platform's {name} is not known; known are {list(OURS)}"


def install() -> None:
    """Replace vLLM's classes by moegraft's; call once."""
    from vllm.lora import utils
    from vllm.lora.layers import fused_moe as stock
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.fused_moe import fused_moe_modular_method as method

    from moegraft.hosts.vllm import answers, layers, linears, loading
    from moegraft.hosts.vllm.method import ModularMethod

    ours: dict[Any, Any] = {
        stock.FusedMoEWithLoRA: layers.FusedMoEWithLoRA,
        stock.FusedMoE3DWithLoRA: layers.FusedMoE3DWithLoRA,
    }
    if vllm_linears():
        linears.register_operator()
        ours.update(linears.our_linears())
    utils._all_lora_classes = tuple(ours.get(c, c) for c in utils._all_lora_classes)
    CustomOp.register_oot(ModularMethod, name=_METHOD)
    ModularMethod.name = method.FusedMoEModularMethod.name  # what custom_ops lists call it
    _replace_punica()
    loading.install()
    answers.install()
    _separate_compile_caches()
    logger.info(
        "moegraft is active: MoE layers%s with LoRA run on it.",
        " and linears" if vllm_linears() else "",
    )


def _replace_punica() -> None:
    from vllm.platforms import current_platform

    from moegraft.hosts.vllm.punica import OURS

    ours = OURS[current_platform.get_punica_wrapper()]
    name = f"{ours.__module__}.{ours.__name__}"
    type(current_platform).get_punica_wrapper = classmethod(lambda cls: name)


def _separate_compile_caches() -> None:
    from vllm.config.lora import LoRAConfig

    stock, ours = LoRAConfig.compute_hash, f"moegraft-{__version__}-{int(vllm_linears())}"
    LoRAConfig.compute_hash = lambda self: f"{stock(self)}-{ours}"
