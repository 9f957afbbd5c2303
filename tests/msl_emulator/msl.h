// What TVM's code generator for Metal uses of the Metal Shading Language, for a C++ compiler.
// Vectors have Metal's alignment: the compiler moves them as such, and an address that is no multiple is a fault.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../fibers.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

#define kernel static
#define device
#define constant const
#define thread
#define threadgroup

namespace msl {

template <typename T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) Vector {
  T v[N];
  Vector() = default;
  explicit Vector(T x) {
    for (T& e : v) e = x;
  }
  template <typename... A, typename = typename std::enable_if<sizeof...(A) == N && (N > 1)>::type>
  Vector(A... a) : v{T(a)...} {}
  template <typename S>
  explicit Vector(const Vector<S, N>& o) {
    for (int i = 0; i < N; i++) v[i] = T(o.v[i]);
  }
  T& operator[](int i) { return v[i]; }
  T operator[](int i) const { return v[i]; }
};

#define MSL_BINARY(op)                                               \
  template <typename T, int N>                                       \
  Vector<T, N> operator op(const Vector<T, N>& a, const Vector<T, N>& b) { \
    Vector<T, N> r;                                                  \
    for (int i = 0; i < N; i++) r.v[i] = a.v[i] op b.v[i];           \
    return r;                                                        \
  }
MSL_BINARY(+)
MSL_BINARY(-)
MSL_BINARY(*)
MSL_BINARY(/)
MSL_BINARY(%)
MSL_BINARY(&)
MSL_BINARY(|)
MSL_BINARY(^)
MSL_BINARY(<<)
MSL_BINARY(>>)
#undef MSL_BINARY

// Threads of the running workgroup, and all of it at a barrier.
static int group_size;
static fibers::Meeting group;

#define MSL_MATH(name, expression)                         \
  inline float name(float x) { return expression; }        \
  template <int N>                                         \
  Vector<float, N> name(Vector<float, N> a) {              \
    for (float& x : a.v) x = name(x);                      \
    return a;                                              \
  }
MSL_MATH(exp, __builtin_expf(x))
MSL_MATH(exp2, __builtin_exp2f(x))
MSL_MATH(log, __builtin_logf(x))
MSL_MATH(log2, __builtin_log2f(x))
MSL_MATH(sqrt, __builtin_sqrtf(x))
MSL_MATH(rsqrt, 1 / __builtin_sqrtf(x))
MSL_MATH(sin, __builtin_sinf(x))
MSL_MATH(cos, __builtin_cosf(x))
MSL_MATH(tanh, __builtin_tanhf(x))
MSL_MATH(floor, __builtin_floorf(x))
MSL_MATH(ceil, __builtin_ceilf(x))
MSL_MATH(trunc, __builtin_truncf(x))
MSL_MATH(rint, __builtin_rintf(x))
MSL_MATH(round, __builtin_roundf(x))
MSL_MATH(fabs, __builtin_fabsf(x))
#undef MSL_MATH

inline float pow(float a, float b) { return __builtin_powf(a, b); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline int popcount(uint x) { return __builtin_popcount(x); }
template <typename T>
T max(T a, T b) {
  return a > b ? a : b;
}
template <typename T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
T select(T otherwise, T chosen, bool condition) {
  return condition ? chosen : otherwise;
}
template <typename To, typename From>
To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To out;
  memcpy(&out, &x, sizeof out);
  return out;
}

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { fibers::meet(group, group_size); }

// What the lanes of a SIMD group hand to each other. Two exchanges take turns: nobody can be two ahead.
constexpr int SIMD = 32;
struct Exchange {
  uint64_t words[SIMD];
  fibers::Meeting lanes;
};
static std::vector<Exchange> exchanges[2];
static std::vector<int> turns;

template <typename T>
T simd_shuffle_down(T value, ushort delta) {
  int lane = fibers::current % SIMD, first = fibers::current - lane;
  Exchange& e = exchanges[turns[fibers::current]++ & 1][first / SIMD];
  memcpy(&e.words[lane], &value, sizeof value);
  fibers::meet(e.lanes, min(SIMD, group_size - first));
  if (lane + delta < SIMD) memcpy(&value, &e.words[lane + delta], sizeof value);
  return value;  // beyond the last lane it is undefined
}

}  // namespace msl

#define MSL_VECTORS(type)           \
  typedef msl::Vector<type, 2> type##2; \
  typedef msl::Vector<type, 3> type##3; \
  typedef msl::Vector<type, 4> type##4;
MSL_VECTORS(bool)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(float)
#undef MSL_VECTORS

inline constexpr half operator""_h(long double x) { return half(x); }

namespace msl {

// A place in a grid: of uint, uint2 and uint3, which kernels take, whatever is asked for.
struct Coordinate {
  uint x, y, z;
  operator uint() const { return x; }
};

static Coordinate group_index, group_shape;

inline Coordinate thread_index() {
  uint i = fibers::current;
  return {i % group_shape.x, i / group_shape.x % group_shape.y, i / (group_shape.x * group_shape.y)};
}

// A kernel as a program sees it: its body for one thread, and what fills its threadgroup memory with garbage.
struct Function {
  void (*body)();
  void (*spoil)();
};

static void** buffers;  // of the running kernel; scalars come last

inline void launch(const Function& f, const uint* grid, const uint* block) {
  group_shape = {block[0], block[1], block[2]};
  group_size = block[0] * block[1] * block[2];
  for (uint z = 0; z < grid[2]; z++)
    for (uint y = 0; y < grid[1]; y++)
      for (uint x = 0; x < grid[0]; x++) {
        group_index = {x, y, z};
        group = {};
        for (auto& e : exchanges) e.assign(group_size / SIMD + 1, {});
        turns.assign(group_size, 0);
        f.spoil();
        fibers::run(group_size, f.body);
      }
}

template <typename T>
T read() {
  T value;
  if (fread(&value, sizeof value, 1, stdin) != 1) exit(3);
  return value;
}

// A heap block of its exact size, so that AddressSanitizer sees every access beyond it.
inline void* read_bytes(size_t size) {
  void* data = malloc(size ? size : 1);
  if (size && fread(data, size, 1, stdin) != 1) exit(3);
  return data;
}

// The whole program: arrays, then launches, from standard input; the arrays afterwards to standard output.
inline int serve(const Function* functions) {
  uint count = read<uint>();
  std::vector<void*> arrays(count);
  std::vector<size_t> sizes(count);
  for (uint i = 0; i < count; i++) {
    sizes[i] = read<uint64_t>();
    arrays[i] = read_bytes(sizes[i]);
  }
  for (uint left = read<uint>(); left > 0; left--) {
    const Function& f = functions[read<uint>()];
    std::vector<void*> used(read<uint>());
    for (void*& b : used) b = arrays[read<uint>()];
    size_t scalars = read<uint64_t>();
    used.push_back(read_bytes(scalars));
    uint grid[3], block[3];
    for (uint& x : grid) x = read<uint>();
    for (uint& x : block) x = read<uint>();
    buffers = used.data();
    launch(f, grid, block);
    free(used.back());
  }
  for (uint i = 0; i < count; i++) fwrite(arrays[i], 1, sizes[i], stdout);
  return fflush(stdout) != 0;
}

}  // namespace msl
