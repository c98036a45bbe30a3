// The functions that Python calls.
#include <cstdio>
#include <cstring>
#include <exception>

#include "checksums.h"
#include "team.h"

namespace {

const Variant* const kVariants[] = {&kVariantAmx, &kVariantAvx512, &kVariantAvx2, &kVariantPlain};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Number of variants of this build, best first, and their names; whether this machine can run one.
int32_t baton_num_variants() { return sizeof(kVariants) / sizeof(kVariants[0]); }
const char* baton_variant_name(int32_t index) { return kVariants[index]->name; }
int32_t baton_variant_supported(int32_t index) { return kVariants[index]->is_supported(); }

// Size of each struct, so that the binding can refuse a library that it does not match.
int64_t baton_struct_bytes(const char* name) {
#define BATON_SIZE(TYPE) if (!std::strcmp(name, #TYPE)) return sizeof(TYPE);
    BATON_SIZE(BatonRows) BATON_SIZE(BatonQuantRows) BATON_SIZE(BatonWeight) BATON_SIZE(BatonKvView) BATON_SIZE(BatonStep)
    BATON_SIZE(BatonInstruction) BATON_SIZE(BatonEmbed) BATON_SIZE(BatonNorm) BATON_SIZE(BatonProduct) BATON_SIZE(BatonAngles)
    BATON_SIZE(BatonRope) BATON_SIZE(BatonWriteKv) BATON_SIZE(BatonAttend) BATON_SIZE(BatonGated) BATON_SIZE(BatonQuantise)
    BATON_SIZE(BatonTake) BATON_SIZE(BatonMark) BATON_SIZE(BatonArgmax)
    BATON_SIZE(BatonUniforms) BATON_SIZE(BatonDraw) BATON_SIZE(BatonLogprobs) BATON_SIZE(BatonMoveBlocks) BATON_SIZE(BatonConvertKv)
    BATON_SIZE(BatonMergePartials)
#undef BATON_SIZE
    return -1;
}

// A worker's slot in the core ledger at `path`; null with a phrase in `reason` where that cannot be.
void* baton_ledger_open(const char* path, int32_t num_cores, int32_t num_threads, char* reason, int32_t reason_bytes) {
    try {
        return new Ledger(path, num_cores, num_threads);
    } catch (const std::exception& error) {
        std::snprintf(reason, static_cast<size_t>(reason_bytes), "%s", error.what());
        return nullptr;
    }
}

void baton_ledger_close(void* ledger) { delete static_cast<Ledger*>(ledger); }
void baton_ledger_sweep(const char* path) { Ledger::sweep(path); }
void baton_ledger_claim(void* ledger) { static_cast<Ledger*>(ledger)->claim(); }
void baton_ledger_release(void* ledger) { static_cast<Ledger*>(ledger)->release(); }
int32_t baton_ledger_grant(void* ledger) { return static_cast<Ledger*>(ledger)->grant_now(); }

// Copies `count` runs of num_bytes bytes, each from and to its own offset. checksums: null, or where the CRC-32C of each
// copy is put. way: -1 for the best.
void baton_copy_runs(char* to, const char* from, const int64_t* to_offsets, const int64_t* from_offsets, int64_t count, int64_t num_bytes, uint32_t* checksums, int32_t way) {
    if (way < 0) way = crc32c_best_way();
    for (int64_t i = 0; i < count; i++) {
        const uint32_t sum = copied(way, to + to_offsets[i], from + from_offsets[i], num_bytes, checksums != nullptr);
        if (checksums) checksums[i] = sum;
    }
}

// Puts the CRC-32C of `count` runs into checksums. way: -1 for the best.
void baton_checksum_runs(const char* bytes, const int64_t* offsets, int64_t count, int64_t num_bytes, uint32_t* checksums, int32_t way) {
    for (int64_t i = 0; i < count; i++)
        checksums[i] = way < 0 ? crc32c(0, bytes + offsets[i], num_bytes) : crc32c_of(way, 0, bytes + offsets[i], num_bytes);
}

// The CRC-32C of bytes behind others, whose CRC-32C is `before`.
uint32_t baton_checksum(const char* bytes, int64_t num_bytes, uint32_t before) { return crc32c(before, bytes, num_bytes); }

int32_t baton_num_checksum_ways() { return crc32c_num_ways(); }
int32_t baton_first_checksum_way() { return crc32c_first_way(); }

// ledger: null, or one that outlives the team.
void* baton_team_create(int32_t num_threads, int32_t variant, void* ledger) {
    try {
        return new Team(num_threads, *kVariants[variant], static_cast<Ledger*>(ledger));
    } catch (const std::exception&) {
        return nullptr;
    }
}

void baton_team_destroy(void* team) { delete static_cast<Team*>(team); }

void baton_run(void* team, const BatonInstruction* instructions, int64_t count, const BatonStep* step) {
    static_cast<Team*>(team)->run(instructions, count, *step);
}

void baton_set_mark(void* team, uint32_t value) { static_cast<Team*>(team)->mark().set(value); }

// The mark of the running program once it differs from `seen`; `seen` itself after timeout_ms.
uint32_t baton_wait_mark(void* team, uint32_t seen, int32_t timeout_ms) {
    WaitWord& mark = static_cast<Team*>(team)->mark();
    mark.wait_while(seen, timeout_ms, false);
    return mark.value();
}

}  // extern "C"
