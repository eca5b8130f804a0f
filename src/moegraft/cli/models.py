"""Load models and tokenizers from local folders, without the noise of the libraries."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moegraft.errors import MoegraftError, PlanError, UnsupportedError

_EXTRAS = {"transformers": "transformers", "peft": "demo"}
#: Without any of these transformers makes up an empty tokenizer instead of an error.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.tiktoken", "tekken.json", "*.spm", "spiece*")


def require(*packages: str) -> None:
    """Raise :class:`MoegraftError` with the pip command for a package that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise MoegraftError(
                f"{package} is not installed; this command needs it: "
                f"pip install -e '.[{_EXTRAS[package]}]' in the clone of moegraft."
            )


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Within the block transformers prints no progress bars or warnings, and never downloads."""
    require("transformers")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def check_model_folder(path: Path) -> None:
    """Raise :class:`MoegraftError` unless the folder holds a transformers model's config."""
    if not path.exists():
        raise MoegraftError(
            f"There is no model folder {str(path)!r}. moegraft never downloads; fetch it first "
            "(hf download <name> --local-dir <folder>)."
        )
    if not (path / "config.json").is_file():
        raise MoegraftError(f"{str(path)!r} is not a transformers model: it has no config.json.")


def check_device(device: str, dtype: str) -> None:
    """Raise unless a backend runs layers of this dtype there; the model need not be loaded yet.

    Args:
        device: a torch device; dtype: name of a torch dtype.

    Raises:
        UnsupportedError: no such device, torch can't use it, or no backend runs on it; says which.
    """
    import torch

    from moegraft.plan import make_plan
    from moegraft.problem import Problem

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UnsupportedError(f"--device {device!r} is no torch device; use cpu.") from error
    if kind == "cpu":
        return
    reasons = []
    if kind == "cuda" and not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
        reasons.append(f"torch {torch.__version__} {why}.")
    try:
        make_plan(Problem.of_linear(dtype, kind, 1, 64, 64))
    except PlanError as error:
        reasons.append(str(error))
    if reasons:
        raise UnsupportedError(f"--device {device!r}: {' '.join(reasons)} Use --device cpu.")


def load_model(path: Path, dtype: str, device: str = "cpu") -> Any:
    """Load a causal language model in eval mode; quantised experts stay as they are stored.

    Args:
        path: folder as ``save_pretrained`` wrote it.
        dtype: name of a torch dtype.
        device: a torch device.

    Raises:
        MoegraftError: it can't be loaded; says why.
    """
    check_model_folder(path)
    import torch
    from transformers import AutoModelForCausalLM

    from moegraft.hosts.transformers import load_quantised

    try:
        if "quantization_config" in json.loads((path / "config.json").read_text("utf-8")):
            return load_quantised(path, dtype=getattr(torch, dtype), device=device)
        model = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=getattr(torch, dtype), local_files_only=True
        )
        return model.eval().to(device)
    except MoegraftError:
        raise
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        raise MoegraftError(f"{str(path)!r} can't be loaded: {_one_line(error)}") from error


def load_tokenizer(path: Path) -> Any:
    """Load a model folder's tokenizer, with left padding.

    Raises:
        MoegraftError: there is none, or nothing to pad with.
    """
    from transformers import AutoTokenizer

    if not any(next(path.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise MoegraftError(
            f"{str(path)!r} has no tokenizer files (such as tokenizer.json). Save the model's "
            f"tokenizer there (tokenizer.save_pretrained({str(path)!r})), or pass token ids from "
            "Python (graft.generate)."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise MoegraftError(f"{str(path)!r} has no usable tokenizer: {_one_line(error)}") from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise MoegraftError(
                f"The tokenizer of {str(path)!r} has neither a pad nor an EOS token."
            )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def meta_model(path: Path) -> Any:
    """Build a model from its config.json alone, on the meta device: no weights, no memory.

    Raises:
        MoegraftError: transformers can't build it.
    """
    check_model_folder(path)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise MoegraftError(
            f"transformers can't build the model of {str(path)!r}: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) < 400 else f"{text[:400]} .."
