#include "ledger.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace {

constexpr char kMagic[9] = "BATONCOR";
constexpr uint32_t kVersion = 1;
constexpr int64_t kComputes = INT64_MAX, kNever = INT64_MAX;
constexpr int kHeaderByte = 0, kFirstSlotByte = 1;  // what the kernel's locks lie on
constexpr int kLockTries = 2000, kLockPauseMicroseconds = 1000, kOpenTries = 100;

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Locks belong to the open file, not to the process: two teams of one process are two workers. A process that forks
// without exec would hand them on; exec closes them.
bool lock_byte(int file, int byte, short type) {
    struct flock lock = {};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    return fcntl(file, F_OFD_SETLK, &lock) == 0;
}

// Whether somebody else holds one of these bytes.
bool is_held(int file, int byte, int count = 1) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = count;
    return fcntl(file, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

// Opening and closing happen one at a time. Nothing waits without bound: the holder may be a stopped process.
bool lock_header(int file) {
    for (int i = 0; i < kLockTries; i++) {
        if (lock_byte(file, kHeaderByte, F_WRLCK)) return true;
        if (errno != EAGAIN && errno != EACCES) return false;
        usleep(kLockPauseMicroseconds);
    }
    return false;
}

bool is_at(int file, const std::string& path) {
    struct stat own, there;
    return fstat(file, &own) == 0 && lstat(path.c_str(), &there) == 0 && own.st_ino == there.st_ino && own.st_dev == there.st_dev;
}

void remove_if_empty(int file, const std::string& path) {
    if (!is_held(file, kFirstSlotByte, Ledger::kSlots) && is_at(file, path)) unlink(path.c_str());
}

bool begins_like_a_ledger(int file, int64_t bytes) {
    char magic[8] = {};
    const int64_t count = std::min<int64_t>(bytes, sizeof(magic));
    return pread(file, magic, count, 0) == count && std::memcmp(magic, kMagic, count) == 0;
}

// Cores of worker `own` of `count`: dealt one by one, in order, up to what each can use; at least one.
int share(const int* can_use, int count, int own, int cores) {
    int given[Ledger::kSlots] = {};
    for (bool deals = true; deals && cores > 0;) {
        deals = false;
        for (int i = 0; i < count && cores > 0; i++) {
            if (given[i] >= can_use[i]) continue;
            given[i]++;
            cores--;
            deals = true;
        }
    }
    return std::max(1, given[own]);
}

}  // namespace

Ledger::Ledger(const std::string& path, int num_cores, int num_threads) : path_(path), num_cores_(num_cores) {
    try {
        open_file();
        take_slot(num_threads);
    } catch (...) {
        leave();
        throw;
    }
}

Ledger::~Ledger() { leave(); }

// Leaves the file open with its header locked.
void Ledger::open_file() {
    for (int i = 0; i < kOpenTries; i++) {
        file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (file_ < 0) throw std::runtime_error(std::strerror(errno));
        if (!lock_header(file_)) throw std::runtime_error("a process that is stopped holds it");
        if (is_at(file_, path_)) break;
        close(file_);  // the last user removed it meanwhile
        file_ = -1;
    }
    if (file_ < 0) throw std::runtime_error("it is removed again and again");
    struct stat status;
    if (fstat(file_, &status) != 0 || !S_ISREG(status.st_mode)) throw std::runtime_error("it is no plain file");
    if (status.st_uid != geteuid()) throw std::runtime_error("it belongs to another user");
    prepare_file(status.st_size);
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory == MAP_FAILED) throw std::runtime_error(std::strerror(errno));
    header_ = static_cast<Header*>(memory);
    slots_ = reinterpret_cast<Slot*>(header_ + 1);
}

// A file of another version that nobody uses is made anew, a short one is completed, a strange one is left alone.
void Ledger::prepare_file(int64_t bytes) {
    if (!begins_like_a_ledger(file_, bytes)) throw std::runtime_error("it is no core ledger");
    const uint32_t expected[2] = {kVersion, kSlots};
    uint32_t found[2] = {};
    const bool fits = pread(file_, found, sizeof(found), sizeof(kMagic) - 1) == sizeof(found) && !std::memcmp(found, expected, sizeof(found));
    if (!fits) {
        if (is_held(file_, kFirstSlotByte, kSlots)) throw std::runtime_error("workers of another version of Baton use it");
        char head[16];
        std::memcpy(head, kMagic, 8);
        std::memcpy(head + 8, expected, 8);
        if (ftruncate(file_, 0) != 0 || pwrite(file_, head, sizeof(head), 0) != sizeof(head))
            throw std::runtime_error(std::strerror(errno));
    }
    if ((!fits || bytes != kBytes) && ftruncate(file_, kBytes) != 0) throw std::runtime_error(std::strerror(errno));
}

