#include "team.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace {

constexpr int64_t kSpinNanoseconds = 20000;
constexpr uint32_t kAllThreads = 1u << 30;

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

void WaitWord::set(uint32_t value) {
    word_.store(value, std::memory_order_seq_cst);
    if (num_sleepers_.load(std::memory_order_seq_cst))
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

bool WaitWord::wait_while(uint32_t seen, int timeout_ms, bool spins) {
    if (value() != seen) return true;
    const int64_t started = now_ns();
    for (int i = 0; spins; i++) {
        for (int j = 0; j < 16; j++) relax();
        if (value() != seen) return true;
        if (now_ns() - started > kSpinNanoseconds) break;
    }
    while (value() == seen) {
        timespec left, *timeout = nullptr;
        if (timeout_ms >= 0) {
            const int64_t ns = started + timeout_ms * 1000000LL - now_ns();
            if (ns <= 0) return false;
            left = {static_cast<time_t>(ns / 1000000000LL), static_cast<long>(ns % 1000000000LL)};
            timeout = &left;
        }
        num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAIT_PRIVATE, seen, timeout, nullptr, 0);
        num_sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
    return true;
}

Team::Team(int num_threads, const Variant& variant, Ledger* ledger) : variant_(variant), ledger_(ledger) {
    allowed_.set(ledger_ ? 1 : kAllThreads);
    for (int i = 0; i < num_threads; i++) scratch_.push_back(std::make_unique<Scratch>());
    plan_.num_threads = num_threads;
    plan_.most_scores = variant_.most_scores;
    for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { work(i); });
}

Team::~Team() {
    is_ending_ = true;
    allowed_.set(kAllThreads);
    runs_.set(runs_.value() + 2);
    for (auto& thread : threads_) thread.join();
}

int64_t Team::rows_of(const BatonInstruction& instruction) const {
    return instruction.row_count == BATON_ROWS_WANTED ? plan_.step.num_wanted : plan_.step.num_tokens;
}

void Team::announce(const BatonInstruction& mark) {
    mark_.set(static_cast<uint32_t>(static_cast<const BatonMark*>(mark.arguments)->layer) + 1);
}

int64_t Team::end_of_joined(int64_t index) const {
    if (!plan_.step.joined_rows) return index;
    bool writes = false;
    for (; index < count_; index++) {
        const BatonInstruction& instruction = instructions_[index];
        const bool is_mark = instruction.op == BATON_OP_MARK;
        // A mark is told when its tiles begin: right as long as none of them writes KV before it.
        if (is_mark ? writes : instruction.row_count != BATON_ROWS_TOKENS || !variant_.operations[instruction.op].run_rows) break;
        writes = writes || instruction.op == BATON_OP_WRITE_KV;
    }
    return index;
}

void Team::open(int64_t index) {
    if (ledger_) allow(ledger_->grant_now());
    for (; index < count_; index++) {
        const BatonInstruction& instruction = instructions_[index];
        if (instruction.op == BATON_OP_MARK) {
            announce(instruction);
            continue;
        }
        Progress& progress = progress_[index];
        const int64_t end = end_of_joined(index), rows = rows_of(instruction);
        progress.joins = end > index;
        progress.end = progress.joins ? end : index + 1;
        if (progress.joins) {
            for (int64_t i = index; i < end; i++)
                if (instructions_[i].op == BATON_OP_MARK) announce(instructions_[i]);
            const int64_t size = plan_.step.joined_rows;
            progress.tiles = rows < size ? 1 : (rows + size - kRowsTogether) / size;  // no tile of fewer than kRowsTogether rows
        } else {
            progress.tiles = variant_.operations[instruction.op].num_tiles(instruction.arguments, rows, plan_);
        }
        if (progress.tiles) break;
    }
    current_.set(static_cast<uint32_t>(index));
}

void Team::run_tile(const Progress& progress, int64_t index, int64_t tile, int thread) {
    Scratch& scratch = *scratch_[thread];
    const int64_t rows = rows_of(instructions_[index]);
    if (!progress.joins) {
        variant_.operations[instructions_[index].op].run(instructions_[index].arguments, rows, plan_, tile, scratch);
        return;
    }
    const int64_t size = plan_.step.joined_rows;
    const RowRange range{tile * size, tile + 1 == progress.tiles ? rows : (tile + 1) * size, thread};
    for (; index < progress.end; index++) {
        const BatonInstruction& instruction = instructions_[index];
        if (instruction.op != BATON_OP_MARK) variant_.operations[instruction.op].run_rows(instruction.arguments, range, plan_, scratch);
    }
}

void Team::run(const BatonInstruction* instructions, int64_t count, const BatonStep& step) {
    instructions_ = instructions;
    count_ = count;
    plan_.step = step;
    if (static_cast<int64_t>(progress_.size()) < count) progress_ = std::vector<Progress>(count);
    const BatonAttend* attend = nullptr;
    bool has_windows = false;
    for (int64_t i = 0; i < count; i++) {
        progress_[i].next.store(0, std::memory_order_relaxed);
        progress_[i].done.store(0, std::memory_order_relaxed);
        if (instructions[i].op != BATON_OP_ATTEND) continue;
        attend = static_cast<const BatonAttend*>(instructions[i].arguments);
        has_windows = has_windows || attend->window;
    }
    if (attend) plan_attention(plan_, *attend, has_windows);
    mark_.set(0);
    if (ledger_) ledger_->claim();
    open(0);
    if (threads_.empty()) {
        take_part(0);
    } else {
        runs_.add();
        take_part(0);
        runs_.add();
        wait_until_all_have_left();
    }
    if (ledger_) ledger_->release();
    plan_.attends.clear();
    plan_.merges.clear();
    plan_.members.clear();
}

void Team::wait_until_all_have_left() {
    const int64_t started = now_ns();
    while (num_inside_.load(std::memory_order_seq_cst)) {
        relax();
        // One that has nothing left but to leave may wait for this very core.
        if (now_ns() - started > kSpinNanoseconds) sched_yield();
    }
}

void Team::allow(int num_threads) {
    if (allowed_.value() != static_cast<uint32_t>(num_threads)) allowed_.set(static_cast<uint32_t>(num_threads));
}

bool Team::has_core(int thread) {
    if (!ledger_) return true;
    if (thread == 0) ledger_->tell_progress();
    const int granted = ledger_->grant();
    allow(granted);
    return thread < granted;
}

bool Team::take_part(int thread) {
    for (int64_t index = current_.value(); index < count_; index = current_.value()) {
        Progress& progress = progress_[index];
        for (;;) {
            if (!has_core(thread)) return false;
            const int64_t tile = progress.next.fetch_add(1, std::memory_order_relaxed);
            if (tile >= progress.tiles) break;
            run_tile(progress, index, tile, thread);
            if (progress.done.fetch_add(1, std::memory_order_acq_rel) + 1 == progress.tiles) open(progress.end);
        }
        current_.wait_while(static_cast<uint32_t>(index));
    }
    return true;
}

void Team::work(int thread) {
    for (uint32_t seen = 0; !is_ending_;) {
        const uint32_t allowed = allowed_.value();
        if (static_cast<uint32_t>(thread) >= allowed) {
            allowed_.wait_while(allowed, -1, false);
            continue;
        }
        runs_.wait_while(seen);
        // Entering is announced before the run is looked at, so that run() never returns with somebody inside.
        num_inside_.fetch_add(1, std::memory_order_seq_cst);
        seen = runs_.value();
        if ((seen & 1) && !take_part(thread)) seen--;  // it comes back to this run when it has a core again
        num_inside_.fetch_sub(1, std::memory_order_seq_cst);
    }
}
