// Activations that only cut off, and the largest value of a vector.
#pragma once

#include "vec.h"

namespace cofire {
namespace COFIRE_ISA {

constexpr float kLowest = -__builtin_inff();

// Convs that write their results once cut them off on the way; other activations take a second pass, which saves a loop
// of its own for each of them.
struct Clamp {
    float low = kLowest, high = -kLowest;
    bool whole;  // nothing of the activation is left to do

    explicit Clamp(Act act) : whole(only_clamps(act)) {
        if (act == Act::relu || act == Act::relu6) low = 0;
        if (act == Act::relu6) high = 6;
    }
    vec operator()(vec x) const { return min(max(x, splat(low)), splat(high)); }
};

// The larger, or a NaN: unlike max, keeps that of either.
inline vec either(vec x, vec y) { return x != x ? x : max(y, x); }

// The largest lane, or a NaN.
inline float top(vec x) {
#if defined(__AVX512F__)
    x = either(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = either(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
#elif defined(__AVX__)
    x = either(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
#endif
    x = either(x, pick<2, 3, 0, 1>(x, x));
    return either(x, pick<1, 0, 3, 2>(x, x))[0];
}

// Raises the largest value so far, if there is one to keep; a NaN stays.
inline void raise(float* peak, vec best) {
    if (!peak) return;
    const float found = top(best);
    if (found > *peak || found != found) *peak = found;
}

}  // namespace COFIRE_ISA
}  // namespace cofire
