"""Comparison of a result with a more exact reference: one measure, one table of tolerances."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed ``||a - e|| / ||e||``.

    Attributes:
        output: of a whole output.
        delta: of what an adapter changes, alone.
        unrounded: of a whole output of a W8A8 format, against the reference that does not round
            activations; None for other formats.
    """

    output: float
    delta: float
    unrounded: float | None = None


#: By the dtype under test. The only place in the project that holds tolerances.
TOLERANCES = {
    torch.float64: Tolerance(output=1e-12, delta=1e-11),
    torch.float32: Tolerance(output=1e-5, delta=1e-5),
    torch.bfloat16: Tolerance(output=1e-2, delta=2e-2),
    torch.float16: Tolerance(output=2e-3, delta=5e-3),
}
#: A single row may be this many times worse than the whole: one wrong row among thousands shows.
ROW_FACTOR = 5.0
#: A W8A8 format rounds x and h to e4m3, which costs about 4 %: the format's own error. Sums before
#: it that differ in their last bits put some values of h on the other side, each 6 to 12 % off. So
#: a layer may be this share of the format's own error away from its reference (sums of 13 bits, as
#: FP8 tensor cores have them, make it 0.05 to 0.16; one group's scale off by 25 %, more than 1) ..
FORMAT_SHARE = 0.25
#: .. twice that where there are at most so many rows, too few for the flips to average ..
FEW_ROWS = 8
#: .. and this many times it from the reference that rounds no activation, for flips add none.
FORMAT_EXCESS = 1.1
#: References that differ by more than this are not two of one layer.
_LARGEST_FORMAT_ERROR = 0.2


def tolerance_of(
    dtype: torch.dtype, format_error: float | None = None, num_rows: int = FEW_ROWS + 1
) -> Tolerance:
    """Return what a result in ``dtype`` may be off by.

    Args:
        dtype: under test.
        format_error: of a W8A8 format, ``||r - u|| / ||u||`` of its reference ``r`` and ``u``, the
            same without rounding activations; None for other formats.
        num_rows: of the result; matters for W8A8 only.
    """
    plain = TOLERANCES[dtype]
    if format_error is None:
        return plain
    assert format_error <= _LARGEST_FORMAT_ERROR, (
        f"the references with and without rounded activations differ by {format_error:.3e}, more "
        f"than {_LARGEST_FORMAT_ERROR}: they are not of one layer"
    )
    share = FORMAT_SHARE if num_rows > FEW_ROWS else 2 * FORMAT_SHARE
    return Tolerance(
        output=max(plain.output, share * format_error),
        delta=max(plain.delta, TOLERANCES[torch.bfloat16].delta),
        unrounded=max(plain.output, FORMAT_EXCESS * format_error),
    )


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``||a - e|| / ||e||`` in fp64; 0 for equal, inf when only ``e`` is all zeros."""
    a, e = actual.detach().cpu().double(), expected.detach().cpu().double()
    return _ratio((a - e).norm().item(), e.norm().item())


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    unrounded: torch.Tensor | None = None,
) -> None:
    """Assert that ``actual`` is right for a computation in ``dtype``.

    Args:
        actual: result, any shape, of exactly ``dtype``.
        expected: reference of the same shape, any float dtype (fp32 or fp64 as a rule).
        dtype: the dtype under test; picks the tolerance.
        unrounded: of a W8A8 format, the reference that does not round activations, of the same
            shape; ``actual`` is compared with both, see :data:`FORMAT_SHARE`. None for others.

    Where ``expected`` is all zeros, ``actual`` must be exactly zero. NaN and Inf are refused on
    both sides. The last dimension is also checked row by row, :data:`ROW_FACTOR` times looser.
    """
    assert actual.dtype == dtype, f"the result is {actual.dtype}, expected {dtype}"
    error = None if unrounded is None else relative_error(expected, unrounded)
    tolerance = tolerance_of(dtype, error, actual.shape[:-1].numel())
    _assert_close(actual, expected, tolerance.output, f"{dtype} output")
    if unrounded is not None and tolerance.unrounded is not None:
        what = f"{dtype} output, against activations as they are"
        _assert_close(actual, unrounded, tolerance.unrounded, what)


def assert_delta_close(
    with_lora: torch.Tensor,
    base: torch.Tensor,
    ref_with: torch.Tensor,
    ref_base: torch.Tensor,
    w8a8: bool = False,
) -> None:
    """Assert that what the adapters changed, alone, is right: no error hides behind the base.

    Args:
        with_lora: result with adapters, ``[.., out]``; its dtype picks the tolerance.
        base: result without, same shape and dtype.
        ref_with: reference with adapters, same shape.
        ref_base: reference without, same shape and dtype as ``ref_with``.
        w8a8: both results round activations to FP8: never stricter than for bfloat16.
    """
    dtype = with_lora.dtype
    assert base.dtype == dtype, f"base is {base.dtype}, the result with adapters {dtype}"
    assert ref_with.dtype == ref_base.dtype, f"references: {ref_with.dtype}, {ref_base.dtype}"
    assert with_lora.shape == base.shape, f"shapes {with_lora.shape} and {base.shape}"
    assert ref_with.shape == ref_base.shape, f"shapes {ref_with.shape} and {ref_base.shape}"
    actual = with_lora.detach().cpu().double() - base.detach().cpu().double()
    expected = ref_with.detach().cpu().double() - ref_base.detach().cpu().double()
    tolerance = tolerance_of(dtype, 0.0 if w8a8 else None)
    _assert_close(actual, expected, tolerance.delta, f"{dtype} delta")


def assert_bit_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensors") -> None:
    """Assert equal shape, dtype and bits (NaN equals the same NaN); the message counts."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} and {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} and {expected.shape}"
    # A view of one element may have any stride and still count as contiguous: copy.
    a, e = (
        t.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        for t in (actual, expected)
    )
    differ = (
        (a.view(torch.uint8) != e.view(torch.uint8)).reshape(a.numel(), a.element_size()).any(1)
    )
    if differ.any():
        first = int(differ.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {a.numel()} values differ in their bits, first at "
            f"{_coordinates(first, actual.shape)}: {a[first].item()!r}, not {e[first].item()!r}"
        )


