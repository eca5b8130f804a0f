"""Load a transformers model whose experts stay quantised, in moegraft's own storage.

Everything else (attention, dense layers, shared experts, embeddings) is dequantised as it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from moegraft.env import logger
from moegraft.errors import MoegraftError, UnsupportedError, shorten
from moegraft.hosts.transformers.experts import find_activation, hold_weights
from moegraft.hosts.transformers.outside import outside_of
from moegraft.hosts.transformers.spec import model_spec, weight_layout
from moegraft.quant.checkpoint import Checkpoint, StoredExperts, place_of
from moegraft.quant.formats import UNQUANTIZED, format_of
from moegraft.quant.load import load_experts
from moegraft.quant.matrices import dequantise
from moegraft.quant.stored import LAYOUTS, StoredShape, find_layout
from moegraft.types import ExpertWeights, WeightLayout

#: A name in the checkpoint -> in the model.
Rename = Callable[[str], str]
#: Called with (layers read, layers in all).
LayerProgress = Callable[[int, int], None]
_LEAVES = sorted({leaf for layout in LAYOUTS for leaf in layout.leaves}, key=len, reverse=True)


def load_quantised(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    weight_format: str | None = None,
    progress: LayerProgress | None = None,
) -> Any:
    """Load a causal language model; ``moegraft.attach`` serves its experts as they are stored.

    The experts' tensors go straight from the files to where the layers read them; the model's own
    experts parameters are empty, so that the model runs attached only.

    Args:
        folder: the model: ``config.json`` and safetensors files in a layout that
            :mod:`moegraft.quant.stored` knows. Nothing is downloaded.
        dtype: of activations, and of everything that is not an expert.
        device: where to; ``attach`` says whether a backend runs the format there.
        weight_format: run the same values in another way, such as ``fp8-block-w8a16``; None = as
            stored.
        progress: called with (layers read, layers in all).

    Returns:
        The model, in eval mode.

    Raises:
        UnsupportedError: a format, or names of tensors, that are not known here.
        MoegraftError: the folder is no checkpoint, or lacks tensors.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise MoegraftError(f"{str(folder)!r} is not a transformers model: it has no config.json.")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.__dict__.pop("quantization_config", None)
    with torch.device(device), no_init_weights(), _empty_experts():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    rename = _renaming(model)
    with Checkpoint(folder) as checkpoint:
        _load_dense(model, checkpoint, rename)
        read = partial(
            load_experts, checkpoint, dtype=dtype, device=device, weight_format=weight_format
        )
        _load_experts(model, checkpoint, rename, read, progress)
    model.tie_weights()
    return model


@contextmanager
def _empty_experts() -> Iterator[None]:
    """Within the block, parameters of experts modules are made without memory."""

    def empty(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        experts = hasattr(type(module), "_apply_gate") or outside_of(module) is not None
        if parameter is None or not experts:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    # torch types it as without a result, and takes one in place of the parameter.
    handle: Any = register_module_parameter_registration_hook(cast(Any, empty))
    try:
        yield
    finally:
        handle.remove()


def _load_experts(
    model: Any,
    checkpoint: Checkpoint,
    rename: Rename,
    read: Callable[..., ExpertWeights],
    progress: LayerProgress | None,
) -> None:
    spec = model_spec(model)
    missing = {site.name for site in spec.sites if site.kind == "experts"}
    found = checkpoint.experts()
    for done, stored in enumerate(found):
        site = spec.resolve_experts(rename(stored.path))
        if site is None:  # such as of a draft head that the model does not build
            logger.warning("%s: the model has no %s", checkpoint.folder, stored.path)
            continue
        module = model.get_submodule(site.name)
        hold_weights(module, _weights(stored, module, read))
        missing.discard(site.name)
        if progress is not None:
            progress(done + 1, len(found))
    if missing:
        raise MoegraftError(
            f"{str(checkpoint.folder)!r} has no experts for {shorten(sorted(missing))}."
        )


def _weights(
    stored: StoredExperts, module: Any, read: Callable[..., ExpertWeights]
) -> ExpertWeights:
    layout: WeightLayout = weight_layout(module)
    activation = find_activation(module, layout)
    if stored.weight_format == UNQUANTIZED:
        weights = read(stored, layout, activation, weight_format=None)
    else:
        weights = read(stored, layout, activation)
    sizes = (weights.num_experts, weights.hidden, weights.intermediate)
    experts, first, second = module.down_proj.shape
    wanted = (experts, first, second) if layout.out_major else (experts, second, first)
    if sizes != wanted:
        raise MoegraftError(
            f"{stored.path} holds {sizes[0]} experts with H={sizes[1]}, I={sizes[2]}; the config "
            f"says {wanted[0]} with H={wanted[1]}, I={wanted[2]}."
        )
    return weights


def _renaming(model: Any) -> Rename:
    """Return what maps a checkpoint's names to the model's, as transformers itself does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    steps = [s for s in get_model_conversion_mapping(model) if isinstance(s, WeightRenaming)]

    def rename(name: str) -> str:
        found = f"{name}.weight"
        for step in steps:
            found = step.rename_source_key(found)[0]
        return str(found.removesuffix(".weight"))

    return rename


def _load_dense(model: Any, checkpoint: Checkpoint, rename: Rename) -> None:
    """Read everything but the experts, dequantised, into the model's parameters and buffers."""
    keys: dict[str, dict[str, str]] = {}
    for key in checkpoint.files:
        if place_of(key) is None:
            name, leaf = _split(key)
            keys.setdefault(rename(name), {})[leaf] = key
    state = {name: t for name, t in model.state_dict().items() if t.device.type != "meta"}
    left = set(keys)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    missing: list[str] = []
    with torch.no_grad():
        for name, target in state.items():
            found = keys.get(name, keys.get(name.removesuffix(".weight")))
            if found is None:
                if name not in tied:
                    missing.append(name)
                continue
            target.copy_(_dense(checkpoint, name, found))
            left -= {name, name.removesuffix(".weight")}
    if missing:
        raise UnsupportedError(
            f"{str(checkpoint.folder)!r} has no tensors for {len(missing)} of the model's "
            f"({shorten(missing)}): it is not complete, or names them in a way not known here."
        )
    if left:
        logger.warning(
            "%s: %d tensors have no place in the model and are not read: %s",
            checkpoint.folder, len(left), shorten(sorted(left)),
        )  # fmt: skip


def _split(key: str) -> tuple[str, str]:
    """Return (module, leaf) of a tensor that may be one of several of a matrix, else (key, "")."""
    stem, _, leaf = key.rpartition(".")
    return (stem, leaf) if leaf in _LEAVES or leaf.endswith("input_scale") else (key, "")


def _dense(checkpoint: Checkpoint, name: str, keys: dict[str, str]) -> torch.Tensor:
    if "" in keys:
        return checkpoint.get(keys[""])
    shapes: dict[str, StoredShape] = {leaf: checkpoint.shape(key) for leaf, key in keys.items()}
    layout = find_layout(shapes)
    weight_format = None if layout is None else layout.weight_format(shapes)
    if layout is None or weight_format is None:
        have = ", ".join(f"{leaf} {s.dtype} {list(s.shape)}" for leaf, s in sorted(shapes.items()))
        raise UnsupportedError(f"{name} is in no format known here; it has {have}.")
    tensors = {leaf: checkpoint.get(keys[leaf]) for leaf in layout.leaves}
    if weight_format == UNQUANTIZED:
        return tensors["weight"]
    return dequantise(layout.read(tensors), format_of(weight_format))
