// Words of bytes in vectors of the instruction set that this file is compiled for.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels8.h"
#include "lanes.h"

namespace cofire {
namespace COFIRE_ISA {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 6, kTileVectors = 4;  // of 32 registers
constexpr int kTallRows = 8, kPairRows = 12;
#else
constexpr int kTileRows = 6, kTileVectors = 2;  // of 16
constexpr int kTallRows = kTileRows, kPairRows = kTileRows;
#endif
static_assert(kTallRows <= kMaxRows8, "arrays hold kMaxRows8");

#if defined(__AVX512VNNI__)
constexpr int kChannels = 4;
#else
constexpr int kChannels = 2;
#endif
constexpr int kBits = 32 / kChannels;  // of a channel in a word

typedef int32_t ints __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * kLanes), may_alias));
typedef float floats __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint8_t bytes __attribute__((vector_size(kLanes), may_alias));
typedef uint16_t pairs __attribute__((vector_size(2 * kLanes), may_alias));
typedef int32_t ints_anywhere __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t words_anywhere __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef float floats_anywhere __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint8_t bytes_anywhere __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef uint16_t pairs_anywhere __attribute__((vector_size(2 * kLanes), aligned(1), may_alias));

inline words load(const uint32_t* p) { return *reinterpret_cast<const words_anywhere*>(p); }
inline ints load(const int32_t* p) { return *reinterpret_cast<const ints_anywhere*>(p); }
inline bytes load(const uint8_t* p) { return *reinterpret_cast<const bytes_anywhere*>(p); }
inline void store(uint32_t* p, words x) { *reinterpret_cast<words_anywhere*>(p) = x; }
inline void store(int32_t* p, ints x) { *reinterpret_cast<ints_anywhere*>(p) = x; }
inline void store(float* p, floats x) { *reinterpret_cast<floats_anywhere*>(p) = x; }
inline void store(uint8_t* p, bytes x) { *reinterpret_cast<bytes_anywhere*>(p) = x; }
inline ints splat(int32_t x) { return x - ints{}; }
inline words splat(uint32_t x) { return x - words{}; }
inline floats splat(float x) { return x - floats{}; }

inline words widened(bytes x) {
#if defined(__AVX512F__)
    return words(_mm512_cvtepu8_epi32(__m128i(x)));
#elif defined(__AVX2__)
    return words(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(reinterpret_cast<const long long&>(x))));
#else
    return __builtin_convertvector(x, words);
#endif
}

inline bytes narrowed(ints x) {
#if defined(__AVX512F__)
    return bytes(_mm512_cvtepi32_epi8(__m512i(x)));
#elif defined(__AVX2__)
    const __m128i both = _mm_packs_epi32(_mm256_castsi256_si128(__m256i(x)), _mm256_extracti128_si256(__m256i(x), 1));
    return bytes(_mm_cvtsi128_si64(_mm_packus_epi16(both, both)));
#else
    return __builtin_convertvector(x, bytes);
#endif
}

inline int32_t total(ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32(__m512i(x));
#elif defined(__AVX2__)
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(__m256i(x)), _mm256_extracti128_si256(__m256i(x), 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
#else
    uint32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += uint32_t(x[i]);
    return int32_t(sum);
#endif
}

inline int32_t largest(ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32(__m512i(x));
#elif defined(__AVX2__)
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(__m256i(x)), _mm256_extracti128_si256(__m256i(x), 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#else
    int32_t best = x[0];
    for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
    return best;
#endif
}

#if defined(__AVX512BW__)
// Two words of weights by one load, for all lanes.
inline words both(const uint32_t* p) {
    long long two;
    __builtin_memcpy(&two, p, sizeof(two));
    return words(_mm512_set1_epi64(two));
}
#endif

#if !defined(__AVX512BW__)
// Copies n < 8 bytes to or from a number of 64 bits, piece by piece.
inline uint64_t first_bytes(const uint8_t* p, int n) {
    uint64_t all = 0;
    uint32_t four;
    uint16_t two;
    if (n & 1) all = p[n - 1];
    if (n & 2) __builtin_memcpy(&two, p + (n & 4), 2), all = all << 16 | two;
    if (n & 4) __builtin_memcpy(&four, p, 4), all = all << 32 | four;
    return all;
}
inline void put_first_bytes(uint8_t* p, uint64_t all, int n) {
    if (n & 4) __builtin_memcpy(p, &all, 4), p += 4, all >>= 32;
    if (n & 2) __builtin_memcpy(p, &all, 2), p += 2, all >>= 16;
    if (n & 1) *p = uint8_t(all);
}
#endif

// Vectors of which the first n <= kLanes lanes count: no memory past them is touched, the other lanes are zero.
inline bytes load_some(const uint8_t* p, int n) {
#if defined(__AVX512BW__)
    return bytes(_mm_maskz_loadu_epi8(__mmask16((1u << n) - 1), p));
#else
    if (n == kLanes) return load(p);
    const uint64_t all = first_bytes(p, n);
    bytes x;
    __builtin_memcpy(&x, &all, sizeof(x));
    return x;
#endif
}

inline void store_some(uint8_t* p, bytes x, int n) {
#if defined(__AVX512BW__)
    _mm_mask_storeu_epi8(p, __mmask16((1u << n) - 1), __m128i(x));
#else
    if (n == kLanes) return store(p, x);
    uint64_t all = 0;
    __builtin_memcpy(&all, &x, sizeof(x));
    put_first_bytes(p, all, n);
#endif
}

inline ints first(ints x, int n) {
#if defined(__AVX512BW__)
    return ints(_mm512_maskz_mov_epi32(__mmask16((1u << n) - 1), __m512i(x)));
#else
    ints lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    return x & (lane < splat(int32_t(n)));
#endif
}

// Numbers of 0 .. 255 as bytes, one vector after the other.
template <int Vectors>
inline void put(uint8_t* to, const ints* x) {
#if defined(__AVX512BW__)
    if constexpr (Vectors >= 4) {
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512i one = _mm512_packus_epi32(__m512i(x[0]), __m512i(x[1]));
        const __m512i two = _mm512_packus_epi32(__m512i(x[2]), __m512i(x[3]));
        _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(one, two)));
        return put<Vectors - 4>(to + 64, x + 4);
    }
#endif
#if defined(__AVX2__) && !defined(__AVX512BW__)
    if constexpr (Vectors >= 4) {
        const __m256i one = _mm256_packs_epi32(__m256i(x[0]), __m256i(x[1]));
        const __m256i two = _mm256_packs_epi32(__m256i(x[2]), __m256i(x[3]));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                            _mm256_permutevar8x32_epi32(_mm256_packus_epi16(one, two), order));
        return put<Vectors - 4>(to + 32, x + 4);
    } else if constexpr (Vectors >= 2) {
        const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(__m256i(x[0]), __m256i(x[1])), 0xd8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                         _mm_packus_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)));
        return put<Vectors - 2>(to + 16, x + 2);
    }
