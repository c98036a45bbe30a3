// CRC-32C of bytes in memory.
#pragma once

#include <cstddef>
#include <cstdint>

// The checksum of what `before` is the checksum of (0: nothing) and these bytes behind it.
uint32_t crc32c(uint32_t before, const char* bytes, size_t count);

// The same in each way of this build, best first; those from the best one that this machine has onwards work here.
uint32_t crc32c_of(int32_t way, uint32_t before, const char* bytes, size_t count);
int32_t crc32c_num_ways();
int32_t crc32c_best_way();
