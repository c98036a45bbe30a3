// Choosing tokens: random numbers and draws.
//
// Draws follow kernels/reference/{philox,exponential,sampling}.py step by step: the same roundings in the same order of
// sums, so the same ids. What is done in another order here is what no bit depends on: largest values, counts, sorting.
//
// Templates of the standard library are given types of this file only: what they become must stay inside the variant,
// or the linker would keep one variant's code for all.
#include <algorithm>

namespace {

constexpr int64_t kFold = 256;        // ids under one partial sum: part of the rule
constexpr int64_t kFoldTogether = 8;  // blocks whose sums are taken side by side, none waiting for another
constexpr int64_t kBuckets = 8192;    // of top-p's sort: 64 an octave
constexpr int64_t kNoToken = -1;      // of a row whose logits are not finite

struct Key { float logit; };
struct Kept { double weight; };

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- random numbers: Philox-4x32-10

// The first two of the four words, as one number.
inline uint64_t philox_words(uint64_t seed, uint32_t position, uint32_t choice, uint32_t purpose) {
    uint32_t word[4] = {position, choice, purpose, 0}, key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t left = uint64_t(word[0]) * 0xD2511F53u, right = uint64_t(word[2]) * 0xCD9E8D57u;
        word[0] = static_cast<uint32_t>(right >> 32) ^ word[1] ^ key[0];
        word[2] = static_cast<uint32_t>(left >> 32) ^ word[3] ^ key[1];
        word[1] = static_cast<uint32_t>(right);
        word[3] = static_cast<uint32_t>(left);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return uint64_t(word[0]) << 32 | word[1];
}

inline int64_t one_tile(const void*, int64_t rows, const StepPlan&) { return rows ? 1 : 0; }

inline void run_uniforms(const void* arguments, int64_t rows, const StepPlan&, int64_t, Scratch&) {
    const auto& a = *static_cast<const BatonUniforms*>(arguments);
    for (int64_t row = 0; row < rows; row++) {
        const uint64_t words = philox_words(a.seeds[row], static_cast<uint32_t>(a.positions[row]), static_cast<uint32_t>(a.choices[row]),
                                            static_cast<uint32_t>(a.purpose));
        a.out[row] = static_cast<double>(words >> 11) * 0x1p-53;
    }
}

// ---- weights

typedef float F8 __attribute__((vector_size(32)));
typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef double D8 __attribute__((vector_size(64)));
typedef uint64_t U8 __attribute__((vector_size(64)));

// exp(x) in place, for x that is not above 0, by the steps of kernels/reference/exponential.py.
__attribute__((always_inline)) inline void exponentiate(D8& x) {
    constexpr double kMagic = 0x1.8p52;
    const D8 zero = {}, least = zero - 708.0;
    const D8 inside = x < least ? least : x;
    const D8 shifted = inside * 0x1.71547652b82fep+0 + kMagic;
    const D8 n = shifted - kMagic;
    const D8 r = inside - n * 0x1.62e42feep-1 - n * 0x1.a39ef35793c76p-33;
    D8 p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const U8 power = ((U8)shifted + 1023) << 52;  // the bits of 2^n: n stands in the last bits of `shifted`
    p = p * (D8)power;
    x = x < least ? zero : p;
}

struct Weighing {
    double largest;       // logit of the row
    double temperature;
    double least_weight;  // smaller ones become 0
    double least_logit;   // weights of smaller ones become 0
};

// exp((logit - largest) / temperature) of the kFold ids of one block; 0 behind the last of `count`. The largest of them.
inline double weigh_block(const float* logits, int64_t count, const Weighing& w, double* weights) {
    float padded[kFold];
    if (count < kFold) {
        for (int64_t i = 0; i < kFold; i++) padded[i] = i < count ? logits[i] : -INFINITY;
        logits = padded;
    }
    const bool divides = w.temperature != 1.0;
    const D8 zero = {};
    D8 top = {};
    for (int64_t i = 0; i < kFold; i += 8) {
        F8 narrow;
        std::memcpy(&narrow, logits + i, sizeof(narrow));
        const D8 logit = __builtin_convertvector(narrow, D8);
        D8 weight = logit - w.largest;
        if (divides) weight /= w.temperature;
        exponentiate(weight);
        weight = weight < zero + w.least_weight ? zero : weight;
        weight = logit < zero + w.least_logit ? zero : weight;
        std::memcpy(weights + i, &weight, sizeof(weight));
        top = weight > top ? weight : top;
    }
    double largest = 0.0;
    for (int i = 0; i < 8; i++) largest = top[i] > largest ? top[i] : largest;
    return largest;
}

// Left folds of N blocks side by side; weights below `least` count as 0.
template <int N> inline void fold_together(const double* weights, const int64_t* blocks, double least, double* sums) {
    const double* block[N];
    double total[N] = {};
    for (int b = 0; b < N; b++) block[b] = weights + blocks[b] * kFold;
    for (int64_t i = 0; i < kFold; i++)
        for (int b = 0; b < N; b++) total[b] += block[b][i] < least ? 0.0 : block[b][i];
    for (int b = 0; b < N; b++) sums[blocks[b]] = total[b];
}

// The same of at most kFoldTogether blocks, each sum in its block's place.
inline void fold_picked(const double* weights, const int64_t* blocks, int64_t count, double least, double* sums) {
    if (count == kFoldTogether) return fold_together<kFoldTogether>(weights, blocks, least, sums);
    for (int64_t b = 0; b < count; b++) fold_together<1>(weights, blocks + b, least, sums);
}

inline double fold_sums(const double* sums, int64_t blocks) {
    double total = 0.0;
    for (int64_t b = 0; b < blocks; b++) total += sums[b];
    return total;
}

// ---- the best of a row

inline int64_t fold_count(int64_t width) { return (width + kFold - 1) / kFold; }

// The largest of each block of kFold, and of all; no number where one of all is none.
inline float block_maxima(const float* row, int64_t width, float* maxima) {
    float largest = -INFINITY;
    bool are_numbers = true;
    for (int64_t start = 0; start < width; start += kFold) {
        const int64_t end = start + kFold < width ? start + kFold : width;
        F16 top = F16{} - INFINITY;
        I16 others = {};
        int64_t i = start;
        for (; i + 16 <= end; i += 16) {
            F16 logits;
            std::memcpy(&logits, row + i, sizeof(logits));
            others |= logits != logits;
            top = logits > top ? logits : top;
        }
        float own = -INFINITY;
        for (int lane = 0; lane < 16; lane++) {
            own = top[lane] > own ? top[lane] : own;
            are_numbers &= !others[lane];
        }
        for (; i < end; i++) {
            own = row[i] > own ? row[i] : own;
            are_numbers &= row[i] == row[i];
        }
        maxima[start / kFold] = own;
        largest = own > largest ? own : largest;
    }
    return are_numbers ? largest : NAN;
}

// The functions below are for rows whose logits are all numbers.

// The k-th largest of some keys.
inline float kth_of(Key* keys, int64_t count, int64_t k) {
    std::nth_element(keys, keys + k - 1, keys + count, [](Key one, Key other) { return one.logit > other.logit; });
    return keys[k - 1].logit;
}

// A bound that at least k of the row reach: the k-th largest of the blocks' maxima. keys: room for one a block.
inline float bound_of_best(const float* maxima, int64_t blocks, int64_t k, Key* keys) {
    if (k > blocks) return -INFINITY;
    for (int64_t b = 0; b < blocks; b++) keys[b] = {maxima[b]};
    return kth_of(keys, blocks, k);
}

// Puts what reaches the bound first in `found`, as `make(logit, id)`, by ascending id; how many. found: room for all.
template <typename T, typename Make>
inline int64_t collect(const float* row, int64_t width, const float* maxima, float bound, T* found, Make make) {
    int64_t count = 0;
    for (int64_t start = 0; start < width; start += kFold) {
        if (maxima[start / kFold] < bound) continue;
        for (int64_t i = start, end = lesser(start + kFold, width); i < end; i++) {
            found[count] = make(row[i], i);
            count += row[i] >= bound;
        }
    }
    return count;
}

// The k-th largest of a row, counting equals; k in [1, width]. keys: room for `width`.
inline float kth_largest(const float* row, int64_t width, int64_t k, const float* maxima, Key* keys) {
    const float bound = bound_of_best(maxima, fold_count(width), k, keys);
    const int64_t count = collect(row, width, maxima, bound, keys, [](float logit, int64_t) { return Key{logit}; });
    return kth_of(keys, count, k);
}

// ---- draws

// Memory of one row's draw.
struct DrawRoom {
    double* weights;  // [blocks * kFold] of the blocks that are alive, one after the other
    double* tops;     // [blocks] the largest weight of each
    int64_t* alive;   // [blocks] which ones they are, in ascending order
    double* sums;     // [blocks]
    float* maxima;    // [blocks] largest logits, of all blocks
    Kept* kept;       // [blocks * kFold]
    Kept* sorted;     // [blocks * kFold]
    Key* keys;        // [blocks * kFold]
    int32_t* starts;  // [kBuckets + 1]

