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

inline void convert_rows(const void* arguments, const RowRange& range, const StepPlan&, Scratch& scratch) {
    const auto& a = *static_cast<const BatonConvertKv*>(arguments);
    scratch.reserve(sizeof(float) * a.source.head_dim + 64);
    float* numbers = scratch.take<float>(a.source.head_dim);
    each_row(range, [&](int64_t i) {
        for (int64_t head = 0; head < a.source.num_heads; head++)
            for (int64_t half = 0; half < 2; half++)
                for (int64_t offset = 0; offset < a.source.block_size; offset++) {
                    const float* slot = slot_vector(a.source, a.source_blocks[i], head, half, offset, numbers);
                    write_vector(a.destination, a.destination_blocks[i], head, half, offset, slot);
                }
    });
}

}  // namespace
