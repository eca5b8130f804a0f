"""Adapters are read by moegraft, and nothing is left half loaded.

vLLM asks its ``WorkerLoRAManager`` to add an adapter: it reads the file into a ``LoRAModel``
(module name -> factors), registers it and copies it to a slot. What is different here, where all
experts layers of the model run on moegraft:

- Factors of experts are found by moegraft's own readers, in every layout they know and without
  vLLM's flags for one or the other; experts and projections may be missing.
- Every tensor takes effect or the adapter is refused, by name. vLLM itself drops factors of modules
  that the model lacks.
- With a root, adapters come from there only.
- An adapter that fails on its way to a slot is taken out again.

vLLM sends the text of the error that is raised here to whoever asked, over HTTP too.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from vllm.lora import worker_manager as stock_workers
from vllm.lora.lora_model import LoRAModel

from moegraft.adapters import AdapterSource, read_adapter
from moegraft.adapters.read import WEIGHTS_FILE
from moegraft.errors import AdapterError
from moegraft.hosts.vllm.answers import REFUSED
from moegraft.hosts.vllm.counters import count
from moegraft.hosts.vllm.experts_factors import bind_experts, experts_layers
from moegraft.hosts.vllm.linear_checks import check_linears
from moegraft.hosts.vllm.settings import check_folder, file_policy

_loading_for: ContextVar[Any] = ContextVar("moegraft_loading_for", default=None)


def install() -> None:
    """Put the functions of this module around vLLM's."""
    LoRAModel.from_local_checkpoint = classmethod(
        _reading_with_moegraft(LoRAModel.from_local_checkpoint.__func__)
    )
    base, cached = stock_workers.WorkerLoRAManager, stock_workers.LRUCacheWorkerLoRAManager
    base._load_adapter = _explaining(base._load_adapter)
    for workers in (base, cached):
        workers.add_adapter = _all_or_nothing(workers.add_adapter)


def _reading_with_moegraft(stock: Any) -> Any:
    @functools.wraps(stock)
    def from_local_checkpoint(cls: Any, lora_dir: str, *args: Any, **kwargs: Any) -> Any:
        manager = _loading_for.get()
        elsewhere = kwargs.get("tensorizer_config_dict")  # older versions: another kind of file
        if manager is None or elsewhere or not _reads(manager, lora_dir):
            return stock(cls, lora_dir, *args, **kwargs)
        return _read(cls, manager, lora_dir, **_named(args, kwargs))

    return from_local_checkpoint


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(("expected_lora_modules", "peft_helper"), args, strict=False)), **kwargs}


def _reads(manager: Any, lora_dir: str) -> bool:
    """Return True where moegraft reads: safetensors, for a model whose experts it serves."""
    return (Path(lora_dir) / WEIGHTS_FILE).is_file() and bool(experts_layers(manager))


def _read(cls: Any, manager: Any, lora_dir: str, **kwargs: Any) -> Any:
    """Return the ``LoRAModel`` of a folder; see vLLM's ``from_local_checkpoint``."""
    source = read_adapter(lora_dir, file_policy())
    skip = kwargs.get("skip_prefixes")
    others = {
        key: tensor
        for key, tensor in source.tensors.items()
        if not _of_experts(source, key) and not (skip and cls._should_skip_module(key, skip))
    }
    experts = {
        key: tensor
        for key, tensor in source.tensors.items()
        if _of_experts(source, key) and not (skip and cls._should_skip_module(key, skip))
    }
    dtype = kwargs["dtype"]
    lora = cls.from_lora_tensors(
        lora_model_id=kwargs["lora_model_id"],
        tensors=others,
        peft_helper=kwargs["peft_helper"],
        device=kwargs["device"],
        dtype=dtype,
        model_vocab_size=kwargs["model_vocab_size"],
        weights_mapper=kwargs["weights_mapper"],
        skip_prefixes=skip,
    )
    check_linears(manager, lora)
    if experts:
        keys = {key: source.keys[key] for key in experts}
        part = AdapterSource(experts, keys, source.config, source.origin)
        lora.loras.update(bind_experts(manager, part, dtype))
    if not lora.loras:
        raise AdapterError(f"{lora_dir} holds no factor that this engine serves.")
    return lora


def _of_experts(source: AdapterSource, key: str) -> bool:
    return "experts" in source.keys[key].module.split(".")


def _explaining(stock: Any) -> Any:
    @functools.wraps(stock)
    def _load_adapter(self: Any, lora_request: Any) -> Any:
        token = _loading_for.set(self._adapter_manager)
        try:
            check_folder(lora_request.lora_path)
            lora = stock(self, lora_request)
        except Exception as error:
            count("adapters_refused")
            if type(error).__name__ == "LoRAAdapterNotFoundError":
                raise  # vLLM makes 404 of it
            raise _refusal(lora_request, error) from error
        finally:
            _loading_for.reset(token)
        count("adapters_loaded")
        return lora

    return _load_adapter


def _all_or_nothing(stock: Any) -> Any:
    @functools.wraps(stock)
    def add_adapter(self: Any, lora_request: Any) -> bool:
        manager, number = self._adapter_manager, lora_request.lora_int_id
        before = manager.get_adapter(number)
        try:
            return bool(stock(self, lora_request))
        except Exception as error:
            if manager.get_adapter(number) is not before:
                manager.remove_adapter(number)
                raise _refusal(lora_request, error) from error
            raise

    return add_adapter


def _refusal(lora_request: Any, error: Exception) -> AdapterError:
    # How to leave tensors out is for moegraft's own callers; vLLM has no such option.
    text = str(error).partition(" To serve the adapter without them")[0]
    text = text or f"{type(error).__name__} in vLLM, without a text"
    return AdapterError(f"{REFUSED} {lora_request.lora_name!r}: {text}")