#endif
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) store(to + v * kLanes, narrowed(x[v]));
}

// Sums wrap around, also in lanes that hold nothing yet.
inline ints wrapped(ints x, ints y) { return ints(words(x) + words(y)); }

// Elements 0, 2, ... and 1, 3, ... of two vectors as one.
inline words even(words a, words b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#elif defined(__AVX__)
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
#else
    return __builtin_shufflevector(a, b, 0, 2, 4, 6);
#endif
}
inline words odd(words a, words b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX__)
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    return __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

// What neighbouring lanes of two vectors add up to, as one.
inline ints neighbours(ints a, ints b) { return ints(even(words(a), words(b)) + odd(words(a), words(b))); }

#if defined(__SSSE3__)
// For each set of 8 places those that are in it, then none: shuffles that bring what is live together.
struct Places {
    uint8_t of[256][8];
    constexpr Places() : of() {
        for (int set = 0; set < 256; ++set)
            for (int i = 0, n = 0; n < 8; ++i)
                if (i >= 8 || set >> i & 1) of[set][n++] = i < 8 ? uint8_t(i) : uint8_t(0x80);
    }
};
alignas(64) constexpr Places kPlaces;

// The bytes of p[0 .. 8) in `set`, side by side, zeros behind them.
inline __m128i live_bytes(const int8_t* p, unsigned set) {
    const auto eight = [](const void* from) { return _mm_loadl_epi64(static_cast<const __m128i*>(from)); };
    return _mm_shuffle_epi8(eight(p), eight(kPlaces.of[set]));
}
#endif

// sum + the products of the two channels of 16 bits in words
inline ints multiplied_pairs(ints sum, words pixels, words weights) {
#if defined(__AVX512VNNI__)
    return ints(_mm512_dpwssd_epi32(__m512i(sum), __m512i(pixels), __m512i(weights)));
#elif defined(__AVX512BW__)
    return wrapped(sum, ints(_mm512_madd_epi16(__m512i(pixels), __m512i(weights))));
#elif defined(__AVX2__)
    return wrapped(sum, ints(_mm256_madd_epi16(__m256i(pixels), __m256i(weights))));
#elif defined(__SSE2__)
    return wrapped(sum, ints(_mm_madd_epi16(__m128i(pixels), __m128i(weights))));
#else
    const ints low = ints(pixels << 16) >> 16, high = ints(pixels) >> 16;
    return wrapped(wrapped(sum, low * (ints(weights << 16) >> 16)), high * (ints(weights) >> 16));
#endif
}

// sum + the products of the channels in a word of pixels and a word of weights
inline ints multiplied(ints sum, words pixels, words weights) {
#if defined(__AVX512VNNI__)
    return ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(pixels), __m512i(weights)));
#else
    return multiplied_pairs(sum, pixels, weights);
#endif
}

// A whole vector of weights, and the inputs that they meet.
#if defined(__AVX512VNNI__)
constexpr int kAlong = 64;
inline words weights_at(const int8_t* p) { return words(_mm512_loadu_si512(p)); }
inline words inputs_at(const uint8_t* p) { return words(_mm512_loadu_si512(p)); }
#else
constexpr int kAlong = 2 * kLanes;
#if defined(__AVX512BW__)
inline words weights_at(const int8_t* p) {
    return words(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
inline words inputs_at(const uint8_t* p) {
    return words(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
#elif defined(__AVX2__)
inline words weights_at(const int8_t* p) {
    return words(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline words inputs_at(const uint8_t* p) {
    return words(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#else
typedef int16_t wider __attribute__((vector_size(4 * kLanes)));
inline words weights_at(const int8_t* p) {
    typedef int8_t part __attribute__((vector_size(kAlong), aligned(1), may_alias));
    return words(__builtin_convertvector(*reinterpret_cast<const part*>(p), wider));
}
inline words inputs_at(const uint8_t* p) {
    typedef uint8_t part __attribute__((vector_size(kAlong), aligned(1), may_alias));
    return words(__builtin_convertvector(*reinterpret_cast<const part*>(p), wider));
}
#endif
#endif

}  // namespace COFIRE_ISA
}  // namespace cofire
