"""Attach moegraft to a transformers model, and take it off again without a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moegraft.adapters import AdapterBank, AdapterStore, AdapterUpdater
from moegraft.adapters.file_policy import DEFAULT_POLICY, FilePolicy
from moegraft.errors import MoegraftError, UnsupportedError, shown
from moegraft.graphs import GraphRunner
from moegraft.hosts.transformers import experts as experts_host
from moegraft.hosts.transformers.generate import Generation
from moegraft.hosts.transformers.loading import Loading
from moegraft.hosts.transformers.outside import ShadowedForward, outside_of
from moegraft.hosts.transformers.router import hook_router
from moegraft.hosts.transformers.row_vectors import RowVectors
from moegraft.hosts.transformers.sharding import model_shards
from moegraft.hosts.transformers.siblings import install_linears
from moegraft.hosts.transformers.spec import model_spec
from moegraft.hosts.transformers.state import StepState
from moegraft.layer import MoeLoraLayer
from moegraft.linear import LinearLora
from moegraft.sites import VECTOR_KINDS, vector_name

_ATTACHED = "_moegraft_graft"
#: Marks linears and routers that carry hooks of a graft.
_HOOKED = "_moegraft_hooked"


class Graft(Loading, Generation):
    """A transformers model with adapters attached; made by :func:`attach`.

    The model's weights are never copied, merged or changed. Calling ``graft.model`` directly is
    the base model.

    Attributes:
        model: the model itself.
        spec: the places where adapters attach, with the sizes of the whole model.
        store: the adapters by name.
        bank: the slots.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_adapters: int,
        max_rank: int,
        arena_bytes: int | None,
        backend: str | None,
        fuse_linears: bool | None,
        file_policy: FilePolicy,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self._file_policy = file_policy
        self.spec = model_spec(model)
        self._shards = model_shards(model, self.spec)
        self._local_spec = self.spec
        if self._shards is not None:
            self.spec = replace(self.spec, serves_vectors=False)  # they are whole, not slices
            self._local_spec = replace(self.spec, sites=self._shards.local_sites)
        parameter = next(model.parameters())
        self.bank = AdapterBank(
            self._local_spec.table_sites,
            num_slots=max_adapters,
            max_rank=max_rank,
            dtype=parameter.dtype,
            device=parameter.device,
            arena_bytes=arena_bytes,
        )
        self.store = AdapterStore(self.bank)
        self._updater = AdapterUpdater(self.store, self._bound)
        self._state = StepState()
        self._handles: list[Any] = []
        self._experts: list[nn.Module] = []
        self._outside: list[ShadowedForward] = []
        self._previous_implementation: Any = None
        self._hooked: dict[str, nn.Module] = {}
        self.layers: dict[str, MoeLoraLayer] = {}
        on_gpu = parameter.device.type == "cuda"
        self._install(backend, on_gpu if fuse_linears is None else fuse_linears)
        if on_gpu:
            self._use_graphs(GraphRunner)

    def detach(self) -> None:
        """Restore the model exactly as it was; loaded adapters are dropped. Safe to call twice."""
        self._drop_graphs()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._experts:
            experts_host.set_graft(module, None)
        for shadow in self._outside:
            shadow.remove()
        if self._previous_implementation is not None:
            self.model.set_experts_implementation(self._previous_implementation)
            self._previous_implementation = None
        self._experts.clear()
        self._outside.clear()
        for module in self._hooked.values():
            module.__dict__.pop(_HOOKED, None)
        self._hooked.clear()
        self.layers.clear()
        self.model.__dict__.pop(_ATTACHED, None)
        self.__dict__.pop("_updater", None)  # which holds this, so that memory would go late
        for info in self.store.infos():
            self.store.remove(info.name)

    def _check_attached(self) -> None:
        if self.model.__dict__.get(_ATTACHED) is not self:
            raise MoegraftError("This graft was detached; call moegraft.attach(model) again.")
        if not all(shadow.is_in_place() for shadow in self._outside):
            raise MoegraftError(
                "The forward of an experts module was replaced after attach(), so its adapters "
                "would be lost: detach() and attach() again."
            )
        for module in self._experts:
            if outside_of(module) is not None:
                continue
            now = getattr(getattr(module, "config", None), "_experts_implementation", None)
            if now != experts_host.IMPLEMENTATION:
                raise MoegraftError(
                    f"The model's experts implementation was changed to {now!r} after attach() (by "
                    "hand, or through a config object that another model shares), so its experts' "
                    "adapters would be lost: detach() and attach() again."
                )
        for name, module in self._hooked.items():
            if self.model.get_submodule(name) is not module:
                raise MoegraftError(
                    f"{name} was replaced after attach(), so its adapters would be lost: detach() "
                    "and attach() again."
                )

    def _install(self, backend: str | None, fuse_linears: bool) -> None:
        # Everything that can be refused is built before the model is touched.
        layers: list[tuple[str, nn.Module, MoeLoraLayer]] = []
        linears: dict[str, LinearLora] = {}
        routers: dict[str, LinearLora] = {}
        vectors: dict[str, RowVectors] = {}
        for site in self.spec.sites:
            module: Any = self.model.get_submodule(site.name)
            _check_free(site.name, module, self.bank.device)
            table = self.bank.site_table(site.name)
            if site.kind == "experts":
                weights = experts_host.expert_weights(site.name, module)
                layers.append((site.name, module, MoeLoraLayer(weights, table, backend=backend)))
                continue
            lora = LinearLora(table, module.weight.dtype, module.weight.device, backend)
            (routers if site.kind == "router" else linears)[site.name] = lora
            self._hooked[site.name] = module
            if site.kind == "linear" and self.spec.serves_vectors:
                vectors[site.name] = self._row_vectors(site.name, module, backend)
        if layers:
            self._use_experts(layers)
        self._handles += install_linears(self.model, linears, self._state, fuse_linears, vectors)
        for name, lora in routers.items():
            self._handles += hook_router(name, self._hooked[name], lora, self._state)
        for module in self._hooked.values():
            module.__dict__[_HOOKED] = True
        hook = self._state.before_forward
        self._handles.append(self.model.register_forward_pre_hook(hook, with_kwargs=True))
        after = self._state.after_forward
        self._handles.append(self.model.register_forward_hook(after, always_call=True))
        self.model.__dict__[_ATTACHED] = self

    def _row_vectors(self, name: str, module: Any, backend: str | None) -> RowVectors:
        where = (module.weight.dtype, module.weight.device, backend)
        tables = {k: self.bank.site_table(vector_name(name, k)) for k in VECTOR_KINDS}
        return RowVectors(
            module,
            dora=LinearLora(tables["dora"], *where),
            bias=LinearLora(tables["lora_bias"], *where),
        )

    def _use_experts(self, layers: Sequence[tuple[str, nn.Module, MoeLoraLayer]]) -> None:
        if any(outside_of(module) is None for _, module, _ in layers):
            self._use_registry()
        for name, module, layer in layers:
            graft = experts_host.ExpertsGraft(layer, self._state, self._shards is not None)
            experts_host.set_graft(module, graft)
            self._experts.append(module)
            self.layers[name] = layer
            if outside_of(module) is not None:
                self._outside.append(ShadowedForward(module, graft))

    def _use_registry(self) -> None:
        experts_host.register()
        previous = self.model.get_experts_implementation()
        if experts_host.IMPLEMENTATION in previous.values():
            raise UnsupportedError(
                "This model shares its config object with a model that is attached already; give "
                "it one of its own: build it from copy.deepcopy(config)."
            )
        self._previous_implementation = previous
        self.model.set_experts_implementation(experts_host.IMPLEMENTATION)


