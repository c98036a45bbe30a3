// CRC-32C of bytes in memory, and copies.
#pragma once

#include <cstddef>
#include <cstdint>

// The checksum of what `before` is the checksum of (0: nothing) and these bytes behind it.
uint32_t crc32c(uint32_t before, const char* bytes, size_t count);

// The same in each way of this build; those from the first one that this machine has onwards work here.
uint32_t crc32c_of(int32_t way, uint32_t before, const char* bytes, size_t count);
// Copies bytes in the same ways; the checksum of what was copied, if it is wanted.
uint32_t copied(int32_t way, char* to, const char* from, size_t count, bool is_summed);

int32_t crc32c_num_ways();
int32_t crc32c_first_way();
int32_t crc32c_best_way();
