// Dot products along channels: vectors of weights meet vectors of inputs, a few filters and pixels at a time.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "functions.h"
#include "vec.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 6;  // of 32 registers
#else
constexpr int kRows = 2;  // of 16
#endif

// `Length`: that of a block, or 0 for any.
template <int Rows, int Pixels, int Length>
void tile(const float* const* w, const Tap* taps, int count, int any_length, const float* const* x, bool adds,
          float* const* to, int64_t ldo) {
    const int length = Length ? Length : any_length;
    vec sum[Rows][Pixels] = {};
    if (adds)
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < Pixels; ++i) sum[r][i] = load(to[i] + r * ldo);
    for (const Tap* tap = taps; tap < taps + count; ++tap) {
        const int64_t from = int64_t(tap->number) * length, at = int64_t(tap->pixel) * length;
#pragma GCC unroll 4
        for (int k = 0; k < length; k += kLanes) {
            vec pixels[Pixels];
#pragma GCC unroll 4
            for (int i = 0; i < Pixels; ++i) pixels[i] = load(x[i] + at + k);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const vec weights = load(w[r] + from + k);
#pragma GCC unroll 4
                for (int i = 0; i < Pixels; ++i) sum[r][i] += weights * pixels[i];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < Pixels; ++i) store(to[i] + r * ldo, sum[r][i]);
}

template <int Rows, int Pixels>
void tiles_of(const float* const* w, const Tap* taps, int count, int length, const float* const* x, int pixels,
              bool adds, float* const* to, int64_t ldo) {
    if constexpr (Pixels > 1)
        if (pixels < Pixels) return tiles_of<Rows, Pixels - 1>(w, taps, count, length, x, pixels, adds, to, ldo);
    if (length == 4 * kLine) return tile<Rows, Pixels, 4 * kLine>(w, taps, count, length, x, adds, to, ldo);
    tile<Rows, Pixels, 0>(w, taps, count, length, x, adds, to, ldo);
}

template <int Rows>
void rows_of(const float* const* w, int rows, const Tap* taps, int count, int length, const float* const* x, int pixels,
             bool adds, float* const* to, int64_t ldo) {
    if constexpr (Rows > 1)
        if (rows < Rows) return rows_of<Rows - 1>(w, rows, taps, count, length, x, pixels, adds, to, ldo);
    tiles_of<Rows, 4>(w, taps, count, length, x, pixels, adds, to, ldo);
    if (rows == Rows) return;
    float* further[4];
    for (int i = 0; i < pixels; ++i) further[i] = to[i] + Rows * ldo;
    rows_of<kRows>(w + Rows, rows - Rows, taps, count, length, x, pixels, adds, further, ldo);
}

}  // namespace

void dots(const float* const* w, int rows, const Tap* taps, int count, int length, const float* const* x, int pixels,
          bool adds, float* const* to, int64_t ldo) {
    rows_of<kRows>(w, rows, taps, count, length, x, pixels, adds, to, ldo);
}

void add_lanes(const float* x, int n, float* to) {
#if defined(__AVX512F__)
    for (int i = 0; i < n; i += 4) {
        const auto at = [&](int further) { return _mm512_loadu_ps(x + (i + further) * kLanes); };
        const __m512 a = at(0), b = at(1), c = at(2), d = at(3);
        const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        const __m512 all =
            _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
        _mm_storeu_ps(to + i, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
    }
#else
    for (int i = 0; i < n; ++i) {
        float sum = x[i * kLanes];
        for (int lane = 1; lane < kLanes; ++lane) sum += x[i * kLanes + lane];
        to[i] = sum;
    }
#endif
}

}  // namespace COFIRE_ISA
}  // namespace cofire