def _check_free(path: str, module: nn.Module, device: torch.device) -> None:
    """Raise :class:`UnsupportedError` when a module can't take a graft now."""
    if experts_host.is_attached(module) or _HOOKED in module.__dict__:
        raise UnsupportedError(
            f"{path} belongs to a model that is attached already; detach that one first."
        )
    if hasattr(module, "parametrizations"):
        raise UnsupportedError(
            f"{path} has parametrised weights ({type(module).__name__}), which can't be served in "
            "place: torch.nn.utils.parametrize.remove_parametrizations() first."
        )
    elsewhere = experts_host.holds_weights(module)
    for parameter in module.parameters():
        if parameter.device != device and not (elsewhere and parameter.is_meta):
            raise UnsupportedError(
                f"{path} is on {parameter.device}, the model's first parameter on {device}: a "
                "model that is spread over devices is not served. Load it on one, such as with "
                'device_map="cuda:0".'
            )


def attach(
    model: Any,
    *,
    max_adapters: int = 8,
    max_rank: int = 64,
    arena_bytes: int | None = None,
    backend: str | None = None,
    fuse_linears: bool | None = None,
    file_policy: FilePolicy | None = None,
) -> Graft:
    """Attach moegraft to a transformers model with Mixture-of-Experts layers.

    Nothing of transformers is patched: experts go through its registry, linears and routers get
    forward hooks. On a GPU, forwards of this model's instances are shadowed too, where linears
    share a launch and where decode steps are captured. ``graft.detach()`` restores it exactly.

    Args:
        model: a transformers ``PreTrainedModel`` in eval use, fp32, bf16 or fp16.
        max_adapters: adapters that can be live in one batch (slots); more can be loaded.
        max_rank: largest LoRA rank that may be loaded.
        arena_bytes: fixed memory for factors; None = grow as needed.
        backend: force a backend by name; None = chosen by the plan.
        fuse_linears: serve linears that read the same input (q, k and v; gate and up) in one
            launch; None = on a GPU. Their forwards are shadowed then.
        file_policy: the folder that all adapter files must lie in, and limits of their sizes;
            None = no folder, default limits. Give one when paths come from requests.

    Returns:
        The graft, with ``load``, ``generate``, ``forward``, ``unload`` and ``detach``.

    Raises:
        UnsupportedError: the model has no such interface, is already attached, or has experts that
            no backend can run; says which and why. The model is unchanged then.
        PlanError: no backend for its dtype and device.
        MoegraftError: an argument of another type, or a size that means nothing.
    """
    for name, given, kind in (
        ("backend", backend, str),
        ("fuse_linears", fuse_linears, bool),
        ("file_policy", file_policy, FilePolicy),
    ):
        if given is not None and not isinstance(given, kind):
            raise MoegraftError(f"{name}={shown(given)} is no {kind.__name__} (or None).")
    if not isinstance(model, nn.Module) or not hasattr(model, "set_experts_implementation"):
        raise UnsupportedError(
            f"{type(model).__name__} has no experts interface; attach() takes a transformers "
            "PreTrainedModel (transformers >= 5.17)."
        )
    wrapped = next((m for m in model.modules() if type(m).__module__.startswith("peft.")), None)
    if wrapped is not None:
        raise UnsupportedError(
            f"The model carries PEFT layers ({type(wrapped).__name__}): attach to the plain model "
            "(peft_model.unload()) and load the adapter with graft.load()."
        )
    if _ATTACHED in model.__dict__:
        raise UnsupportedError(
            "This model is already attached; use that graft, or detach() it first."
        )
    return Graft(
        model,
        max_adapters=max_adapters,
        max_rank=max_rank,
        arena_bytes=arena_bytes,
        backend=backend,
        fuse_linears=fuse_linears,
        file_policy=file_policy or DEFAULT_POLICY,
    )