// Takes the first slot that is free, wipes what the dead have left, and opens the header for others.
void Ledger::take_slot(int num_threads) {
    int used = 0;
    for (int i = 0; i < kSlots; i++) {
        if (slot_ < 0 && lock_byte(file_, kFirstSlotByte + i, F_WRLCK)) {
            slot_ = i;
        } else if (is_held(file_, kFirstSlotByte + i)) {
            used = i + 1;
            continue;
        }
        slots_[i].counts_until.store(0);
    }
    if (slot_ < 0) throw std::runtime_error("all of its slots are taken: " + std::to_string(kSlots));
    progress_ = slots_[slot_].progress.load();
    slots_[slot_].num_threads.store(num_threads);
    header_->num_used.store(std::max(used, slot_ + 1));
    header_->changes.fetch_add(1);
    lock_byte(file_, kHeaderByte, F_UNLCK);
    count();
}

void Ledger::leave() {
    if (file_ < 0) return;
    if (slot_ >= 0) {
        slots_[slot_].counts_until.store(0);
        header_->changes.fetch_add(1);
        if (lock_header(file_)) {
            lock_byte(file_, kFirstSlotByte + slot_, F_UNLCK);
            remove_if_empty(file_, path_);
        }
    }
    if (header_) munmap(header_, kBytes);
    close(file_);  // and with it every lock
    file_ = -1;
}

void Ledger::sweep(const std::string& path) {
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0) return;
    struct stat status;
    const bool is_ledger = fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid() &&
                           begins_like_a_ledger(file, status.st_size);
    if (is_ledger && lock_header(file)) remove_if_empty(file, path);
    close(file);
}

void Ledger::claim() {
    tell_progress();
    slots_[slot_].counts_until.store(kComputes, std::memory_order_seq_cst);
    header_->changes.fetch_add(1, std::memory_order_seq_cst);
    count();
}

void Ledger::release() {
    slots_[slot_].counts_until.store(now_ns() + kLingerNanoseconds, std::memory_order_seq_cst);
    header_->changes.fetch_add(1, std::memory_order_seq_cst);
}

int Ledger::grant_now() {
    const int64_t due = due_.load(std::memory_order_relaxed);
    if (due != kNever && now_ns() >= due) return count();
    return grant();
}

// Whether another worker has a share now; brings `due` forward to when that has to be asked again.
bool Ledger::counts(int slot, int64_t now, int64_t& due) {
    int64_t until = slots_[slot].counts_until.load(std::memory_order_seq_cst);
    if (until <= now) return false;
    if (until != kComputes) {
        due = std::min(due, until);
        return true;
    }
    due = std::min(due, now + kLookNanoseconds);
    Seen& seen = seen_[slot];
    const uint32_t progress = slots_[slot].progress.load(std::memory_order_relaxed);
    if (progress != seen.progress || !seen.at) {
        seen = {progress, now};
        return true;
    }
    if (now - seen.at < kLookNanoseconds) return true;
    if (!is_held(file_, kFirstSlotByte + slot)) {
        if (slots_[slot].counts_until.compare_exchange_strong(until, 0)) header_->changes.fetch_add(1);
        return false;
    }
    return now - seen.at < kSilentNanoseconds;
}

int Ledger::count() {
    if (is_counting_.exchange(true, std::memory_order_acquire)) return grant_.load(std::memory_order_relaxed);
    // Read before the slots: a change that comes while they are read makes the next look count again.
    const uint32_t changes = header_->changes.load(std::memory_order_seq_cst);
    const int64_t now = now_ns();
    const int used = std::clamp(header_->num_used.load(std::memory_order_relaxed), slot_ + 1, kSlots);
    int can_use[kSlots], num_counted = 0, own = 0;
    int64_t due = kNever;
    for (int i = 0; i < used; i++) {
        if (i == slot_) own = num_counted;
        else if (!counts(i, now, due)) continue;
        can_use[num_counted++] = std::max(1, slots_[i].num_threads.load(std::memory_order_relaxed));
    }
    const int granted = share(can_use, num_counted, own, num_cores_);
    grant_.store(granted, std::memory_order_relaxed);
    due_.store(due, std::memory_order_relaxed);
    seen_changes_.store(changes, std::memory_order_relaxed);
    is_counting_.store(false, std::memory_order_release);
    return granted;
}
