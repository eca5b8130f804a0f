"""Write a checkpoint with its experts in a weight format, from one of 16 or 32 bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from moegraft.errors import MoegraftError
from moegraft.quant.checkpoint import (
    INDEX_FILE,
    Checkpoint,
    Progress,
    StoredExperts,
    matrices_of,
    place_of,
)
from moegraft.quant.formats import UNQUANTIZED, WeightFormat, format_of
from moegraft.quant.matrices import QuantisedMatrix, dequantise, quantise
from moegraft.quant.write_names import PROJECTIONS, leaves_of, quantization_config

#: Largest file that is written, unless one tensor alone is larger.
MAX_FILE_BYTES = 4 << 30
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass
class Written:
    """What was written.

    Attributes:
        files: names of the weight files.
        num_bytes: of all of them; source_bytes: of the experts before, expert_bytes: after.
        matrices: experts' matrices that were quantised.
        largest_error: of ``|W' - W| / |W|`` over all matrices.
        kept: tensors that were copied as they are.
    """

    files: list[str] = field(default_factory=list)
    num_bytes: int = 0
    source_bytes: int = 0
    expert_bytes: int = 0
    matrices: int = 0
    largest_error: float = 0.0
    kept: int = 0


def quantise_checkpoint(
    folder: Path,
    out: Path,
    name: str,
    *,
    interleaved: bool = False,
    transposed: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: Progress | None = None,
) -> Written:
    """Copy a model's folder with its experts quantised; everything else stays as it is.

    Tensor by tensor: what is in memory is one file of the result, and one layer's experts where
    they are fused. FP8 is written as DeepSeek and Qwen do, per row or matrix as compressed-tensors
    does; NVFP4 as ModelOpt does; MXFP4 as compressed-tensors does, for interleaved experts as
    gpt-oss does.

    Args:
        folder: the model, safetensors.
        out: a folder that does not exist.
        name: of :data:`moegraft.quant.FORMATS`.
        interleaved: fused gate and up lie row by row, as in gpt-oss; MXFP4 only.
        transposed: fused tensors are ``[E, in, out]``, as in gpt-oss.
        max_file_bytes: of one weight file.
        progress: called with (matrices done, matrices in all).

    Raises:
        UnsupportedError: no such format.
        MoegraftError: ``out`` is there, no experts, or experts that are quantised already. Nothing
            is left behind then.
    """
    weight_format = format_of(name)
    if out.exists():
        raise MoegraftError(f"{str(out)!r} exists already; give a folder that does not.")
    with Checkpoint(folder) as checkpoint:
        layers = checkpoint.experts()
        if not layers:
            raise MoegraftError(f"{str(folder)!r} has no experts: no tensor's name is of one.")
        _check(layers, weight_format, interleaved)
        out.mkdir(parents=True)
        try:
            return _write(
                checkpoint, layers, out, weight_format, transposed, max_file_bytes, progress
            )
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)
            raise


def _check(
    layers: tuple[StoredExperts, ...], weight_format: WeightFormat, interleaved: bool
) -> None:
    for stored in layers:
        if stored.weight_format != UNQUANTIZED:
            raise MoegraftError(
                f"{stored.path} is stored as {stored.weight_format} already; quantise the "
                "checkpoint of 16 or 32 bits."
            )
        if interleaved and stored.fused and weight_format.name != "mxfp4":
            raise MoegraftError(
                f"{stored.path} has gate and up row by row, for which checkpoints have a layout in "
                f"mxfp4 only, not in {weight_format.name}."
            )


def _write(
    checkpoint: Checkpoint,
    layers: tuple[StoredExperts, ...],
    out: Path,
    weight_format: WeightFormat,
    transposed: bool,
    max_file_bytes: int,
    progress: Progress | None,
) -> Written:
    written = Written()
    total = sum(len(_matrices(stored, weight_format)) for stored in layers)
    files = _Files(out, max_file_bytes)
    for key in checkpoint.files:
        if place_of(key) is None:
            files.add(key, checkpoint.get(key))
            written.kept += 1
    for stored in layers:
        for key, tensor in _layer(checkpoint, stored, weight_format, transposed, written):
            files.add(key, tensor)
            if progress is not None:
                progress(written.matrices, total)
    written.files = files.finish()
    written.num_bytes = files.num_bytes
    config = {
        **checkpoint.config,
        "quantization_config": quantization_config(checkpoint, weight_format, layers),
    }
    for path in sorted(checkpoint.folder.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and path.name != INDEX_FILE:
            shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return written


def _matrices(stored: StoredExperts, weight_format: WeightFormat) -> list[tuple[int, str]]:
    """(expert, part) of all matrices that one layer's experts are written as."""
    parts = stored.parts
    if parts[0] == "gate_up" and weight_format.name != "mxfp4":
        parts = ("gate", "up", "down")
    return [(expert, part) for expert in range(stored.num_experts) for part in parts]


