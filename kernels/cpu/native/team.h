// A team of threads that runs one program at a time, operation by operation.
//
// The caller of run() is one of them. Tiles of an operation are handed out by a counter; whoever finishes the last one
// opens the next operation. In a step of many rows, row-wise operations that follow each other are joined: a tile is
// then some rows that one thread takes through all of them, so that what lies between stays in its own cache.
// Waiting spins for at most 20 microseconds, then sleeps in the kernel. With a core ledger only
// as many threads take part as it grants: that is read again before every tile, the others sleep until it grants more.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "ledger.h"
#include "operations.h"

// Waiting for a 32-bit word to change: spins first, then sleeps.
class WaitWord {
public:
    uint32_t value() const { return word_.load(std::memory_order_acquire); }
    void set(uint32_t value);
    void add() { set(value() + 1); }
    // Returns once the word differs from `seen`, or after `timeout_ms` (negative: never); whether it differs.
    bool wait_while(uint32_t seen, int timeout_ms = -1, bool spins = true);

private:
    std::atomic<uint32_t> word_{0};
    std::atomic<int32_t> num_sleepers_{0};
};

class Team {
public:
    // ledger: may be null; it outlives the team.
    Team(int num_threads, const Variant& variant, Ledger* ledger);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Runs every instruction in order; returns when the last one is done. One call at a time.
    void run(const BatonInstruction* instructions, int64_t count, const BatonStep& step);

    // The mark that the running or last program has reached: 1 + its layer; 0 at the start of a program.
    WaitWord& mark() { return mark_; }
    int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

private:
    struct alignas(64) Progress {
        std::atomic<int64_t> next{0};
        std::atomic<int64_t> done{0};
        int64_t tiles = 0;
        int64_t end = 0;      // the instruction after those of this tile
        bool joins = false;   // tiles are rows of the joined operations up to `end`
    };

    void work(int thread);
    bool take_part(int thread);        // whether it stayed to the end of the run
    bool has_core(int thread);         // asked before every tile
    void allow(int num_threads);       // these many threads take part from now on
    void wait_until_all_have_left();
    void open(int64_t index);  // makes instruction `index` the current one, passing over those with nothing to do
    void announce(const BatonInstruction& mark);
    int64_t end_of_joined(int64_t index) const;  // `index` itself where nothing can be joined
    void run_tile(const Progress& progress, int64_t index, int64_t tile, int thread);
    int64_t rows_of(const BatonInstruction& instruction) const;

    const Variant& variant_;
    Ledger* const ledger_;
    StepPlan plan_;
    const BatonInstruction* instructions_ = nullptr;
    int64_t count_ = 0;
    std::vector<Progress> progress_;
    std::vector<std::unique_ptr<Scratch>> scratch_;
    WaitWord current_;  // index of the open instruction
    WaitWord runs_;     // counts calls of run(), odd while one is open
    WaitWord mark_;
    WaitWord allowed_;  // threads from this one on have no core and sleep
    alignas(64) std::atomic<int32_t> num_inside_{0};
    std::atomic<bool> is_ending_{false};
    std::vector<std::thread> threads_;
};

// first: any of the step's attention layers. has_windows: whether one of them sees a part of the positions only.
void plan_attention(StepPlan& plan, const BatonAttend& first, bool has_windows);
