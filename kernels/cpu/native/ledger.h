// The cores of one machine, shared by its workers through a small file that all of them map.
//
// A worker holds a slot: a lock of the kernel on one byte of the file, which ends with the worker however it ends, so that
// no process id and no start time can mislead. Its slot says whether it computes now, and how many threads it has. From
// the slots each worker counts its own grant: cores are dealt one by one, in the order of slots, to those that compute
// now; each gets at least one, and what one cannot use goes to the others. Nobody waits for anybody on a step's path.
//
//   computes      claim() until release()
//   lingers       still counted for kLingerNanoseconds after release(): the next step of a busy worker comes soon
//   silent        computes, but has told no progress for a while: not counted when its lock is gone (it died) or after
//                 kSilentNanoseconds (it is stopped); counted again as soon as it goes on
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

class Ledger {
public:
    static constexpr int64_t kLingerNanoseconds = 3000000;
    static constexpr int64_t kLookNanoseconds = 5000000;     // between two looks at those that compute
    static constexpr int64_t kSilentNanoseconds = 250000000;
    static constexpr int kSlots = 256;

    // Opens the file, or makes it, and takes a slot for a worker with `num_threads` threads on `num_cores` cores.
    // Throws std::runtime_error with one phrase.
    Ledger(const std::string& path, int num_cores, int num_threads);
    ~Ledger();  // gives the slot back; the last one to leave removes the file
    Ledger(const Ledger&) = delete;
    Ledger& operator=(const Ledger&) = delete;

    // Removes the file when no worker holds a slot: those that were killed could not.
    static void sweep(const std::string& path);

    void claim();
    void release();

    // Tells the others that this worker is not stopped. For one thread of the worker.
    void tell_progress() {
        slots_[slot_].progress.store(++progress_, std::memory_order_relaxed);
    }

    // Cores of this worker: one load unless somebody has claimed or released since. Any thread may ask.
    int grant() {
        if (header_->changes.load(std::memory_order_acquire) != seen_changes_.load(std::memory_order_relaxed)) return count();
        return grant_.load(std::memory_order_relaxed);
    }

    // The same, and looks after the others where it is time for that: a clock reading while others compute.
    int grant_now();

private:
    struct alignas(64) Slot {
        std::atomic<int64_t> counts_until;  // CLOCK_MONOTONIC; kComputes: until release; 0: idle
        std::atomic<uint32_t> progress;
        std::atomic<int32_t> num_threads;
    };
    struct alignas(64) Header {
        char magic[8];
        uint32_t version;
        uint32_t num_slots;
        std::atomic<int32_t> num_used;  // slots from this one on are empty
        alignas(64) std::atomic<uint32_t> changes;  // claims and releases so far
    };
    struct Seen {
        uint32_t progress = 0;
        int64_t at = 0;
    };
    static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
    static constexpr int64_t kBytes = sizeof(Header) + kSlots * sizeof(Slot);

    void open_file();
    void prepare_file(int64_t bytes);
    void take_slot(int num_threads);
    void leave();
    int count();
    bool counts(int slot, int64_t now, int64_t& due);

    const std::string path_;
    const int num_cores_;
    int file_ = -1;
    Header* header_ = nullptr;
    Slot* slots_ = nullptr;
    int slot_ = -1;
    uint32_t progress_ = 0;
    Seen seen_[kSlots];
    std::atomic<uint32_t> seen_changes_{0};
    std::atomic<int32_t> grant_{1};
    std::atomic<int64_t> due_{0};  // when to look again without a change
    std::atomic<bool> is_counting_{false};
};
