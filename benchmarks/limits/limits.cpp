// Prints one limit of the machine: limits KIND NUM_THREADS MEBIBYTES -> a number, 1e9 a second.
//
// Owns its threads only. Each kind is compiled for its own instruction set; the caller runs every kind in a process of
// its own, so that one the machine lacks says so (exit code 3) or dies without taking the others along.
// Operations: a multiplication and an addition count two. Bytes: 1e9 bytes a second.

#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr double kSeconds = 0.5;
constexpr int kUnsupported = 3;
using Clock = std::chrono::steady_clock;
using Wide = uint64_t __attribute__((vector_size(64)));

std::atomic<uint64_t> g_sink{0};  // what loops compute goes here, so that none is optimised away

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Keeps a register's value alive in a loop without storing it.
#define KEEP(x) asm volatile("" : "+v"(x))

// ---------------------------------------------------------------- bytes

// A pass over `count` vectors of 64 bytes: eight chains, so that loads wait for memory and not for an addition.
#define DEFINE_READ(NAME, TARGET)                                                     \
  __attribute__((target(TARGET))) uint64_t NAME(const Wide* from, size_t count) {     \
    Wide sum[8] = {};                                                                 \
    for (size_t i = 0; i + 8 <= count; i += 8)                                        \
      for (int k = 0; k < 8; ++k) sum[k] ^= from[i + k];                              \
    Wide all = {};                                                                    \
    for (auto& part : sum) all ^= part;                                               \
    uint64_t folded = 0;                                                              \
    for (int k = 0; k < 8; ++k) folded ^= all[k];                                     \
    return folded;                                                                    \
  }
DEFINE_READ(read_avx512, "avx512f")
DEFINE_READ(read_avx2, "avx2")
DEFINE_READ(read_plain, "sse2")

double read_rate(int num_threads, size_t num_bytes) {
  auto read = __builtin_cpu_supports("avx512f") ? read_avx512
              : __builtin_cpu_supports("avx2")  ? read_avx2
                                                : read_plain;
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::exit(1);
  madvise(memory, num_bytes, MADV_HUGEPAGE);
  std::memset(memory, 1, num_bytes);
  const size_t each = num_bytes / 64 / num_threads / 8 * 8;
  std::atomic<int> num_ready{0};
  std::vector<double> rates(num_threads);
  std::vector<std::thread> team;
  for (int t = 0; t < num_threads; ++t)
    team.emplace_back([&, t] {
      const Wide* from = static_cast<const Wide*>(memory) + t * each;
      g_sink ^= read(from, each);
      for (++num_ready; num_ready < num_threads;) _mm_pause();
      const auto start = Clock::now();
      double read_bytes = 0, taken = 0;
      while ((taken = seconds_since(start)) < kSeconds) {
        g_sink ^= read(from, each);
        read_bytes += each * 64.0;
      }
      rates[t] = read_bytes / taken;
    });
  for (auto& thread : team) thread.join();
  double total = 0;
  for (double rate : rates) total += rate;
  return total / 1e9;
}

// ---------------------------------------------------------------- operations

// Each loop does `rounds` times 12 independent steps (latency of 4 to 5 on two ports, and 12 sums with their operands
// fit the 16 registers of AVX2) and returns the operations done. STEP(s) adds to the sum s from a and b.
constexpr int kChains = 12;
#define EACH(DO) DO(s0) DO(s1) DO(s2) DO(s3) DO(s4) DO(s5) DO(s6) DO(s7) DO(s8) DO(s9) DO(s10) DO(s11)
#define KEEP_EACH(s) KEEP(s);

#define DEFINE_LOOP(NAME, TARGET, TYPE, SET, STEP, OPS)                                   \
  __attribute__((target(TARGET))) double NAME(long rounds) {                              \
    TYPE a = SET(1), b = SET(2), s0 = SET(0), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0; \
    TYPE s6 = s0, s7 = s0, s8 = s0, s9 = s0, s10 = s0, s11 = s0;                          \
    KEEP(a);                                                                              \
    KEEP(b);                                                                              \
    for (long i = 0; i < rounds; ++i) {                                                   \
      EACH(STEP)                                                                          \
      EACH(KEEP_EACH)                                                                     \
    }                                                                                     \
    return double(rounds) * kChains * (OPS);                                              \
  }

#define PS256(x) _mm256_set1_ps(x)
#define PS512(x) _mm512_set1_ps(x)
#define I256(x) _mm256_set1_epi8(x)
#define I512(x) _mm512_set1_epi8(x)
#define FMA256(s) s = _mm256_fmadd_ps(a, b, s);
#define FMA512(s) s = _mm512_fmadd_ps(a, b, s);
// Products of bytes, added in pairs to 16 bits, then to 32: three instructions for what VNNI does in one.
#define MADDUBS256(s)                         \
  {                                           \
    __m256i pairs = _mm256_maddubs_epi16(a, b); \
    KEEP(pairs);                              \
    s = _mm256_add_epi32(s, _mm256_madd_epi16(pairs, b)); \
  }
