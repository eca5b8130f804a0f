"""Loading, updating and unloading the adapters of a graft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moegraft.adapters import (
    AdapterBank,
    AdapterInfo,
    AdapterSource,
    AdapterStore,
    AdapterUpdater,
    BindReport,
    BoundAdapter,
    FlatIndex,
    MemoryEstimate,
    ModelSpec,
    ReadOptions,
    bind,
    check_bound,
    estimate_bytes,
    flat_tensors,
    make_source,
    read_adapter,
)
from moegraft.adapters.bank import BankMemory
from moegraft.adapters.dora import with_weights
from moegraft.adapters.file_policy import FilePolicy
from moegraft.adapters.info import ReadAs
from moegraft.errors import shown
from moegraft.parallel import RankShards


class Loading:
    """The part of :class:`moegraft.hosts.transformers.attach.Graft` that holds adapters."""

    model: Any
    spec: ModelSpec
    #: The same with this rank's sizes, and how to get there; None = the model is whole.
    _local_spec: ModelSpec
    _shards: RankShards | None
    store: AdapterStore
    bank: AdapterBank
    _updater: AdapterUpdater
    #: Where adapter files may lie, and limits for what they claim.
    _file_policy: FilePolicy

    def load(
        self,
        name: str,
        path: str | Path,
        options: ReadOptions | None = None,
        *,
        replace: bool = True,
    ) -> AdapterInfo:
        """Read an adapter folder and make it available under a name.

        A second load under the same name replaces the first by a new version; batches that are
        running keep the old one to their end.

        Args:
            name: any printable label.
            path: a PEFT adapter folder (``adapter_model.safetensors`` + ``adapter_config.json``),
                within the root of the graft's file policy.
            options: the caller's say where the file leaves room for doubt.
            replace: False = a name that is taken is an error; of two that load it at once, one
                gets it.

        Raises:
            AdapterError: it can't be read, bound in full, or is over the bank's limits; or the
                name is taken. Nothing has changed then.
        """
        source = read_adapter(path, self._file_policy, pin_memory=self.bank.pins)
        return self._add(name, source, options, replace)

    def load_tensors(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        options: ReadOptions | None = None,
        *,
        replace: bool = True,
    ) -> AdapterInfo:
        """Like :meth:`load`, from live tensors and the JSON of an adapter_config."""
        source = make_source(tensors, config, f"tensors for {shown(name)}")
        return self._add(name, source, options, replace)

    def load_flat(
        self,
        name: str,
        buffer: torch.Tensor,
        index: FlatIndex,
        config: Mapping[str, Any],
        options: ReadOptions | None = None,
        *,
        replace: bool = True,
    ) -> AdapterInfo:
        """Like :meth:`load_tensors`, from one buffer that holds all tensors.

        Args:
            name: any printable label.
            buffer: 1-D and contiguous, on the CPU (read where it is, packed before this returns)
                or on the model's device (packed there, in order with the current stream).
            index: tensor name -> ``(offset, shape)`` or ``(offset, shape, dtype)``; see
                :func:`moegraft.adapters.flat.flat_tensors`.
            config: the JSON of an adapter_config.
            options: the caller's say where names and shapes leave room for doubt.
            replace: as for :meth:`load`.
        """
        tensors = self._views(name, buffer, index)
        return self.load_tensors(name, tensors, config, options, replace=replace)

    def update(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any] | None = None,
        options: ReadOptions | None = None,
    ) -> AdapterInfo:
        """Replace the values of a loaded adapter, for all layers at once.

        Batches that start after this returned use the new version, running ones keep theirs to
        their end; :meth:`moegraft.adapters.AdapterStore.update` says when it takes which slot. No
        graph is captured again, unless the update brings factors to a place of the model where no
        adapter had any.

        Args:
            name: the name of a loaded adapter.
            tensors: all its tensors, under the names of the load.
            config: the JSON of an adapter_config; None = as it was loaded or last updated with.
            options: None = as it was loaded or last updated with.

        Raises:
            AdapterError: an unknown name; tensors that can't be bound in full or are not finite;
                places that the loaded version has and these lack; or the bank's limits. The old
                version is served then as before.
        """
        self._check_attached()
        return self._updater.update(name, tensors, config, options)

    def update_flat(
        self,
        name: str,
        buffer: torch.Tensor,
        index: FlatIndex,
        config: Mapping[str, Any] | None = None,
        options: ReadOptions | None = None,
    ) -> AdapterInfo:
        """Like :meth:`update`, from one buffer as :meth:`load_flat` takes it."""
        return self.update(name, self._views(name, buffer, index), config, options)

    def check(self, path: str | Path, options: ReadOptions | None = None) -> BindReport:
        """Report how an adapter folder would bind to this model, without loading it."""
        return bind(read_adapter(path, self._file_policy), self.spec, options).report

    def memory_estimate(
        self, source: str | Path | AdapterSource, options: ReadOptions | None = None
    ) -> MemoryEstimate:
        """Return exactly what an adapter would take in the bank, without loading it.

        Args:
            source: an adapter folder, or an adapter as read (:func:`moegraft.adapters.make_source`
                for tensors in memory).
            options: as for :meth:`load`.

        Raises:
            AdapterError: it can't be read or bound in full.
        """
        if not isinstance(source, AdapterSource):
            source = read_adapter(source, self._file_policy)
        bound = self._bound(source, options)
        return estimate_bytes(bound, self._local_spec, self.bank.dtype)

    @property
    def memory(self) -> BankMemory:
        """Bytes of the bank: the arena, what adapters take of it, its largest free range."""
        return self.bank.memory

    def unload(self, name: str) -> None:
        """Forget an adapter and free its memory; AdapterError for an unknown name."""
        self._check_attached()
        self.store.remove(name)

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep an adapter resident, or let it be evicted again."""
        self._check_attached()
        self.store.pin(name, pinned)

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """All loaded adapters."""
        return self.store.infos()

    def _add(
        self, name: str, source: AdapterSource, options: ReadOptions | None, replace: bool
    ) -> AdapterInfo:
        read_as = ReadAs.of(source.config.raw, options)
        bound = self._bound(source, options)
        return self.store.add(name, bound, read_as, source.memory, replace)

    def _bound(self, source: AdapterSource, options: ReadOptions | None) -> BoundAdapter:
        """Bind a source in full, to the whole model; its factors are those of this rank."""
        self._check_attached()
        bound = bind(source, self.spec, options)
        check_bound(bound.report, self.spec)
        if self._shards is None:
            return with_weights(bound, lambda name: self.model.get_submodule(name).weight)
        return replace(bound, factors=self._shards.slice(bound.factors).factors)

    def _views(self, name: str, buffer: torch.Tensor, index: FlatIndex) -> dict[str, torch.Tensor]:
        return flat_tensors(buffer, index, self.bank.device, f"the flat buffer for {shown(name)}")

    def _check_attached(self) -> None:
        raise NotImplementedError
