"""Adapters: files -> canonical factors -> host store -> device bank -> slots of a batch."""

from moegraft.adapters.bank import AdapterBank
from moegraft.adapters.bind import BoundAdapter, bind, check_bound
from moegraft.adapters.estimate import MemoryEstimate, estimate_bytes
from moegraft.adapters.file_policy import FilePolicy
from moegraft.adapters.flat import FlatIndex, flat_tensors
from moegraft.adapters.info import AdapterInfo
from moegraft.adapters.layouts import ReadOptions
from moegraft.adapters.read import AdapterSource, make_source, read_adapter
from moegraft.adapters.report import BindReport
from moegraft.adapters.spec import ModelSpec
from moegraft.adapters.store import AdapterStore
from moegraft.adapters.updater import AdapterUpdater

__all__ = [
    "AdapterBank",
    "AdapterInfo",
    "AdapterSource",
    "AdapterStore",
    "AdapterUpdater",
    "BindReport",
    "BoundAdapter",
    "FilePolicy",
    "FlatIndex",
    "MemoryEstimate",
    "ModelSpec",
    "ReadOptions",
    "bind",
    "check_bound",
    "estimate_bytes",
    "flat_tensors",
    "make_source",
    "read_adapter",
]