#define MADDUBS512(s)                         \
  {                                           \
    __m512i pairs = _mm512_maddubs_epi16(a, b); \
    KEEP(pairs);                              \
    s = _mm512_add_epi32(s, _mm512_madd_epi16(pairs, b)); \
  }
#define VNNI256(s) s = _mm256_dpbusd_avx_epi32(s, a, b);
#define VNNI512(s) s = _mm512_dpbusd_epi32(s, a, b);
#define BF16(s) s = _mm512_dpbf16_ps(s, (__m512bh)a, (__m512bh)b);
DEFINE_LOOP(fma_avx2, "avx2,fma", __m256, PS256, FMA256, 8 * 2)
DEFINE_LOOP(fma_avx512, "avx512f", __m512, PS512, FMA512, 16 * 2)
DEFINE_LOOP(maddubs_avx2, "avx2", __m256i, I256, MADDUBS256, 32 * 2)
DEFINE_LOOP(maddubs_avx512, "avx512bw", __m512i, I512, MADDUBS512, 64 * 2)
DEFINE_LOOP(vnni_avx2, "avxvnni", __m256i, I256, VNNI256, 32 * 2)
DEFINE_LOOP(vnni_avx512, "avx512f,avx512vnni", __m512i, I512, VNNI512, 64 * 2)
DEFINE_LOOP(bf16_avx512, "avx512f,avx512bf16", __m512, PS512, BF16, 32 * 2)

// AMX: tiles of 16 rows of 64 bytes; four accumulators, as a kernel that reuses each loaded tile twice would have.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

__attribute__((target("amx-tile"))) void configure_tiles() {
  static const TileConfig config;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}

__attribute__((target("amx-tile,amx-int8"))) double amx_int8(long rounds) {
  configure_tiles();
  for (long i = 0; i < rounds * 4; ++i) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  return double(rounds) * 16 * (16 * 16 * 64 * 2.0);
}

__attribute__((target("amx-tile,amx-bf16"))) double amx_bf16(long rounds) {
  configure_tiles();
  for (long i = 0; i < rounds * 4; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return double(rounds) * 16 * (16 * 16 * 32 * 2.0);
}

// Whether the processor has AMX (leaf 7, EDX bit) and the kernel lets this process use its tile registers.
bool has_amx(int edx_bit) {
  uint32_t a = 7, b, c = 0, d;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return (d >> edx_bit & 1) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_avx_vnni() {
  uint32_t a = 7, b, c = 1, d;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return __builtin_cpu_supports("avx2") && (a >> 4 & 1);
}

double operation_rate(double (*loop)(long), int num_threads) {
  std::atomic<int> num_ready{0};
  std::vector<double> rates(num_threads);
  std::vector<std::thread> team;
  for (int t = 0; t < num_threads; ++t)
    team.emplace_back([&, t] {
      loop(20000);
      for (++num_ready; num_ready < num_threads;) _mm_pause();
      const auto start = Clock::now();
      double done = 0, taken = 0;
      while ((taken = seconds_since(start)) < kSeconds) done += loop(20000);
      rates[t] = done / taken;
    });
  for (auto& thread : team) thread.join();
  double total = 0;
  for (double rate : rates) total += rate;
  return total / 1e9;
}

struct Kind {
  const char* name;
  bool is_supported;
  double (*loop)(long);
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: limits KIND NUM_THREADS MEBIBYTES\n"), 2;
  const std::string wanted = argv[1];
  const int num_threads = std::atoi(argv[2]);
  if (wanted == "read") {
    std::printf("%.3f\n", read_rate(num_threads, size_t(std::atol(argv[3])) << 20));
    return 0;
  }
  const Kind kinds[] = {
      {"fma_avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), fma_avx2},
      {"fma_avx512", bool(__builtin_cpu_supports("avx512f")), fma_avx512},
      {"maddubs_avx2", bool(__builtin_cpu_supports("avx2")), maddubs_avx2},
      {"maddubs_avx512", bool(__builtin_cpu_supports("avx512bw")), maddubs_avx512},
      {"vnni_avx2", has_avx_vnni(), vnni_avx2},
      {"vnni_avx512", bool(__builtin_cpu_supports("avx512vnni")), vnni_avx512},
      {"bf16_avx512", bool(__builtin_cpu_supports("avx512bf16")), bf16_avx512},
      {"amx_int8", wanted == "amx_int8" && has_amx(25), amx_int8},
      {"amx_bf16", wanted == "amx_bf16" && has_amx(22), amx_bf16},
  };
  for (const Kind& kind : kinds)
    if (wanted == kind.name) {
      if (!kind.is_supported) return kUnsupported;
      std::printf("%.3f\n", operation_rate(kind.loop, num_threads));
      return 0;
    }
  return std::fprintf(stderr, "unknown kind %s\n", argv[1]), 2;
}
