// Vectors of the instruction set that this file is compiled for, through the compiler's vector extension.
#pragma once

#include <cstdint>

#include "../zen5.h"
#include "kernels.h"
#include "lanes.h"

namespace cofire {
namespace COFIRE_ISA {

// Rows x vectors of sums that fill the registers, but for those of the pixels and of a weight.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 8, kTileVectors = 3;  // of 32 registers
#else
constexpr int kTileRows = 6, kTileVectors = 2;  // of 16
#endif
static_assert(kTileRows <= kMaxRows, "arrays hold kMaxRows");

constexpr int kSoon = 64;  // floats: where an output will be written

typedef float vec __attribute__((vector_size(4 * kLanes), may_alias));
typedef float vec4 __attribute__((vector_size(16), may_alias));
// At any float's address. Only for loads and stores: clang forgets it where a reference to a local one is passed on.
typedef float vec_anywhere __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef float vec4_anywhere __attribute__((vector_size(16), aligned(4), may_alias));

inline vec load(const float* p) { return *reinterpret_cast<const vec_anywhere*>(p); }
inline void store(float* p, vec x) { *reinterpret_cast<vec_anywhere*>(p) = x; }
inline vec4 load4(const float* p) { return *reinterpret_cast<const vec4_anywhere*>(p); }
inline void store4(float* p, vec4 x) { *reinterpret_cast<vec4_anywhere*>(p) = x; }
inline vec splat(float x) { return x - vec{}; }
// x where it is not below y: keeps the NaN of x
inline vec max(vec x, vec y) { return x < y ? y : x; }
inline vec min(vec x, vec y) { return y < x ? y : x; }

// 0, 1, 2, ...
inline vec lane_numbers() {
    vec numbers;
    for (int i = 0; i < kLanes; ++i) numbers[i] = float(i);
    return numbers;
}

// A vector is a row of quads of four floats. Elements I, J, K, L of each quad of a, where 4 to 7 are those of b.
template <int I, int J, int K, int L>
inline vec pick(vec a, vec b) {
#define COFIRE_AT(i, quad) ((i) < 4 ? (i) + 4 * (quad) : kLanes + (i) - 4 + 4 * (quad))
#define COFIRE_QUAD(quad) COFIRE_AT(I, quad), COFIRE_AT(J, quad), COFIRE_AT(K, quad), COFIRE_AT(L, quad)
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, COFIRE_QUAD(0), COFIRE_QUAD(1), COFIRE_QUAD(2), COFIRE_QUAD(3));
#elif defined(__AVX__)
    return __builtin_shufflevector(a, b, COFIRE_QUAD(0), COFIRE_QUAD(1));
#else
    return __builtin_shufflevector(a, b, COFIRE_QUAD(0));
#endif
#undef COFIRE_QUAD
#undef COFIRE_AT
}

constexpr int kQuads = kLanes / 4;

// Each quad from a place of its own, and back.
inline vec load_quads(const float* const* from) {
#if defined(__AVX512F__)
    const auto low = __builtin_shufflevector(load4(from[0]), load4(from[1]), 0, 1, 2, 3, 4, 5, 6, 7);
    const auto high = __builtin_shufflevector(load4(from[2]), load4(from[3]), 0, 1, 2, 3, 4, 5, 6, 7);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX__)
    return __builtin_shufflevector(load4(from[0]), load4(from[1]), 0, 1, 2, 3, 4, 5, 6, 7);
#else
    return load4(from[0]);
#endif
}

inline vec4 quad(vec x, int number) {
#if defined(__AVX512F__)
    return number == 0   ? __builtin_shufflevector(x, x, 0, 1, 2, 3)
           : number == 1 ? __builtin_shufflevector(x, x, 4, 5, 6, 7)
           : number == 2 ? __builtin_shufflevector(x, x, 8, 9, 10, 11)
                         : __builtin_shufflevector(x, x, 12, 13, 14, 15);
#elif defined(__AVX__)
    return number == 0 ? __builtin_shufflevector(x, x, 0, 1, 2, 3) : __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
    return x;
#endif
}

// Quad by quad: rows become columns.
inline void transpose(vec& a, vec& b, vec& c, vec& d) {
    const vec ab_low = pick<0, 4, 1, 5>(a, b), ab_high = pick<2, 6, 3, 7>(a, b);
    const vec cd_low = pick<0, 4, 1, 5>(c, d), cd_high = pick<2, 6, 3, 7>(c, d);
    a = pick<0, 1, 4, 5>(ab_low, cd_low);
    b = pick<2, 3, 6, 7>(ab_low, cd_low);
    c = pick<0, 1, 4, 5>(ab_high, cd_high);
    d = pick<2, 3, 6, 7>(ab_high, cd_high);
}

}  // namespace COFIRE_ISA
}  // namespace cofire
