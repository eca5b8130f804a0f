"""Launches that are written down: the same work for other tensors, or none at all."""

from __future__ import annotations

import ctypes
import inspect
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from moegraft.backends import launch_list
from moegraft.backends.cuda import driver
from moegraft.backends.cuda.fp4_decode import Fp4Arguments
from moegraft.backends.cuda.group_shrink import ShrinkArguments
from moegraft.backends.cuda.moe_gemm import Arguments as GemmArguments
from moegraft.backends.cuda.moe_gemm import Fp8Arguments
from moegraft.backends.launch_list import LaunchLists, Unlisted, Watch, refuse
from moegraft.backends.triton.listed import listed

SIZE = 40


class Kernel:
    """``out[i] = a[i] * factor + b[i]``, called as Triton's kernels are; works by address alone."""

    def __init__(self) -> None:
        self.signature = inspect.signature(self._kernel)
        self.arg_names = list(self.signature.parameters)

    @staticmethod
    def _kernel(a: Any, b: Any, out: Any, size: Any, FACTOR: Any = 1.0) -> None:
        def floats(address: int) -> Any:
            return (ctypes.c_float * size).from_address(address)

        for i, (left, right) in enumerate(zip(floats(a), floats(b), strict=True)):
            floats(out)[i] = left * FACTOR + right

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *args, **options: self._launch(grid, args, options)

    def _launch(self, grid: tuple[int, ...], args: Any, options: Any) -> Any:
        options.pop("num_warps")
        bound = self.signature.bind(*args, **options)
        bound.apply_defaults()
        self._kernel(*(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in bound.args))
        return _Compiled(self, grid)


class _Compiled:
    def __init__(self, kernel: Kernel, grid: tuple[int, ...]) -> None:
        self.kernel, self.grid = kernel, grid

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert grid == (*self.grid, 1, 1)

        def run(*args: Any, stream: int) -> None:
            assert stream == 7
            self.kernel._kernel(*args)

        return run


KERNEL = Kernel()
#: Memory that no call was given.
OTHER, SCRAP = torch.ones(SIZE), torch.empty(SIZE)


class Calls:
    """Counts the plain calls of ``out = 3 (2 a + b) + (2 a + b)[1:]``, by memory of its own."""

    def __init__(self, extra: Callable[[torch.Tensor], Any] | None = None) -> None:
        self.lists, self.plain, self.extra = LaunchLists(), 0, extra

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        def plain() -> None:
            self.plain += 1
            middle = torch.empty(2, SIZE + 1)
            listed(KERNEL)[(5,)](a, b[1], middle, SIZE, FACTOR=2.0, num_warps=4)
            tail = middle.view(-1)[1:]
            listed(KERNEL)[(3,)](middle, tail, out, SIZE - 1, 3.0, num_warps=4)
            if self.extra is not None:
                self.extra(a)

        self.lists.run_on("a kind", 7, (a, b, out), plain)


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(SIZE), torch.randn(2, SIZE), torch.full((SIZE,), 9.0)


def expected(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    middle = 2 * a + b[1]
    return 3 * middle[:-1] + middle[1:]


def check(calls: Calls, seed: int) -> None:
    a, b, out = inputs(seed)
    calls(a, b, out)
    torch.testing.assert_close(out[:-1], expected(a, b))
    assert out[-1] == 9


def test_the_third_call_of_a_kind_runs_by_list() -> None:
    calls = Calls()
    for seed in range(6):
        check(calls, seed)
    assert calls.plain == 2 and not calls.lists.refusals


@pytest.mark.parametrize("large", [1, 2**30])
def test_large_memory_is_taken_by_itself(monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(launch_list, "_LARGE", large)
    calls = Calls()
    for seed in range(2):
        check(calls, seed)
    (found,) = calls.lists._lists.values()
    assert isinstance(found, launch_list.LaunchList)
    size = 2 * (SIZE + 1) * 4
    assert found._memory == ((0, size) if large == 1 else (512,))
    check(calls, 2)
    assert calls.plain == 2


def test_threads_share_a_list() -> None:
    calls = Calls()
    for seed in range(2):
        check(calls, seed)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(check, calls, seed) for seed in range(200)]:
            done.result()
    assert calls.plain == 2


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (lambda a: a.clone(), "aten.clone"),
        (lambda a: a.add_(0), "aten.add_"),
        (lambda a: torch.zeros(4), "aten.zeros"),
        (lambda a: refuse("no more"), "no more"),
        (lambda a: launch(OTHER, a), "in 0 of the call's tensors"),
        (lambda a: launch(a, a, factor=torch.float32), "an argument is a dtype"),
        (lambda a: LaunchLists().run_on(0, 7, (a,), lambda: None), None),
    ],
)  # fmt: skip
def test_whatever_else_happens_keeps_calls_plain(
    extra: Callable[[torch.Tensor], Any], why: str | None
) -> None:
    calls = Calls(extra)
    for seed in range(5):
        check(calls, seed)
    assert calls.plain == (2 if why is None else 5)
    assert len(calls.lists.refusals) == (why is not None)
    assert why is None or why in calls.lists.refusals[0]


def launch(a: torch.Tensor, b: torch.Tensor, factor: Any = 1.0) -> None:
    """Launch to memory that no call was given, or with an argument that is no number."""
    if factor == 1.0:
        listed(KERNEL)[(1,)](a, b, SCRAP, SIZE, num_warps=1)
    else:
        watch = launch_list.watching()
        if watch is not None:
            watch.add(lambda w: _written_down(w, a, factor))


