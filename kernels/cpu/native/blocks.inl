// Whole blocks of KV: moved byte by byte between memories, or converted between formats.

namespace {

constexpr int64_t kMoveBytes = 32768;  // of each block, moved by one tile

// ---- moves

// Each tile moves the same bytes of every block, in order: a block may be both destination and, later, source.
inline int64_t tiles_of_move(const void* arguments, int64_t rows, const StepPlan&) {
    const auto& a = *static_cast<const BatonMoveBlocks*>(arguments);
    return rows ? (a.block_bytes + kMoveBytes - 1) / kMoveBytes : 0;
}

inline void run_move(const void* arguments, int64_t rows, const StepPlan&, int64_t tile, Scratch&) {
    const auto& a = *static_cast<const BatonMoveBlocks*>(arguments);
    const int64_t first = tile * kMoveBytes, rest = a.block_bytes - first, bytes = rest < kMoveBytes ? rest : kMoveBytes;
    for (int64_t i = 0; i < rows; i++)
        std::memmove(a.destination + a.destination_blocks[i] * a.destination_stride + first,
                     a.source + a.source_blocks[i] * a.source_stride + first, bytes);
}

// ---- conversion

inline float from_e4m3(uint8_t code) {  // one code of each sign is no number, none is infinite
    const uint32_t sign = uint32_t(code & 0x80) << 24, exponent = code >> 3 & 15, fraction = code & 7;
    if ((code & 0x7f) == 0x7f) return float_from(sign | 0x7fc00000u);
    if (exponent) return float_from(sign | (exponent + 120) << 23 | fraction << 20);
    const float magnitude = static_cast<float>(fraction) * 0.001953125f;  // 2^-9
    return sign ? -magnitude : magnitude;
}

// The numbers of one slot, head and half.
inline void read_vector(const BatonKvView& view, int64_t block, int64_t head, int64_t half, int64_t offset, float* out) {
    const int64_t size = view.head_dim;
    const int64_t base = block * view.block_stride + head * view.head_stride + half * view.half_stride + offset * size;
    const auto* bytes = static_cast<const uint8_t*>(view.values) + base;
    const auto* words = static_cast<const uint16_t*>(view.values) + base;
    switch (view.type) {
        case BATON_KV_F32: std::memcpy(out, static_cast<const float*>(view.values) + base, sizeof(float) * size); break;
        case BATON_KV_F16: for (int64_t d = 0; d < size; d++) out[d] = half_to_float(words[d]); break;
        case BATON_KV_BF16: for (int64_t d = 0; d < size; d++) out[d] = float_from(uint32_t(words[d]) << 16); break;
        case BATON_KV_FP8_E4M3: for (int64_t d = 0; d < size; d++) out[d] = from_e4m3(bytes[d]); break;
        case BATON_KV_FP8_E5M2: for (int64_t d = 0; d < size; d++) out[d] = half_to_float(static_cast<uint16_t>(bytes[d] << 8)); break;
        default: for (int64_t d = 0; d < size; d++) out[d] = static_cast<float>(static_cast<int8_t>(bytes[d])); break;
    }
    if (!view.scales) return;
    const float scale = view.scales[block * view.scale_block_stride + head * view.scale_head_stride + half * view.scale_half_stride + offset];
    for (int64_t d = 0; d < size; d++) out[d] *= scale;
}

inline void convert_rows(const void* arguments, const RowRange& range, const StepPlan&, Scratch& scratch) {
    const auto& a = *static_cast<const BatonConvertKv*>(arguments);
    scratch.reserve(sizeof(float) * a.source.head_dim + 64);
    float* numbers = scratch.take<float>(a.source.head_dim);
    each_row(range, [&](int64_t i) {
        for (int64_t head = 0; head < a.source.num_heads; head++)
            for (int64_t half = 0; half < 2; half++)
                for (int64_t offset = 0; offset < a.source.block_size; offset++) {
                    read_vector(a.source, a.source_blocks[i], head, half, offset, numbers);
                    write_vector(a.destination, a.destination_blocks[i], head, half, offset, numbers);
                }
    });
}

}  // namespace