    DrawRoom(Scratch& scratch, int64_t blocks) {
        const int64_t ids = blocks * kFold;
        scratch.reserve((sizeof(double) + 2 * sizeof(Kept) + sizeof(Key)) * ids +
                        (2 * sizeof(double) + sizeof(int64_t) + sizeof(float)) * blocks + sizeof(int32_t) * (kBuckets + 1) + 9 * 64);
        weights = scratch.take<double>(ids);
        tops = scratch.take<double>(blocks);
        alive = scratch.take<int64_t>(blocks);
        sums = scratch.take<double>(blocks);
        maxima = scratch.take<float>(blocks);
        kept = scratch.take<Kept>(ids);
        sorted = scratch.take<Kept>(ids);
        keys = scratch.take<Key>(ids);
        starts = scratch.take<int32_t>(kBuckets + 1);
    }
};

// Weights by size, the largest first: all of a bucket are larger than all of the next.
inline int64_t bucket_of(double weight) {
    uint64_t bits;
    std::memcpy(&bits, &weight, 8);
    const uint64_t bucket = (0x3ff0000000000000u - bits) >> 46;  // weights are in (0, 1]
    return bucket < kBuckets ? static_cast<int64_t>(bucket) : kBuckets - 1;
}

// The least weight that top-p keeps: of the largest, summed in falling order, the one that reaches top_p of the total.
inline double least_of_top_p(const DrawRoom& room, int64_t blocks, int64_t count, double top_p, double total) {
    const double wanted = top_p * total, floor = (1.0 - top_p) * total / static_cast<double>(count);
    int64_t found = 0;
    for (int64_t b = 0; b < blocks; b++) {
        if (room.tops[b] < floor) continue;
        for (int64_t i = b * kFold; i < (b + 1) * kFold; i++) {
            room.kept[found] = {room.weights[i]};
            found += room.weights[i] >= floor;
        }
    }
    int32_t* starts = room.starts;  // where the next one of each bucket goes; in the end, where the bucket ends
    for (int64_t b = 0; b <= kBuckets; b++) starts[b] = 0;
    for (int64_t i = 0; i < found; i++) starts[bucket_of(room.kept[i].weight) + 1]++;
    for (int64_t b = 0; b < kBuckets; b++) starts[b + 1] += starts[b];
    for (int64_t i = 0; i < found; i++) room.sorted[starts[bucket_of(room.kept[i].weight)]++] = room.kept[i];
    double sum = 0.0;
    for (int64_t b = 0, at = 0; b < kBuckets; b++) {
        bool are_equal = true;
        for (int64_t i = at + 1; i < starts[b]; i++) are_equal &= room.sorted[i].weight == room.sorted[at].weight;
        if (!are_equal) std::sort(room.sorted + at, room.sorted + starts[b], [](Kept one, Kept other) { return one.weight > other.weight; });
        for (; at < starts[b]; at++) {
            sum += room.sorted[at].weight;
            if (sum >= wanted) return room.sorted[at].weight;
        }
    }
    return found ? room.sorted[found - 1].weight : 0.0;
}

// Sums of the blocks that are alive. Those whose largest weight is below `least` are 0 and not looked at again.
inline void sum_blocks(const DrawRoom& room, int64_t blocks, double least) {
    int64_t picked[kFoldTogether], waiting = 0;
    for (int64_t b = 0; b < blocks; b++) {
        room.sums[b] = 0.0;
        if (room.tops[b] >= least) picked[waiting++] = b;
        if (waiting < kFoldTogether && b < blocks - 1) continue;
        fold_picked(room.weights, picked, waiting, least, room.sums);
        waiting = 0;
    }
}

// The id that kernels/reference/sampling.py draws; kNoToken where logits are not finite, or all are -inf.
//
// A block all of whose weights are 0 by top-k adds nothing to any sum and holds no id that can be drawn: it is not alive.
inline int64_t draw_id(const BatonDraw& a, int64_t row, const DrawRoom& room) {
    const int64_t width = a.width, all_blocks = fold_count(width), top_k = a.top_k[row];
    const float* logits = a.logits.data + row * a.logits.stride;
    const float largest = block_maxima(logits, width, room.maxima);
    if (!__builtin_isfinite(largest)) return kNoToken;
    const bool has_top_k = top_k > 0 && top_k < width;
    const float least_logit = has_top_k ? kth_largest(logits, width, top_k, room.maxima, room.keys) : -INFINITY;
    const Weighing weighing{largest, a.temperatures[row], a.min_p[row], least_logit};
    int64_t blocks = 0;
    for (int64_t b = 0; b < all_blocks; b++) {
        if (room.maxima[b] < least_logit) continue;
        room.tops[blocks] = weigh_block(logits + b * kFold, lesser(kFold, width - b * kFold), weighing, room.weights + blocks * kFold);
        room.alive[blocks++] = b;
    }
    double least = 0.0;
    sum_blocks(room, blocks, least);
    double total = fold_sums(room.sums, blocks);
    if (!(total > 0.0)) return kNoToken;
    if (a.top_p[row] < 1.0) {
        least = least_of_top_p(room, blocks, all_blocks * kFold, a.top_p[row], total);
        sum_blocks(room, blocks, least);
        total = fold_sums(room.sums, blocks);
    }
    const double threshold = a.uniforms[row] * total;
    double before = 0.0;
    for (int64_t b = 0; b < blocks; b++) {
        if (!(before + room.sums[b] > threshold)) {
            before += room.sums[b];
            continue;
        }
        double sum = 0.0;
        for (int64_t i = 0; i < kFold; i++) {
            const double weight = room.weights[b * kFold + i];
            sum += weight < least ? 0.0 : weight;
            if (before + sum > threshold) return room.alive[b] * kFold + i;
        }
    }
    return kNoToken;
}

inline void draw_rows(const void* arguments, const RowRange& range, const StepPlan&, Scratch& scratch) {
    const auto& a = *static_cast<const BatonDraw*>(arguments);
    const DrawRoom room(scratch, fold_count(a.width));
    each_row(range, [&](int64_t row) { a.out[row] = draw_id(a, row, room); });
}

}  // namespace
