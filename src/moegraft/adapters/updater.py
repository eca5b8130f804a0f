"""Updates of loaded adapters; tensors that come in the same shapes again are not read anew."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moegraft.adapters.info import AdapterInfo, ReadAs
from moegraft.adapters.layouts import ReadOptions
from moegraft.adapters.planned import PlannedUpdate, UnusualValuesError
from moegraft.adapters.read import make_source
from moegraft.adapters.store import AdapterStore
from moegraft.adapters.update_plan import Bind, TensorKinds, UpdatePlan, make_plan
from moegraft.errors import AdapterError, shown

#: Updates that are remembered, by their tensors and config: a plan holds the config's scales, so
#: that adapters of the same shapes share one only where their configs are equal.
_MAX_KNOWN = 8


@dataclass
class _Known:
    """An update that was read in full; ``plan`` is made when one like it comes again.

    Attributes:
        kinds, read_as: what was read, and how.
        tried: True once a plan was made, or found impossible (``plan`` is None then).
        lock: held while it is made.
    """

    kinds: TensorKinds
    read_as: ReadAs
    plan: UpdatePlan | None = None
    tried: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class AdapterUpdater:
    """Replaces the values of adapters in a store. Safe to use from several threads.

    The first update with tensors of some names, shapes and dtypes is read in full. From the second
    one on they are copied by a plan: nothing is bound again, and from a GPU a few launches copy and
    check them on their way into the arena.

    Args:
        store: where the adapters are.
        bind: reads an adapter for the store's bank; raises when it can't be served in full.
    """

    def __init__(self, store: AdapterStore, bind: Bind) -> None:
        self._store = store
        self._bind = bind
        self._lock = threading.Lock()
        self._known: OrderedDict[TensorKinds, list[_Known]] = OrderedDict()

    def update(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any] | None = None,
        options: ReadOptions | None = None,
    ) -> AdapterInfo:
        """Replace a stored adapter's values, see :meth:`AdapterStore.update`.

        When this returns the tensors have been read.

        Args:
            name: of a stored adapter.
            tensors: all its tensors, under the names of the load.
            config: the JSON of an adapter_config; None = as it was loaded or last updated with.
            options: None = as it was loaded or last updated with.

        Raises:
            AdapterError: an unknown name; tensors that can't be bound in full or are not finite;
                places that the loaded version has and these lack; or the bank's limits. The old
                version is served then as before.
        """
        with self._store.changing(name):
            before = self._store.read_as(name)
            if config is None:
                if before is None:
                    raise AdapterError(
                        f"{name!r} was added to the store without its config: pass config= to "
                        "update()."
                    )
                config = before.config
            if options is None and before is not None:
                options = before.options
            return self._update(name, tensors, config, options)

    def _update(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        options: ReadOptions | None,
    ) -> AdapterInfo:
        kinds = TensorKinds.of(tensors)
        known = None if kinds is None else self._find(kinds, config, options)
        plan = None if known is None else self._plan_of(known)
        if known is not None and plan is not None:
            info = self._by_plan(name, plan, tuple(tensors.values()), known.read_as)
            if info is not None:
                return info
        source = make_source(tensors, config, f"update of {shown(name)}")
        read_as = ReadAs.of(config, options)
        info = self._store.update(name, self._bind(source, options), read_as)
        if known is None and kinds is not None:
            self._remember(_Known(kinds, read_as))
        return info

    def _by_plan(
        self, name: str, plan: UpdatePlan, tensors: Sequence[torch.Tensor], read_as: ReadAs
    ) -> AdapterInfo | None:
        """Update by a plan; None when it must be read in full, which says what is wrong if so."""
        device = tensors[0].device
        here = self._store.bank.table.device
        if device.type != "cpu" and (device != here or plan.copies is None):
            return None
        try:
            return self._store.update_planned(name, PlannedUpdate(plan, tensors), read_as)
        except UnusualValuesError:
            return None

    def _find(
        self, kinds: TensorKinds, config: Mapping[str, Any], options: ReadOptions | None
    ) -> _Known | None:
        """Return what is known of updates of these kinds that are read so."""
        with self._lock:
            for known in self._known.get(kinds, ()):
                read_as = known.read_as
                same = read_as.config is config or read_as.config == config
                if same and read_as.options == options:
                    self._known.move_to_end(kinds)
                    return known
            return None

    def _plan_of(self, known: _Known) -> UpdatePlan | None:
        """Return the plan, made by the first who asks; others with the same kinds wait for it."""
        with known.lock:
            if not known.tried:
                bank, read_as = self._store.bank, known.read_as
                known.plan = make_plan(
                    known.kinds,
                    read_as.config,
                    read_as.options,
                    self._bind,
                    bank.layout,
                    bank.dtype,
                )
                known.tried = True
            return known.plan

    def _remember(self, known: _Known) -> None:
        """Keep what was read; the kinds that were used the longest time ago are forgotten."""
        with self._lock:
            self._known.setdefault(known.kinds, []).append(known)
            self._known.move_to_end(known.kinds)
            while sum(map(len, self._known.values())) > _MAX_KNOWN:
                oldest = next(iter(self._known.values()))
                del oldest[0]
                if not oldest:
                    self._known.popitem(last=False)
