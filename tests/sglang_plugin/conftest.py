"""Tests of the SGLang plugin's classes, inside the real package on the CPU; run.sh makes their
environment. Skipped without SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from engine import Engine

if "sglang" not in packages_distributions():
    collect_ignore_glob = ["test_*.py"]
else:

    @pytest.fixture(scope="session", autouse=True)
    def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """What SGLang's layers need around them, with the plugin's hooks applied."""
        from engine import one_process

        if not torch.cuda.is_available():
            _without_pinned_memory()
        with one_process(tmp_path_factory.mktemp("distributed") / "init"):
            yield

    @pytest.fixture
    def engine(tmp_path: Path) -> Engine:
        """Two layers with plain SwiGLU experts and four slots."""
        from engine import Engine

        return Engine(tmp_path)


def _without_pinned_memory() -> None:
    """Let SGLang's batches be prepared where torch can't pin memory: it pins without asking."""
    for name in ("tensor", "zeros", "empty", "arange"):
        setattr(torch, name, _not_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]


def _not_pinning(make: Any) -> Any:
    @wraps(make)
    def function(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = make(*args, **kwargs)
        return made

    return function
