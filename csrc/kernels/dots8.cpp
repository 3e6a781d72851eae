// Dot products along channels: vectors of weights meet vectors of inputs, and a sum is what a vector's lanes add up to.
#include "functions8.h"
#include "vec8.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 6;  // of 32 registers
#elif defined(__AVX2__)
constexpr int kRows = 3;  // of 16, and inputs come from memory
#else
constexpr int kRows = 2;
#endif
static_assert(kRows <= kMaxRows8, "arrays hold kMaxRows8");

#if defined(__AVX2__) && !defined(__AVX512F__)

// Bytes times bytes: the sum of two products overflows 16 bits unless one factor is as small as -128 .. 127 and the
// other has no sign. So weights are |w|, and inputs x - 128 where w >= 0, else 127 - x: either is x with some bits
// flipped. Kernels8::dot_lacks says what that leaves out.
constexpr int kBytes = 32;
struct Weights {
    __m256i size, flips;
    explicit Weights(const int8_t* p) {
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        size = _mm256_abs_epi8(w);
        flips = _mm256_xor_si256(_mm256_cmpgt_epi8(_mm256_setzero_si256(), w), _mm256_set1_epi8(char(0x80)));
    }
};
typedef __m256i Inputs;
inline Inputs inputs_of(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline ints multiplied_bytes(ints sum, Inputs x, const Weights& w) {
    const __m256i pairs = _mm256_maddubs_epi16(w.size, _mm256_xor_si256(x, w.flips));
    return wrapped(sum, ints(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}

#else

constexpr int kBytes = kAlong;
struct Weights {
    words all;
    explicit Weights(const int8_t* p) : all(weights_at(p)) {}
};
typedef words Inputs;
inline Inputs inputs_of(const uint8_t* p) { return inputs_at(p); }
inline ints multiplied_bytes(ints sum, Inputs x, const Weights& w) { return multiplied(sum, x, w.all); }

#endif

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
#elif defined(__AVX2__)
    for (int i = 0; i < n; i += 4) {
        const __m256i ab = _mm256_hadd_epi32(__m256i(x[i]), __m256i(x[i + 1]));
        const __m256i all = _mm256_hadd_epi32(ab, _mm256_hadd_epi32(__m256i(x[i + 2]), __m256i(x[i + 3])));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
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
        for (int64_t k = begin; k < end; k += kBytes) {
            Inputs pixels[Pixels];
#pragma GCC unroll 4
            for (int i = 0; i < Pixels; ++i) pixels[i] = inputs_of(x[i] + shift + k);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const Weights weights(w[r] + k);
#pragma GCC unroll 4
                for (int i = 0; i < Pixels; ++i)
                    sum[r * Pixels + i] = multiplied_bytes(sum[r * Pixels + i], pixels[i], weights);
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

#if defined(__AVX2__) && !defined(__AVX512F__)
int32_t dot_lacks(const int8_t* w, int n) {
    int32_t lacking = 0;
    for (int i = 0; i < n; ++i) lacking += w[i] < 0 ? 127 * w[i] : 128 * w[i];
    return lacking;
}
#endif

}  // namespace COFIRE_ISA
}  // namespace cofire
