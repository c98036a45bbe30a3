// Memory that one thread reuses from tile to tile. Grows to what the largest tile asked for and stays there.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(memory_); }

    // Starts over: what was taken before is given up.
    void reset() { used_ = 0; }

    // `count` elements, aligned to 64 bytes, of undefined content. At most `reserve`d bytes in all.
    template <typename T> T* take(size_t count) {
        const size_t bytes = (count * sizeof(T) + 63) & ~size_t(63);
        if (used_ + bytes > size_) std::abort();  // a tile must reserve what it takes
        T* result = reinterpret_cast<T*>(memory_ + used_);
        used_ += bytes;
        return result;
    }

    // Makes room for `bytes` and starts over.
    void reserve(size_t bytes) {
        reset();
        if (bytes <= size_) return;
        std::free(memory_);
        size_ = (bytes + kLargePage - 1) & ~(kLargePage - 1);
        memory_ = static_cast<uint8_t*>(std::aligned_alloc(kLargePage, size_));
        if (!memory_) throw std::bad_alloc();
        madvise(memory_, size_, MADV_HUGEPAGE);  // where the kernel has none, small pages do
    }

private:
    static constexpr size_t kLargePage = size_t(2) << 20;

    uint8_t* memory_ = nullptr;
    size_t size_ = 0;
    size_t used_ = 0;
};
