"""Norms, rotation, activation and merging against the reference, on random shapes and every type."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference, triton
from tests.support.triton_device import IS_INTERPRETED, TOLERANCE, assert_close, on_device

dtypes = st.sampled_from(list(TOLERANCE))
few = settings(max_examples=25 if IS_INTERPRETED else 200)


def rows(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@few
@given(st.integers(1, 5), st.integers(1, 300), dtypes, st.integers(0, 99))
def test_rms_norm(num_rows: int, num_columns: int, dtype: torch.dtype, seed: int) -> None:
    hidden = 10 * rows(seed, num_rows, num_columns, dtype=dtype)
    weight = rows(seed + 1, num_columns, dtype=dtype)
    actual = triton.rms_norm(on_device(hidden), on_device(weight), 1e-5)
    assert_close(actual, reference.rms_norm(hidden, weight, 1e-5))


def test_rms_norm_of_heads_inside_wider_rows() -> None:
    qkv, weight = rows(0, 3, 8, 20), rows(1, 20)
    actual = triton.rms_norm(on_device(qkv)[:, 2:7], on_device(weight), 1e-6)
    assert actual.is_contiguous()
    assert_close(actual, reference.rms_norm(qkv[:, 2:7], weight, 1e-6))


def test_rms_norm_of_half_precision_takes_the_mean_in_float32() -> None:
    hidden = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square exceeds float16
    weight = torch.ones(4, dtype=torch.float16)
    assert triton.rms_norm(on_device(hidden), on_device(weight), 1e-5).tolist() == [[1.0] * 4]


@few
@given(st.integers(1, 5), st.integers(1, 300), dtypes, st.integers(0, 99))
def test_add_rms_norm(num_rows: int, num_columns: int, dtype: torch.dtype, seed: int) -> None:
    hidden, residual = (rows(seed + n, num_rows, num_columns, dtype=dtype) for n in (0, 1))
    weight = rows(seed + 2, num_columns, dtype=dtype)
    device_residual = on_device(residual)
    normed, total = triton.add_rms_norm(on_device(hidden), device_residual, on_device(weight), 1e-5)
    expected_normed, expected_total = reference.add_rms_norm(hidden, residual, weight, 1e-5)
    assert torch.equal(total.cpu(), expected_total)
    assert total.data_ptr() == device_residual.data_ptr()
    assert_close(normed, expected_normed)


@few
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 40), dtypes, st.integers(0, 99))
def test_rope(num_rows: int, num_heads: int, half: int, dtype: torch.dtype, seed: int) -> None:
    heads = rows(seed, num_rows, num_heads + 2, 2 * half, dtype=dtype)[:, :num_heads]
    angles = 100 * rows(seed + 1, num_rows, half)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    before = heads.clone()
    actual = triton.rope(on_device(heads), on_device(cos), on_device(sin))
    # The reference rounds twice in half precision, the kernel once.
    wide = reference.rope(heads.float(), cos.float(), sin.float())
    assert_close(actual, wide)
    assert torch.equal(heads, before)


@few
@given(st.integers(1, 4), st.integers(1, 1500), dtypes, st.booleans(), st.integers(0, 99))
def test_gated_activations(
    num_rows: int, num_columns: int, dtype: torch.dtype, is_gelu: bool, seed: int
) -> None:
    gate_up = 3 * rows(seed, num_rows, 2 * num_columns, dtype=dtype)
    name = "gelu_mul" if is_gelu else "silu_mul"
    actual = getattr(triton, name)(on_device(gate_up))
    assert_close(actual, getattr(reference, name)(gate_up))


def test_extreme_gates_stay_finite() -> None:
    gate_up = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30, 1.0, 2.0, 3.0, 4.0, 5.0]])
    for name in ("silu_mul", "gelu_mul"):
        actual = getattr(triton, name)(on_device(gate_up))
        assert_close(actual, getattr(reference, name)(gate_up))


@few
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.data())
def test_merged_partials(
    parts: int, num_rows: int, heads: int, dim: int, data: st.DataObject
) -> None:
    seed = data.draw(st.integers(0, 99))
    outputs, log_sums = (
        rows(seed, parts, num_rows, heads, dim),
        5 * rows(seed + 1, parts, num_rows, heads),
    )
    unseen = rows(seed + 2, parts, num_rows, heads) > 0.5
    log_sums[unseen] = float("-inf")
    outputs[unseen] = float("nan")
    actual = triton.merge_partials(on_device(outputs), on_device(log_sums))
    assert_close(actual, reference.merge_partials(outputs, log_sums))


def test_what_is_done_once_a_step() -> None:
    positions, frequencies = torch.tensor([0, 5, 100_000]), torch.tensor([1.0, 0.01])
    for actual, expected in zip(
        triton.rope_angles(on_device(positions), frequencies, 1.5, torch.float32),
        reference.rope_angles(positions, frequencies, 1.5, torch.float32),
        strict=True,
    ):
        assert_close(actual, expected, 1e-4)
    hidden = rows(0, 4, 3)
    assert_close(triton.take_rows(on_device(hidden), torch.tensor([2, 0])), hidden[[2, 0]])


@pytest.mark.parametrize("num_columns", [8192, 5000])
def test_wide_rows(num_columns: int) -> None:
    hidden, weight = rows(0, 2, num_columns), rows(1, num_columns)
    actual = triton.rms_norm(on_device(hidden), on_device(weight), 1e-5)
    assert_close(actual, reference.rms_norm(hidden, weight, 1e-5))
