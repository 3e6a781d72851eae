// Dot products along channels: vectors of weights meet vectors of inputs, and a sum is what a vector's lanes add up to.
#include "functions8.h"
#include "vec8.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 6;  // of 32 registers
#else
constexpr int kRows = 2;  // of 16
#endif
static_assert(kRows <= kMaxRows8, "arrays hold kMaxRows8");

// What the lanes of each vector add up to, four vectors at a time.
inline void totals(const ints* x, int n, int32_t* to) {
#if defined(__AVX512F__)
    for (int i = 0; i < n; i += 4) {
        const __m512i a = __m512i(x[i]), b = __m512i(x[i + 1]), c = __m512i(x[i + 2]), d = __m512i(x[i + 3]);
        const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
    }
#else
    for (int i = 0; i < n; ++i) to[i] = total(x[i]);
#endif
}

template <int Rows, int Pixels>
void dots(const int8_t* const* w, const Run8* runs, int count, int64_t row, const uint8_t* const* x, int32_t* sums) {
    constexpr int kAll = (Rows * Pixels + 3) / 4 * 4;
    ints sum[kAll] = {};
    for (int run = 0; run < count; ++run) {
        const int64_t begin = runs[run].tap * row, end = begin + runs[run].taps * row;
        const int64_t shift = runs[run].pixel * row - begin;
        for (int64_t k = begin; k < end; k += kAlong) {
            words pixels[Pixels];
#pragma GCC unroll 4
            for (int i = 0; i < Pixels; ++i) pixels[i] = inputs_at(x[i] + shift + k);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const words weights = weights_at(w[r] + k);
#pragma GCC unroll 4
                for (int i = 0; i < Pixels; ++i)
                    sum[r * Pixels + i] = multiplied(sum[r * Pixels + i], pixels[i], weights);
            }
        }
    }
    totals(sum, kAll, sums);
}

template <int Rows>
void dots_of(const int8_t* const* w, const Run8* runs, int count, int64_t row, const uint8_t* const* x, int pixels,
             int32_t* sums) {
    if (pixels == 4) return dots<Rows, 4>(w, runs, count, row, x, sums);
    if (pixels == 3) return dots<Rows, 3>(w, runs, count, row, x, sums);
    if (pixels == 2) return dots<Rows, 2>(w, runs, count, row, x, sums);
    dots<Rows, 1>(w, runs, count, row, x, sums);
}

template <int Rows>
void rows_of(const int8_t* const* w, int rows, const Run8* runs, int count, int64_t row, const uint8_t* const* x,
             int pixels, int32_t* sums) {
    if constexpr (Rows > 1)
        if (rows < Rows) return rows_of<Rows - 1>(w, rows, runs, count, row, x, pixels, sums);
    dots_of<Rows>(w, runs, count, row, x, pixels, sums);
    if (rows > Rows) rows_of<kRows>(w + Rows, rows - Rows, runs, count, row, x, pixels, sums + Rows * pixels);
}

}  // namespace

void dot(const int8_t* const* w, int rows, const Run8* runs, int count, int64_t row, const uint8_t* const* x,
         int pixels, int32_t* sums) {
    rows_of<kRows>(w, rows, runs, count, row, x, pixels, sums);
}

}  // namespace COFIRE_ISA
}  // namespace cofire
