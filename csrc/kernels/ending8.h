// What becomes of the sums of convs on bytes.
#pragma once

#include "vec8.h"

namespace cofire {
namespace COFIRE_ISA {

// Numbers as small as bytes plus 1.5 * 2^23 are floats whose last bits are the nearest whole number, ties to even.
constexpr float kRound = 12582912.0f;
constexpr int32_t kRoundBits = 0x4B400000;

// The largest byte and the sum of all that a filter wrote.
struct Kept {
    ints best = {}, total = {};

    void end(const Ending8& ending, int r) const {
        if (ending.peak[r]) {
            const int32_t found = largest(best);
            if (found > *ending.peak[r]) *ending.peak[r] = uint8_t(found);
        }
        if (ending.sum[r]) *ending.sum[r] += COFIRE_ISA::total(total);
    }
};

// What all filters of an ending share, and a filter's own, in vectors: bytes may lie anywhere, so that whatever is not
// in registers would be read again after each of them that is written.
struct Rounding {
    floats low, high;
    ints zero, zero_residual;
    floats residual_multiplier;

    explicit Rounding(const Ending8& ending)
        : low(splat(float(ending.low - ending.zero_out))),
          high(splat(float(ending.high - ending.zero_out))),
          zero(splat(int32_t(ending.zero_out - kRoundBits))),
          zero_residual(splat(int32_t(ending.zero_residual))),
          residual_multiplier(splat(ending.residual_multiplier)) {}

    ints rounded(floats real) const {
        real = real < low ? low : real;
        real = real > high ? high : real;
        return ints(real + splat(kRound)) + zero;
    }
    floats residual(words x) const {
        return __builtin_convertvector(ints(x) - zero_residual, floats) * residual_multiplier;
    }
    floats residual(bytes x) const { return residual(widened(x)); }
};
struct Filter {
    floats multiplier;
    const uint8_t* residual;
    uint8_t* y;
    float* y_float;
    bool peaks, sums;

    Filter(const Ending8& ending, int r)
        : multiplier(splat(ending.multiplier[r])),
          residual(ending.residual[r]),
          y(ending.y[r]),
          y_float(ending.y_float[r]),
          peaks(ending.peak[r]),
          sums(ending.sum[r]) {}
};

// Pixels [i, i + Vectors * kLanes) of a filter.
template <int Vectors>
inline void finish_vectors(const ints* sum, int i, const Rounding& rounding, const Filter& filter, Kept& kept) {
    floats real[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) real[v] = __builtin_convertvector(sum[v], floats) * filter.multiplier;
    if (filter.residual)
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) real[v] += rounding.residual(load(filter.residual + i + v * kLanes));
    if (filter.y_float) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) store(filter.y_float + i + v * kLanes, real[v]);
        return;
    }
    ints q[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) q[v] = rounding.rounded(real[v]);
    put<Vectors>(filter.y + i, q);
    if (filter.peaks) {
        ints best = q[0];
#pragma GCC unroll 8
        for (int v = 1; v < Vectors; ++v) best = q[v] > best ? q[v] : best;
        kept.best = best > kept.best ? best : kept.best;
    }
    if (filter.sums)
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) kept.total += q[v];
}

// The same for pixels [i, i + n), n <= kLanes: touches nothing past them.
inline void finish_some(ints sum, int i, int n, const Rounding& rounding, const Filter& filter, Kept& kept) {
    floats real = __builtin_convertvector(sum, floats) * filter.multiplier;
    if (filter.residual) real += rounding.residual(load_some(filter.residual + i, n));
    if (filter.y_float) {
        for (int j = 0; j < n; ++j) filter.y_float[i + j] = real[j];
        return;
    }
    const ints q = first(rounding.rounded(real), n);
    store_some(filter.y + i, narrowed(q), n);
    if (filter.peaks) kept.best = q > kept.best ? q : kept.best;
    if (filter.sums) kept.total += q;
}

// Pixels [i, i + n) of a filter, n <= kLanes, and as many of the next lines, `pitch` apart.
template <int Lines>
inline void finish_lines(const ints* sum, int i, int pitch, int n, const Rounding& rounding, const Filter& filter,
                         Kept& kept) {
    if (filter.residual || filter.y_float) {
        for (int l = 0; l < Lines; ++l) finish_some(sum[l], i + l * pitch, n, rounding, filter, kept);
        return;
    }
    ints q[Lines];
    uint8_t packed[Lines * kLanes];
#pragma GCC unroll 4
    for (int l = 0; l < Lines; ++l)
        q[l] = rounding.rounded(__builtin_convertvector(sum[l], floats) * filter.multiplier);
    put<Lines>(packed, q);
    uint8_t* y = filter.y + i;
    if (n == kLanes) {
#pragma GCC unroll 4
        for (int l = 0; l < Lines; ++l) store(y + int64_t(l) * pitch, load(packed + l * kLanes));
    } else {
        for (int l = 0; l < Lines; ++l) store_some(y + int64_t(l) * pitch, load(packed + l * kLanes), n);
    }
    if (!filter.peaks && !filter.sums) return;
    ints best = first(q[0], n), all = best;
#pragma GCC unroll 4
    for (int l = 1; l < Lines; ++l) {
        const ints next = first(q[l], n);
        best = next > best ? next : best, all += next;
    }
    kept.best = best > kept.best ? best : kept.best;
    kept.total += all;
}

}  // namespace COFIRE_ISA
}  // namespace cofire