def _written_down(watch: Watch, a: torch.Tensor, factor: Any) -> Any:
    from moegraft.backends.triton.listed import written_down

    return written_down(KERNEL, _Compiled(KERNEL, (1,)), (1,), (a, a, a, SIZE, factor), {}, watch)


def test_other_alignment_is_another_kind_and_one_tensor_for_two_is_plain() -> None:
    calls = Calls()
    a, b, out = inputs(0)
    long = torch.empty(SIZE + 4)
    for shift in (0, 0, 0, 1, 1, 1, 0, 1):
        moved = long[shift : shift + SIZE].copy_(a)
        calls(moved, b, out)
        torch.testing.assert_close(out[:-1], expected(a, b))
    assert calls.plain == 4
    whole = torch.randn(2, SIZE)
    calls(whole[0], whole, out)  # both begin at the same address
    torch.testing.assert_close(out[:-1], expected(whole[0], whole))
    assert calls.plain == 5


def test_kinds_are_bounded() -> None:
    lists, made = LaunchLists(), []
    a = torch.ones(4)
    for _ in range(2):
        for kind in range(launch_list.MAX_KINDS + 5):
            lists.run_on(kind, 7, (a,), lambda: made.append(0))
    assert len(lists._lists) <= launch_list.MAX_KINDS


def test_an_error_leaves_no_watch_behind() -> None:
    lists, a = LaunchLists(), torch.ones(4)

    def fail() -> None:
        raise ValueError("plain")

    for _ in range(3):
        with pytest.raises(ValueError, match="plain"):
            lists.run_on(0, 7, (a,), fail)
        assert launch_list.watching() is None


def test_a_refused_call_keeps_no_memory() -> None:
    watch = Watch([torch.ones(4)])
    with watch:
        torch.empty(1000)
        assert watch._own
        torch.ones(3)
        torch.empty(1000)
    assert not watch._own and watch.finished() is None


def test_modes_of_torch_are_plain() -> None:
    assert not launch_list.in_mode()
    with torch.device("cpu"):
        assert launch_list.in_mode()
    with Watch([]):
        assert launch_list.in_mode()


def test_pointers_of_a_cuda_kernels_structure_move_and_its_numbers_stay() -> None:
    x, arena = torch.ones(64), torch.ones(32)
    with Watch([x, arena]) as watch:
        own = torch.empty(16)
    p = ShrinkArguments(x=x[4:].data_ptr(), arena=arena.data_ptr(), s=own[2:].data_ptr())
    p.x_stride, p.size_k, p.max_groups = -5, 3, 4
    before = bytes(p)
    made = driver.moving(p, watch)([1000, 2000, 3000])
    copy = ShrinkArguments.from_buffer_copy(made)
    assert (copy.x, copy.arena, copy.s, copy.row_pair) == (1016, 2000, 3008, None)
    assert (copy.x_stride, copy.size_k, copy.max_groups) == (-5, 3, 4)
    assert bytes(p) == before and ctypes.sizeof(made) == ctypes.sizeof(p)
    p.block_info = OTHER.data_ptr()
    with pytest.raises(Unlisted):
        driver.moving(p, watch)


def test_pointers_of_a_structure_that_extends_another_move_too() -> None:
    x = torch.ones(64)
    watch = Watch([x])
    p = Fp8Arguments(x=x.data_ptr(), x_scales=x[2:].data_ptr(), size_k=5, scale_rows=6)
    copy = Fp8Arguments.from_buffer_copy(driver.moving(p, watch)([4096]))
    assert (copy.x, copy.x_scales, copy.bias, copy.size_k, copy.scale_rows) == (
        4096, 4104, None, 5, 6,
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [GemmArguments, Fp8Arguments, Fp4Arguments, ShrinkArguments])
def test_structures_of_cuda_kernels_have_whole_words(arguments: type[ctypes.Structure]) -> None:
    assert ctypes.sizeof(arguments) % 8 == 0
    assert all(
        getattr(arguments, field[0]).offset % 8 == 0
        for base in arguments.__mro__
        for field in vars(base).get("_fields_", ())
        if field[1] is ctypes.c_void_p
    )


def test_every_launch_of_a_triton_kernel_may_be_watched() -> None:
    folder = Path(launch_list.__file__).parent / "triton"
    sources = {path: path.read_text() for path in folder.rglob("*.py")}
    calls = [m for text in sources.values() for m in re.findall(r"\w+_kernel\)?\[.*?\]\(", text)]
    assert len(calls) > 20
    for path, text in sources.items():
        assert not re.findall(r"\w+_kernel\[.*?\]\(", text), f"{path}: write listed(kernel)[grid]"


def test_triton_launches_compiled_kernels_as_lists_do() -> None:
    pytest.importorskip("triton")
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    source = inspect.getsource(CompiledKernel.__getitem__)
    assert "def runner(*args, stream=None)" in source
    function = JITFunction(_plain_function)
    assert function.arg_names == ["a", "size"]
    assert list(function.signature.bind(1, size=2).arguments.values()) == [1, 2]


def _plain_function(a, size):  # type: ignore[no-untyped-def]
    pass


@torch.library.custom_op("moegraft_tests::doubled_twice", mutates_args=("out",))
def doubled_twice(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    INSIDE(a, b, out)


INSIDE = Calls()


@pytest.mark.parametrize("inference", [False, True])
def test_lists_are_made_inside_of_operators_too(inference: bool) -> None:
    INSIDE.__init__()  # type: ignore[misc]
    for seed in range(4):
        with torch.inference_mode(inference):
            a, b, out = inputs(seed)
            torch.ops.moegraft_tests.doubled_twice(a, b, out)
            torch.testing.assert_close(out[:-1], expected(a, b))
    assert INSIDE.plain == 2 and not INSIDE.lists.refusals
