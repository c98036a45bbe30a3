"""The one attention kernel: a tile of query rows over a range of positions of one sequence and one KV head.

A program holds `num_rows` consecutive rows of a sequence times the query heads of one KV head, and folds the range's
KV left to right, BLOCK_POSITIONS at a time from position 0, by online softmax in float32. A tile that a row does not
see leaves the row's state as it is, bit for bit, so a row's result depends on its own positions only, never on the
rows beside it. What lies in slots that no row of the tile may see is never loaded.

With IS_SPLIT the range is one of several: the output is the range's own attention and its log-sum, for
`kernels.triton.merging`, which also counts the sinks. Otherwise the range is all that the rows see, and the output
final.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.kv_formats import decode
from kernels.triton.numerics import LN_2, LOG2_E, as_type, dot, narrow, tanh

WORK_FIELDS = 7
"""int32 fields of a program's work: sequence, first row of the batch, that row's position, number of rows, first and
end position of the range, first row of the output."""

_FIELDS = tl.constexpr(WORK_FIELDS)


@triton.jit
def _fold_tile(
    query, own_position, position, inside, is_element,
    largest, total, mixed,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, offsets, scale_offsets,
    factor, cap_factor, window,
    FORMAT: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """One step of online softmax; largest and scores are in units of log2."""
    mask = inside[:, None] & is_element[None, :]
    dtype: tl.constexpr = query.dtype
    keys = as_type(decode(tl.load(keys_ptr + offsets, mask=mask, other=0), FORMAT), dtype)
    zero = tl.zeros([query.shape[0], position.shape[0]], dtype=tl.float32)
    scores = dot(query, tl.trans(keys), zero) * factor
    if HAS_SCALES:
        scores *= tl.load(key_scales_ptr + scale_offsets, mask=inside, other=0.0)[None, :]
    if HAS_CAP:
        scores = tanh(scores) * cap_factor
    seen = inside[None, :] & (position[None, :] <= own_position[:, None])
    if HAS_WINDOW:
        seen = seen & (position[None, :] > own_position[:, None] - window)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(largest, tl.max(scores, axis=1))
    base = tl.where(
        higher == float("-inf"), 0.0, higher
    )  # the difference of infinities is no number
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(largest - base)
    total = total * kept + tl.sum(weights, axis=1)
    numbers = decode(tl.load(values_ptr + offsets, mask=mask, other=0), FORMAT)
    if HAS_SCALES:
        scales = tl.load(value_scales_ptr + scale_offsets, mask=inside, other=0.0)
        if dtype == tl.float16:  # whose range would lose small weights times small scales
            numbers = numbers.to(tl.float32) * scales[:, None]
        else:
            weights *= scales[None, :]
    mixed = dot(narrow(weights, dtype), as_type(numbers, dtype), mixed * kept[:, None])
    return higher, total, mixed


@triton.jit
def _store_rows(
    total, largest, mixed, place, is_row, element, is_element,
    output_ptr, log_sums_ptr, head_dim,
    IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """The rows' attention, and in a split the natural logarithm of their sums, -inf where nothing was seen."""
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    target = output_ptr + place[:, None] * head_dim + element[None, :]
    mask = is_row[:, None] & is_element[None, :]
    tl.store(target, narrow(result, output_ptr.dtype.element_ty), mask=mask)
    if IS_SPLIT:
        seen_any = total > 0.0
        log_sum = (largest + tl.log2(tl.where(seen_any, total, 1.0))) * LN_2
        tl.store(log_sums_ptr + place, tl.where(seen_any, log_sum, float("-inf")), mask=is_row)


@triton.jit
def attention_kernel(
    query_ptr, values_ptr, scales_ptr, sinks_ptr, tables_ptr, work_ptr, output_ptr, log_sums_ptr,
    query_row_stride, query_head_stride,
    block_stride, head_stride, part_stride, slot_stride,
    scale_block_stride, scale_head_stride, scale_part_stride,
    table_stride,
    head_dim, factor, cap_factor, window,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_POSITIONS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    FORMAT: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """softmax(cap(factor * q @ k^T)) @ v for one item of work and one KV head; GROUP query heads share the KV head."""
    work = work_ptr + tl.program_id(0) * _FIELDS
    kv_head = tl.program_id(1)
    sequence, first_row, first_position = tl.load(work), tl.load(work + 1), tl.load(work + 2)
    num_rows, start, end = tl.load(work + 3), tl.load(work + 4), tl.load(work + 5)
    row = tl.arange(0, BLOCK_ROWS) // GROUP
    head = kv_head * GROUP + tl.arange(0, BLOCK_ROWS) % GROUP
    is_row = row < num_rows
    element = tl.arange(0, BLOCK_DIM)
    is_element = element < head_dim
    source = (first_row + row).to(tl.int64) * query_row_stride + head * query_head_stride
    mask = is_row[:, None] & is_element[None, :]
    query = tl.load(query_ptr + source[:, None] + element[None, :], mask=mask, other=0.0)

    largest = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks_ptr + head, mask=is_row, other=0.0) * LOG2_E
        total += 1.0
    mixed = tl.zeros([BLOCK_ROWS, BLOCK_DIM], dtype=tl.float32)
    keys_ptr = values_ptr + kv_head * head_stride
    key_scales_ptr = scales_ptr
    if HAS_SCALES:
        key_scales_ptr += kv_head * scale_head_stride
    for tile in range(start // BLOCK_POSITIONS * BLOCK_POSITIONS, end, BLOCK_POSITIONS):
        position = tile + tl.arange(0, BLOCK_POSITIONS)
        inside = (position >= start) & (position < end)
        table = tables_ptr + sequence.to(tl.int64) * table_stride + position // BLOCK_SIZE
        block = tl.load(table, mask=inside, other=0).to(tl.int64)
        slot = position % BLOCK_SIZE
        largest, total, mixed = _fold_tile(
            query, first_position + row, position, inside, is_element,
            largest, total, mixed,
            keys_ptr, keys_ptr + part_stride, key_scales_ptr, key_scales_ptr + scale_part_stride,
            (block * block_stride + slot * slot_stride)[:, None] + element[None, :],
            block * scale_block_stride + slot,
            factor, cap_factor, window,
            FORMAT, HAS_SCALES, HAS_CAP, HAS_WINDOW,
        )  # fmt: skip

    place = (tl.load(work + 6) + row).to(tl.int64) * (tl.num_programs(1) * GROUP) + head
    _store_rows(
        total, largest, mixed, place, is_row, element, is_element,
        output_ptr, log_sums_ptr, head_dim,
        IS_SPLIT,
    )  # fmt: skip
