// Vectors of the instruction set that this file is compiled for, through the compiler's vector extension.
#pragma once

#include <cstdint>

#include "leaf.h"

#ifndef COFIRE_ISA
#error "COFIRE_ISA names the namespace of the instruction set, e.g. v3"
#endif

namespace cofire {
namespace COFIRE_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// aligned(4): loads and stores at any float's address
typedef float vec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

typedef int mask4 __attribute__((vector_size(16)));

inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline void store(float* p, vec x) { *reinterpret_cast<vec*>(p) = x; }
inline vec4 load4(const float* p) { return *reinterpret_cast<const vec4*>(p); }
inline void store4(float* p, vec4 x) { *reinterpret_cast<vec4*>(p) = x; }
inline vec splat(float x) { return x - vec{}; }
// x where it is not below y: keeps the NaN of x
inline vec max(vec x, vec y) { return x < y ? y : x; }
inline vec min(vec x, vec y) { return y < x ? y : x; }

inline void transpose4(vec4& a, vec4& b, vec4& c, vec4& d) {
    vec4 ab_lo = __builtin_shuffle(a, b, mask4{0, 4, 1, 5});
    vec4 ab_hi = __builtin_shuffle(a, b, mask4{2, 6, 3, 7});
    vec4 cd_lo = __builtin_shuffle(c, d, mask4{0, 4, 1, 5});
    vec4 cd_hi = __builtin_shuffle(c, d, mask4{2, 6, 3, 7});
    a = __builtin_shuffle(ab_lo, cd_lo, mask4{0, 1, 4, 5});
    b = __builtin_shuffle(ab_lo, cd_lo, mask4{2, 3, 6, 7});
    c = __builtin_shuffle(ab_hi, cd_hi, mask4{0, 1, 4, 5});
    d = __builtin_shuffle(ab_hi, cd_hi, mask4{2, 3, 6, 7});
}

}  // namespace COFIRE_ISA
}  // namespace cofire
