// The functions that Python calls.
#include <cstring>
#include <exception>

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
    BATON_SIZE(BatonTake) BATON_SIZE(BatonMark)
#undef BATON_SIZE
    return -1;
}

void* baton_team_create(int32_t num_threads, int32_t variant) {
    try {
        return new Team(num_threads, *kVariants[variant]);
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
