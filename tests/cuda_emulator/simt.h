// One CUDA block, or cluster of blocks, at a time on a CPU: threads are fibers, what a warp does together is a meeting of its lanes.
// Arrays are heap blocks of their exact sizes, so that AddressSanitizer sees every access beyond them.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "../fibers.h"

typedef unsigned int uint;
typedef unsigned char uchar;

struct half {
  uint16_t bits;
  half() = default;
  half(float x) : bits(_cvtss_sh(x, 0)) {}
  operator float() const { return _cvtsh_ss(bits); }
};

struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  nv_bfloat16(float x) {  // to even
    uint32_t word;
    memcpy(&word, &x, 4);
    bits = x != x ? 0x7fff : uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  operator float() const {
    uint32_t word = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
  }
};

struct alignas(8) uint2 {
  uint x, y;
};
struct alignas(16) uint4 {
  uint x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline half __float2half_rn(float x) { return half(x); }
inline nv_bfloat16 __float2bfloat16_rn(float x) { return nv_bfloat16(x); }

#define CUDART_INF_F INFINITY
#define __forceinline__ inline
#define __device__

namespace simt {

struct Copy {
  uint32_t to;
  const void* from;
};

using fibers::Meeting;
using fibers::meet;

typedef std::deque<std::vector<Copy>> Copies;  // groups of cp.async of a thread; the last one is open

struct Product {
  std::vector<float*> sums;
  const uint32_t* a[4];  // the lane's registers
  uint64_t b;
  float (*as_float)(uint32_t, int);  // of the operands' type
};

typedef std::deque<std::vector<Product>> Products;  // groups of wgmma of a thread; the last one is open

struct Exchange {
  uint32_t words[32][6];
};

static std::vector<Copies> copies;
static std::vector<Products> products;
static std::vector<Meeting> warps;
static std::vector<Exchange> exchanges[2];
static std::vector<Meeting> blocks;
static Meeting cluster;
static int block_size, cluster_size;  // in threads
static int& current = fibers::current;
static std::vector<int> turns;
static uchar* shared_memories[8];  // of the cluster's blocks
static size_t shared_size;
static void (*kernel)();

inline int rank() { return current / block_size; }
inline uchar* shared() { return shared_memories[rank()]; }

struct Index {
  struct X {
    int first = 0;
    operator int() const { return first + rank(); }
  } x;
  int y = 0, z = 0;
};
static Index block_index;  // of the cluster's first block; the others are its right neighbours

// The lanes' words, once all lanes have given theirs. Two exchanges take turns: nobody can be two meetings ahead.
inline Exchange& exchange(const uint32_t* words, int count) {
  int warp = current / 32, lane = current % 32;
  Exchange& e = exchanges[turns[current]++ & 1][warp];
  memcpy(e.words[lane], words, 4 * count);
  meet(warps[warp], 32);
  return e;
}

// The halves of a word, of type T: half or nv_bfloat16.
template <typename T>
float as_float(uint32_t word, int i) {
  T value;
  value.bits = uint16_t(word >> (16 * i));
  return value;
}
template <typename T>
uint32_t as_word(float low, float high) {
  return uint32_t(T(low).bits) | uint32_t(T(high).bits) << 16;
}

inline uchar* at_shared(uint32_t address, size_t size, int of) {
  if (address + size > shared_size || address % size) {
    fprintf(stderr, "shared memory: %zu bytes at %u of %zu\n", size, address, shared_size);
    abort();
  }
  return shared_memories[of] + address;
}
inline uchar* at_shared(uint32_t address, size_t size) { return at_shared(address, size, rank()); }

// An address within the cluster has the block's rank in its highest byte.
inline uint32_t map_shared(uint32_t address, uint32_t of) { return address | of << 24; }
inline uchar* at_cluster(uint32_t address, size_t size) {
  return at_shared(address & 0xffffff, size, int(address >> 24));
}

inline const uchar* at_global(const void* address, size_t size) {
  if (reinterpret_cast<uintptr_t>(address) % size) {
    fprintf(stderr, "global memory: %zu bytes at an address that is no multiple\n", size);
    abort();
  }
  return static_cast<const uchar*>(address);
}

template <typename T, typename... D>
void load(const uchar* from, D&... out) {
  const T* values = reinterpret_cast<const T*>(from);
  int i = 0;
  ((out = values[i++]), ...);
}

template <typename T, typename... V>
void store(uchar* to, V... values) {
  T* out = reinterpret_cast<T*>(to);
  int i = 0;
  ((out[i++] = values), ...);
}

inline void copy_async(uint32_t to, const void* from) {
  at_shared(to, 16);
  at_global(from, 16);
  copies[current].back().push_back({to, from});
}

inline void copy_commit() { copies[current].emplace_back(); }

// Copies are done as late as they may be, so that a missing wait shows.
inline void copy_wait(size_t pending) {
  auto& groups = copies[current];
  while (groups.size() > pending + 1) {
    for (const Copy& c : groups.front()) memcpy(at_shared(c.to, 16), c.from, 16);
    groups.pop_front();
  }
}

template <typename T>
void mma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
         uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
  uint32_t words[6] = {a0, a1, a2, a3, b0, b1};
  Exchange& e = exchange(words, 6);
  int g = current % 32 / 4, c = current % 4;
  float d[4] = {c0, c1, c2, c3};
  for (int i = 0; i < 4; i++) {
    int row = i / 2, column = 2 * c + i % 2;
    for (int k = 0; k < 16; k++) {
      int lane = k % 8 / 2, upper = k / 8;
      float a = as_float<T>(e.words[4 * g + lane][row + 2 * upper], k % 2);
      float b = as_float<T>(e.words[4 * column + lane][4 + upper], k % 2);
      d[i] += a * b;
    }
  }
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

inline void load_matrices(uint32_t address, uint32_t& d0, uint32_t& d1, uint32_t& d2, uint32_t& d3) {
  at_shared(address, 16);
  Exchange& e = exchange(&address, 1);
  int lane = current % 32;
  uint32_t* out[4] = {&d0, &d1, &d2, &d3};
  for (int i = 0; i < 4; i++) memcpy(out[i], at_shared(e.words[8 * i + lane / 4][0] + lane % 4 * 4, 4), 4);
}

template <typename T>
void start_product(std::vector<float*> sums, const uint32_t& a0, const uint32_t& a1, const uint32_t& a2,
                   const uint32_t& a3, uint64_t b) {
  products[current].back().push_back({sums, {&a0, &a1, &a2, &a3}, b, as_float<T>});
}

inline void commit_products() { products[current].emplace_back(); }

inline void finish(const Product& p) {
  uint32_t words[4];
  for (int i = 0; i < 4; i++) words[i] = *p.a[i];
  Exchange& e = exchange(words, 4);
  auto* a = &e.words[current % 32 / 4 * 4];  // of the lanes with the same rows
  uint32_t start = uint32_t(p.b & 0x3fff) << 4, eight_rows = uint32_t(p.b >> 32 & 0x3fff) << 4;
  for (size_t i = 0; i < p.sums.size(); i++) {
    int half = i / 2 % 2, row = int(i) / 4 * 8 + current % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      uint32_t address = start + row / 8 * eight_rows + row % 8 * 128 + 2 * k;
      uint16_t bits;
      memcpy(&bits, at_shared(address ^ (address >> 7 & 7) << 4, 2), 2);
      *p.sums[i] += p.as_float(a[k % 8 / 2][half + k / 8 * 2], k % 2) * p.as_float(bits, 0);
    }
  }
}

// Operands are read as late as they may be, so that a place or register that is filled again too early shows.
inline void wait_products(size_t pending) {
  auto& groups = products[current];
  while (groups.size() > pending + 1) {
    for (const Product& p : groups.front()) finish(p);
    groups.pop_front();
  }
}

inline void transpose(uint32_t& d, uint32_t a) {
  Exchange& e = exchange(&a, 1);
  int g = current % 32 / 4, c = current % 4;
  uint32_t low = e.words[4 * (2 * c) + g / 2][0] >> (16 * (g % 2)) & 0xffff;
  uint32_t high = e.words[4 * (2 * c + 1) + g / 2][0] >> (16 * (g % 2)) & 0xffff;
  d = low | high << 16;
}

inline void pick_bytes(uint32_t& d, uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t all = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++) out |= uint32_t(all >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  d = out;
}

template <typename T>
T shuffle(T value, int lane) {
  uint32_t word;
  memcpy(&word, &value, 4);
  word = exchange(&word, 1).words[lane][0];
  memcpy(&value, &word, 4);
  return value;
}

inline void run_cluster() {
  int count = cluster_size;
  warps.assign(count / 32, {});
  for (auto& e : exchanges) e.assign(count / 32, {});
  turns.assign(count, 0);
  blocks.assign(count / block_size, {});
  cluster = {};
  copies.assign(count, Copies(1));
  products.assign(count, Products(1));
  for (int i = 0; i < count / block_size; i++) memset(shared_memories[i], 0xff, shared_size);
  fibers::run(count, kernel);
}

inline void start(int count, int cluster_blocks, size_t bytes, void (*entry)()) {
  block_size = count;
  cluster_size = count * cluster_blocks;
  shared_size = bytes;
  for (int i = 0; i < cluster_blocks; i++)
    shared_memories[i] = static_cast<uchar*>(aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
  kernel = entry;
}

inline void* read_array(const char* path, size_t size) {
  void* data = malloc(size ? size : 1);
  FILE* file = fopen(path, "rb");
  if (!file || fread(data, 1, size, file) != size) {
    fprintf(stderr, "cannot read %s\n", path);
    exit(3);
  }
  fclose(file);
  return data;
}

inline void write_array(const char* path, const void* data, size_t size) {
  FILE* file = fopen(path, "wb");
  if (!file || fwrite(data, 1, size, file) != size) exit(3);
  fclose(file);
}

}  // namespace simt

struct ThreadIndex {
  struct X {
    operator int() const { return simt::current % simt::block_size; }
  } x;
};
static ThreadIndex threadIdx;
#define blockIdx simt::block_index

inline void __syncthreads() { simt::meet(simt::blocks[simt::rank()], simt::block_size); }
inline void __syncwarp() { simt::meet(simt::warps[simt::current / 32], 32); }
template <typename T>
T __shfl_sync(uint, T value, int lane, int) {
  return simt::shuffle(value, lane & 31);
}
template <typename T>
T __shfl_xor_sync(uint, T value, int mask, int) {
  return simt::shuffle(value, (simt::current & 31) ^ mask);
}
inline int __any_sync(uint, int predicate) {
  uint32_t word = predicate != 0;
  auto& e = simt::exchange(&word, 1);
  int found = 0;
  for (auto& lane : e.words) found |= lane[0];
  return found;
}
inline uint32_t __ballot_sync(uint, int predicate) {
  uint32_t word = predicate != 0;
  auto& e = simt::exchange(&word, 1);
  uint32_t found = 0;
  for (int i = 0; i < 32; i++) found |= e.words[i][0] << i;
  return found;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline uint32_t __cvta_generic_to_shared(void* p) { return uint32_t(static_cast<uchar*>(p) - simt::shared()); }
template <typename T>
T atomicAdd(T* at, T value) {
  T before = *at;
  *at += value;
  return before;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float rsqrtf(float a) { return 1 / sqrtf(a); }
template <typename A, typename B>
auto max(A a, B b) -> decltype(a + b) {
  return a > b ? a : b;
}
template <typename A, typename B>
auto min(A a, B b) -> decltype(a + b) {
  return a < b ? a : b;
}
