// Operations that work row by row: embedding, norm, angles, rotation, gates, quantisation, KV writes, row picks.

namespace {

constexpr float kLevels = 32639.0f;  // 256 * 127 + 127: what two signed bytes reach
constexpr float kLeast = 1e-34f;     // a row of smaller numbers counts as zeros: kLevels over them would be infinite

inline int64_t plane_bytes(int64_t width) { return (width + 63) & ~int64_t(63); }
inline int64_t sums_of(int64_t width) { return 7 * (width / 32); }

// Rows a tile of a row-wise operation covers: enough tiles to share, none too small to pay for.
inline int64_t rows_per_tile(int64_t rows) { return rows < 32 ? 1 : (rows + 31) / 32; }
inline int64_t row_tiles(int64_t rows) { return rows ? (rows + rows_per_tile(rows) - 1) / rows_per_tile(rows) : 0; }

inline int64_t tiles_by_rows(const void*, int64_t rows, const StepPlan&) { return row_tiles(rows); }

template <RowsFunction run> inline void run_by_rows(const void* arguments, int64_t rows, const StepPlan& plan, int64_t tile, Scratch& scratch) {
    const int64_t size = rows_per_tile(rows), end = (tile + 1) * size < rows ? (tile + 1) * size : rows;
    run(arguments, {tile * size, end, -1}, plan, scratch);
}

template <typename Body> inline void each_row(const RowRange& range, Body body) {
    for (int64_t row = range.first; row < range.last; row++) body(row);
}

// Rows so that `row` counts from the step's first one, wherever the range's thread keeps them.
inline BatonRows placed(BatonRows rows, const RowRange& range) {
    if (range.thread >= 0 && rows.thread_stride) rows.data += range.thread * rows.thread_stride - range.first * rows.stride;
    return rows;
}

inline BatonQuantRows placed(BatonQuantRows rows, const RowRange& range) {
    if (range.thread < 0 || !rows.thread_rows) return rows;
    const int64_t before = range.thread * rows.thread_rows;
    rows.values += 2 * (before * plane_bytes(rows.thread_width) - range.first * plane_bytes(rows.width));
    rows.scales += before - range.first;
    rows.sums += before * sums_of(rows.thread_width) - range.first * sums_of(rows.width);
    return rows;
}

// ---- quantisation of rows

inline void quantise_row(const float* values, const BatonQuantRows& out, int64_t row) {
    const int64_t groups = out.width / 32, plane = plane_bytes(out.width);  // width is a multiple of 32
    int8_t *high = out.values + row * 2 * plane, *low = high + plane;
    int32_t *starts = out.sums + row * sums_of(out.width), *counts = starts + 2 * groups, *whole = counts + 2 * groups, *halves = whole + groups;
    F top = all(0.0f), damage = all(0.0f);
    for (int64_t c = 0; c < out.width; c += 16) {
        const F x = load(values + c);
        top = larger(top, absolute(x));
        damage = damage + (x - x);  // no number as soon as one x is none, or infinite
    }
    const float largest = largest_lane(top);
    const F inverse = all(largest > kLeast ? kLevels / largest : 0.0f), limit = all(kLevels);
    out.scales[row] = largest / kLevels + sum_lanes(damage);  // such a row gives no numbers
    for (int64_t g = 0; g < groups; g++) {
        int32_t high_sum = 0;
        for (int64_t half = 0; half < 2; half++) {
            const int64_t c = 32 * g + 16 * half;
            const F scaled = larger(smaller(load(values + c) * inverse, limit), all(-kLevels));
            const I q = to_int(scaled), upper = shift_right<8>(q + all_int(128));
            // -128 becomes -127: 32 products of -127 with quants of -8 fit 16 bits.
            const I lower = larger(q - shift_left<8>(upper), all_int(-127));
            store_bytes(high + c, upper);
            store_bytes(low + c, lower);
            halves[2 * g + half] = sum_int(shift_left<8>(upper) + lower);
            high_sum += sum_int(upper);
        }
        const int32_t sum = halves[2 * g] + halves[2 * g + 1], low_sum = sum - 256 * high_sum;
        starts[2 * g] = -8 * high_sum;
        starts[2 * g + 1] = -8 * low_sum;
        counts[2 * g] = 65536 * high_sum;
        counts[2 * g + 1] = 65536 * low_sum;
        whole[g] = sum;
    }
    if (plane > out.width) {
        std::memset(high + out.width, 0, static_cast<size_t>(plane - out.width));
        std::memset(low + out.width, 0, static_cast<size_t>(plane - out.width));
    }
}

inline void quantise_rows(const void* arguments, const RowRange& range, const StepPlan&, Scratch&) {
    BatonQuantise a = *static_cast<const BatonQuantise*>(arguments);
    a.inputs = placed(a.inputs, range);
    a.quantised = placed(a.quantised, range);
    each_row(range, [&](int64_t row) { quantise_row(a.inputs.data + row * a.inputs.stride, a.quantised, row); });
}

// ---- embedding

inline float weight_value(const BatonWeight& w, int64_t row, int64_t column);  // products.inl

inline void embed_rows(const void* arguments, const RowRange& range, const StepPlan& plan, Scratch&) {
    BatonEmbed a = *static_cast<const BatonEmbed*>(arguments);
    a.out = placed(a.out, range);
    each_row(range, [&](int64_t row) {
        float* out = a.out.data + row * a.out.stride;
        const int64_t token = plan.step.token_ids[row];
        for (int64_t c = 0; c < a.weight->num_columns; c++) out[c] = weight_value(*a.weight, token, c);
    });
}

// ---- RMS norm

inline void norm_vector(const BatonNorm& a, float* in, const float* added, float* out) {
    const int64_t width = a.width, whole = width & ~int64_t(15);
    const int rest = static_cast<int>(width - whole);
    F squares = all(0.0f);
    auto total = [&](int64_t c, int n) {
        F x = n == 16 ? load(in + c) : load_some(in + c, n);
        if (!added) return x;
        x = x + (n == 16 ? load(added + c) : load_some(added + c, n));
        if (n == 16) store(in + c, x); else store_some(in + c, x, n);
        return x;
    };
    for (int64_t c = 0; c < whole; c += 16) {
        const F x = total(c, 16);
        squares = fma(x, x, squares);
    }
    if (rest) {
        const F x = total(whole, rest);
        squares = fma(x, x, squares);
    }
    const F inverse = all(1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(width) + a.epsilon));
    for (int64_t c = 0; c < whole; c += 16) store(out + c, load(in + c) * inverse * load(a.weight + c));
    if (rest) store_some(out + whole, load_some(in + whole, rest) * inverse * load_some(a.weight + whole, rest), rest);
}