def _assert_close(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str
) -> None:
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if not actual.numel():
        return
    a, e = actual.detach().cpu().double(), expected.detach().cpu().double()
    for tensor, name in ((e, "reference"), (a, "result")):
        bad = ~torch.isfinite(tensor)
        if bad.any():
            first = _coordinates(int(bad.reshape(-1).nonzero()[0]), tensor.shape)
            raise AssertionError(
                f"{what}: the {name} has {int(bad.sum())} NaN or infinite values of "
                f"{tensor.numel()}, first at {first}"
            )
    difference = (a - e).abs()
    error = _ratio(difference.norm().item(), e.norm().item())
    row_errors = difference.norm(dim=-1).reshape(-1)
    row_norms = e.norm(dim=-1).reshape(-1)
    # A row much smaller than the others is measured by their size.
    typical = row_norms[row_norms > 0].square().mean().sqrt() if row_norms.any() else 0.0
    row_sizes = row_norms.clamp(min=float(typical))
    worst_row = int(torch.argmax(row_errors / row_sizes.clamp(min=1e-300)))
    row_error = _ratio(row_errors[worst_row].item(), row_sizes[worst_row].item())
    if error <= tolerance and row_error <= ROW_FACTOR * tolerance:
        return
    worst = int(torch.argmax(difference))
    raise AssertionError(
        f"{what}: ||a-e||/||e|| = {error:.3e}, allowed {tolerance:.1e}; worst row {worst_row}: "
        f"{row_error:.3e}, allowed {ROW_FACTOR * tolerance:.1e}; largest difference at "
        f"{_coordinates(worst, a.shape)}: {a.reshape(-1)[worst].item():.6g}, expected "
        f"{e.reshape(-1)[worst].item():.6g}"
    )


def _ratio(error: float, size: float) -> float:
    if size > 0:
        return error / size
    return 0.0 if error == 0 else float("inf")


def _coordinates(flat: int, shape: torch.Size) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(shape):
        found.append(flat % size)
        flat //= size
    return tuple(reversed(found))