def _layer(
    checkpoint: Checkpoint,
    stored: StoredExperts,
    weight_format: WeightFormat,
    transposed: bool,
    written: Written,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of one layer's experts."""
    for expert, part in matrices_of(stored):
        keys = stored.leaves(expert, part)
        tensor = checkpoint.get(keys["weight"])
        bias = checkpoint.get(keys["bias"]) if "bias" in keys else None
        written.source_bytes += tensor.nbytes
        if not stored.fused:
            name = keys["weight"].removesuffix(".weight")
            found = leaves_of(name, _quantised(tensor, weight_format, written), weight_format)
            if bias is not None:
                found[keys["bias"]] = bias
        else:
            stack = tensor.transpose(1, 2) if transposed else tensor
            write = _blocks if weight_format.name == "mxfp4" else _singles
            found = write(stored.path, part, stack, bias, weight_format, written)
        for key, value in found.items():
            written.expert_bytes += value.nbytes
            yield key, value


def _blocks(
    path: str,
    part: str,
    stack: torch.Tensor,
    bias: torch.Tensor | None,
    weight_format: WeightFormat,
    written: Written,
) -> dict[str, torch.Tensor]:
    """Return one tensor of blocks and one of scales for all experts, as gpt-oss has them."""
    width = weight_format.block[1]
    if stack.shape[-1] % width:
        raise MoegraftError(
            f"{path}.{part} has {stack.shape[-1]} columns, no multiple of the {width} of a block."
        )
    each = [_quantised(matrix, weight_format, written) for matrix in stack]
    name = f"{path}.{PROJECTIONS[part]}"
    found = {
        f"{name}_blocks": torch.stack([m.values for m in each]).unflatten(-1, (-1, width // 2)),
        f"{name}_scales": torch.stack([m.scales for m in each]),
    }
    return found if bias is None else {**found, f"{name}_bias": bias}


def _singles(
    path: str,
    part: str,
    stack: torch.Tensor,
    bias: torch.Tensor | None,
    weight_format: WeightFormat,
    written: Written,
) -> dict[str, torch.Tensor]:
    """Return the tensors of each expert, gate and up apart."""
    parts = ("gate", "up") if part == "gate_up" else (part,)
    found: dict[str, torch.Tensor] = {}
    for expert, matrix in enumerate(stack):
        for i, rows in enumerate(matrix.chunk(len(parts))):
            name = f"{path}.{expert}.{PROJECTIONS[parts[i]]}"
            found.update(leaves_of(name, _quantised(rows, weight_format, written), weight_format))
            if bias is not None:
                found[f"{name}.bias"] = bias[expert].chunk(len(parts))[i].clone()
    return found


def _quantised(
    matrix: torch.Tensor, weight_format: WeightFormat, written: Written
) -> QuantisedMatrix:
    found = quantise(matrix, weight_format)
    exact = matrix.float()
    error = (dequantise(found, weight_format) - exact).norm() / exact.norm().clamp(min=1e-30)
    written.largest_error = max(written.largest_error, float(error))
    written.matrices += 1
    return found


class _Files:
    """Gathers tensors into files of limited size; the index comes last."""

    def __init__(self, out: Path, max_bytes: int) -> None:
        self._out = out
        self._max = max_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._parts: list[list[str]] = []
        self.num_bytes = 0

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Take a tensor; writes a file when it would get too large."""
        if self._pending and self._pending_bytes + tensor.nbytes > self._max:
            self._flush()
        self._pending[key] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes

    def finish(self) -> list[str]:
        """Write the rest and the index; return the names of the files."""
        self._flush()
        total = len(self._parts)
        names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
        for i, name in enumerate(names):
            (self._out / _part(i)).rename(self._out / name)
        where = {key: name for keys, name in zip(self._parts, names, strict=True) for key in keys}
        index = {
            "metadata": {"total_size": self.num_bytes},
            "weight_map": dict(sorted(where.items())),
        }
        (self._out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return names

    def _flush(self) -> None:
        if not self._pending:
            return
        save_file(self._pending, self._out / _part(len(self._parts)), metadata={"format": "pt"})
        self.num_bytes += self._pending_bytes
        self._parts.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0


def _part(index: int) -> str:
    return f"part-{index:05d}.safetensors"