inline void norm_rows(const void* arguments, const RowRange& range, const StepPlan&, Scratch& scratch) {
    BatonNorm a = *static_cast<const BatonNorm*>(arguments);
    a.hidden = placed(a.hidden, range);
    a.residual = placed(a.residual, range);
    a.out = placed(a.out, range);
    a.quantised = placed(a.quantised, range);
    scratch.reserve((a.width + 16) * sizeof(float) + 64);
    float* temporary = scratch.take<float>(a.width + 16);
    each_row(range, [&](int64_t row) {
        float* hidden = a.hidden.data + row * a.hidden.stride;
        float* residual = a.residual.data ? a.residual.data + row * a.residual.stride : nullptr;
        for (int64_t v = 0; v < a.count; v++) {
            float* out = a.out.data ? a.out.data + row * a.out.stride + v * a.out_vector_stride : temporary;
            if (residual) norm_vector(a, residual, hidden, out);
            else norm_vector(a, hidden + v * a.hidden_vector_stride, nullptr, out);
            if (a.quantised.values) quantise_row(out, a.quantised, row);
        }
    });
}

// ---- rotation

// sin and cos of a float32 angle, computed in float64 without libm so that every machine gives the same bits.
inline void sine_cosine(float angle, float& sine, float& cosine) {
    const double x = angle;
    const double n = std::nearbyint(x * 0.63661977236758134308);  // 2 / pi
    const double r = (x - n * 1.57079632673412561417e+00) - n * 6.07710050650619224932e-11;  // pi / 2 in two parts
    const double z = r * r;
    const double s = r + r * z * (-1.66666666666666324348e-01 + z * (8.33333333332248946124e-03 + z * (-1.98412698298579493134e-04 +
                     z * (2.75573137070700676789e-06 + z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)))));
    const double c = 1.0 - 0.5 * z + z * z * (4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03 + z * (2.48015872894767294178e-05 +
                     z * (-2.75573143513906633035e-07 + z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11)))));
    const int64_t quadrant = static_cast<int64_t>(n) & 3;
    const double a = quadrant & 1 ? c : s, b = quadrant & 1 ? s : c;
    sine = static_cast<float>(quadrant & 2 ? -a : a);
    cosine = static_cast<float>(quadrant == 1 || quadrant == 2 ? -b : b);
}

inline void angles_rows(const void* arguments, const RowRange& range, const StepPlan& plan, Scratch&) {
    BatonAngles a = *static_cast<const BatonAngles*>(arguments);
    a.cos = placed(a.cos, range);
    a.sin = placed(a.sin, range);
    each_row(range, [&](int64_t row) {
        const float position = static_cast<float>(plan.step.positions[row]);
        for (int64_t i = 0; i < a.half; i++) {
            float sine, cosine;
            sine_cosine(position * a.frequencies[i], sine, cosine);
            a.cos.data[row * a.cos.stride + i] = cosine * a.factor;
            a.sin.data[row * a.sin.stride + i] = sine * a.factor;
        }
    });
}

inline void rotate(const float* in, const float* cos, const float* sin, float* out, int64_t half) {
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
        const F x = load(in + i), y = load(in + half + i), c = load(cos + i), s = load(sin + i);
        store(out + i, x * c - y * s);
        store(out + half + i, y * c + x * s);
    }
    if (const int rest = static_cast<int>(half - i)) {
        const F x = load_some(in + i, rest), y = load_some(in + half + i, rest);
        const F c = load_some(cos + i, rest), s = load_some(sin + i, rest);
        store_some(out + i, x * c - y * s, rest);
        store_some(out + half + i, y * c + x * s, rest);
    }
}

inline void rope_rows(const void* arguments, const RowRange& range, const StepPlan&, Scratch&) {
    BatonRope a = *static_cast<const BatonRope*>(arguments);
    a.heads = placed(a.heads, range);
    a.cos = placed(a.cos, range);
    a.sin = placed(a.sin, range);
    a.out = placed(a.out, range);
    each_row(range, [&](int64_t row) {
        for (int64_t head = 0; head < a.num_heads; head++)
            rotate(a.heads.data + row * a.heads.stride + head * a.head_dim, a.cos.data + row * a.cos.stride,
                   a.sin.data + row * a.sin.stride, a.out.data + row * a.out.stride + head * a.head_dim, a.head_dim / 2);
    });
}

// ---- gates

inline F gate_value(F gate, F up, bool is_gelu) {
    if (!is_gelu) return sigmoid_times(gate, gate) * up;
    // gelu with the tanh approximation: x * (1 + tanh(u)) / 2 = x * sigmoid(2 u)
    const F u = all(0.7978845608028654f) * fma(gate * gate * gate, all(0.044715f), gate);
    return sigmoid_times(gate, u + u) * up;
}

inline void gated_rows(const void* arguments, const RowRange& range, const StepPlan&, Scratch& scratch) {
    BatonGated a = *static_cast<const BatonGated*>(arguments);
    a.gate_up = placed(a.gate_up, range);
    a.out = placed(a.out, range);
    a.quantised = placed(a.quantised, range);
    scratch.reserve((a.width + 16) * sizeof(float) + 64);
    float* temporary = scratch.take<float>(a.width + 16);
    const int64_t whole = a.width & ~int64_t(15);
    const int rest = static_cast<int>(a.width - whole);
    each_row(range, [&](int64_t row) {
        const float* gate = a.gate_up.data + row * a.gate_up.stride;
        const float* up = gate + a.width;
        float* out = a.out.data ? a.out.data + row * a.out.stride : temporary;
        for (int64_t c = 0; c < whole; c += 16) store(out + c, gate_value(load(gate + c), load(up + c), a.is_gelu));
        if (rest) store_some(out + whole, gate_value(load_some(gate + whole, rest), load_some(up + whole, rest), a.is_gelu), rest);
        if (a.quantised.values) quantise_row(out, a.quantised, row);
    });
}

// ---- KV writes

// float32 to a smaller float, to nearest even, saturating where `finite` (the fp8 formats), infinities kept elsewhere.
template <int exponent_bits, int mantissa_bits> inline uint32_t narrow(float x, uint32_t largest_finite, bool saturate) {
    constexpr int bias = (1 << (exponent_bits - 1)) - 1, drop = 23 - mantissa_bits;
    const uint32_t bits = bits_from(x), sign = bits >> 31 << (exponent_bits + mantissa_bits), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | ((1u << (exponent_bits + mantissa_bits)) - 1);  // not a number
    const int exponent = static_cast<int>(magnitude >> 23) - 127 + bias;
    uint32_t result;
    if (exponent >= 1 || bias == 127) {  // with the exponents of float32, zeros and subnormal numbers round like others
        const uint32_t rebased = magnitude - (static_cast<uint32_t>(127 - bias) << 23);
        result = (rebased + ((1u << (drop - 1)) - 1) + (rebased >> drop & 1)) >> drop;
    } else if (exponent < -mantissa_bits) {
        result = 0;
    } else {
        const uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
        const int shift = drop + 1 - exponent;
        const uint32_t kept = fraction >> shift, rest = fraction & ((1u << shift) - 1), middle = 1u << (shift - 1);
        result = kept + (rest > middle || (rest == middle && (kept & 1)) ? 1 : 0);
    }
    const uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
    if (saturate ? result > largest_finite : result > infinity) result = saturate ? largest_finite : infinity;
    return sign | result;
}

inline void store_kv(const BatonKvView& view, int64_t at, float x) {
    switch (view.type) {
        case BATON_KV_F32: static_cast<float*>(view.values)[at] = x; break;
        case BATON_KV_F16: static_cast<uint16_t*>(view.values)[at] = static_cast<uint16_t>(narrow<5, 10>(x, 0, false)); break;
        case BATON_KV_BF16: static_cast<uint16_t*>(view.values)[at] = static_cast<uint16_t>(narrow<8, 7>(x, 0, false)); break;
        case BATON_KV_FP8_E4M3: static_cast<uint8_t*>(view.values)[at] = static_cast<uint8_t>(narrow<4, 3>(x, 0x7e, true)); break;
        case BATON_KV_FP8_E5M2: static_cast<uint8_t*>(view.values)[at] = static_cast<uint8_t>(narrow<5, 2>(x, 0x7b, true)); break;
        default: static_cast<int8_t*>(view.values)[at] = x == x ? static_cast<int8_t>(std::nearbyintf(x)) : 0; break;
    }
}

inline void write_vector(const BatonKvView& view, int64_t block, int64_t head, int64_t half, int64_t offset, const float* x) {
    const int64_t base = block * view.block_stride + head * view.head_stride + half * view.half_stride + offset * view.head_dim;
    if (view.type == BATON_KV_F32) {
        std::memcpy(static_cast<float*>(view.values) + base, x, sizeof(float) * view.head_dim);
        return;
    }
    if (view.type == BATON_KV_F16 && view.head_dim % 16 == 0) {
        for (int64_t d = 0; d < view.head_dim; d += 16) store_half(static_cast<uint16_t*>(view.values) + base + d, load(x + d));
        return;
    }
    float divisor = 1.0f;
    if (view.scales) {
        float largest = 0.0f;
        bool is_number = true;
        for (int64_t d = 0; d < view.head_dim; d++) {
            largest = std::fabs(x[d]) > largest ? std::fabs(x[d]) : largest;
            is_number &= x[d] == x[d];
        }
        float scale = largest / (view.type == BATON_KV_INT8 ? 127.0f : 448.0f);
        scale = scale > 1e-6f ? scale : 1e-6f;
        if (!is_number) scale = NAN;  // a broken head must not look healthy
        view.scales[block * view.scale_block_stride + head * view.scale_head_stride + half * view.scale_half_stride + offset] = scale;
        divisor = scale;
    }
    for (int64_t d = 0; d < view.head_dim; d++) store_kv(view, base + d, view.scales ? x[d] / divisor : x[d]);
}

inline void write_kv_rows(const void* arguments, const RowRange& range, const StepPlan& plan, Scratch&) {
    BatonWriteKv a = *static_cast<const BatonWriteKv*>(arguments);
    a.key = placed(a.key, range);
    a.value = placed(a.value, range);
    each_row(range, [&](int64_t row) {
        const int64_t slot = plan.step.slots[row];
        if (slot < 0) return;
        const int64_t block = slot / a.view.block_size, offset = slot % a.view.block_size;
        for (int64_t head = 0; head < a.view.num_heads; head++) {
            write_vector(a.view, block, head, 0, offset, a.key.data + row * a.key.stride + head * a.view.head_dim);
            write_vector(a.view, block, head, 1, offset, a.value.data + row * a.value.stride + head * a.view.head_dim);
        }
    });
}

// ---- picking rows

inline void take_rows(const void* arguments, const RowRange& range, const StepPlan& plan, Scratch&) {
    const BatonTake& a = *static_cast<const BatonTake*>(arguments);
    each_row(range, [&](int64_t row) {
        std::memcpy(a.out.data + row * a.out.stride, a.inputs.data + plan.step.wanted[row] * a.inputs.stride, sizeof(float) * a.width);
    });
}

// ---- the best token

inline int64_t argmax_row(const float* row, int64_t width) {
    constexpr int64_t kStretch = 256;  // one pass finds the best stretch, a second one the place in it
    float best = -INFINITY;
    int64_t start = 0;
    for (int64_t c = 0; c < width; c += kStretch) {
        const int64_t end = c + kStretch < width ? c + kStretch : width;
        F top = all(-INFINITY);
        int64_t i = c;
        for (; i + 16 <= end; i += 16) top = larger(top, load(row + i));
        float own = largest_lane(top);
        for (; i < end; i++) own = row[i] > own ? row[i] : own;
        if (own > best) {
            best = own;
            start = c;
        }
    }
    for (int64_t c = start; c < width; c++)
        if (row[c] == best) return c;
    return 0;
}

inline void argmax_rows(const void* arguments, const RowRange& range, const StepPlan&, Scratch&) {
    const BatonArgmax& a = *static_cast<const BatonArgmax*>(arguments);
    each_row(range, [&](int64_t row) { a.out[row] = argmax_row(a.inputs.data + row * a.inputs.stride, a.width); });
}

}  // namespace
