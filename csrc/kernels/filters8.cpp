// Filters in vectors and words of pixels broadcast: the weights of a block of filters are brought together once, and
// serve all pixels.
#include "functions8.h"
#include "vec8.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

// Pixels of a tile: with so many vectors of filters their sums fill the registers.
constexpr int kMostPixels = 12;
template <int Vectors>
constexpr int kPixels =
    kTileRows * kTileVectors / Vectors < kMostPixels ? kTileRows * kTileVectors / Vectors : kMostPixels;

// What the next call reads, fetched a few lines at every step, those of dead inputs too: memory gives one piece faster
// than one with gaps. It goes to the nearest cache, through which weights only stream here.
class Fetching8 {
   public:
    Fetching8(const Stretch8& next, int64_t steps) : next_(next), rate_(next.bytes / kFilters8 * kOne / steps + 1) {}

    void step() {
        due_ += rate_;
        for (const int64_t stop = due_ / kOne * kFilters8; done_ < stop && done_ < next_.bytes; done_ += kFilters8)
            __builtin_prefetch(next_.from + done_);
    }

   private:
    static constexpr int64_t kOne = 1 << 16;
    Stretch8 next_;
    int64_t rate_;  // lines of a step, times kOne
    int64_t due_ = 0, done_ = 0;
};

template <int Pixels, int Vectors>
void tile(const uint32_t* w, int64_t step, int n, const uint32_t* x, int64_t pitch, const Pixel8* pixels, int32_t* sums,
          Fetching8& ahead) {
    Fetching8 fetching = ahead;  // in registers
    ints sum[Pixels][Vectors];
    int64_t from[Pixels];
#pragma GCC unroll 12
    for (int i = 0; i < Pixels; ++i) {
        from[i] = pixels[i].from;
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sum[i][v] = load(sums + int64_t(pixels[i].to) * kFilters8 + v * kLanes);
    }
    for (int k = 0; k < n; ++k, w += step, x += pitch) {
        fetching.step();
        words weights[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) weights[v] = load(w + v * kLanes);
#pragma GCC unroll 12
        for (int i = 0; i < Pixels; ++i) {
            const words pixel = splat(x[from[i]]);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) sum[i][v] = multiplied(sum[i][v], pixel, weights[v]);
        }
    }
    ahead = fetching;
#pragma GCC unroll 12
    for (int i = 0; i < Pixels; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) store(sums + int64_t(pixels[i].to) * kFilters8 + v * kLanes, sum[i][v]);
}

template <int Pixels, int Vectors>
void tile_of(int count, const uint32_t* w, int64_t step, int n, const uint32_t* x, int64_t pitch, const Pixel8* pixels,
             int32_t* sums, Fetching8& ahead) {
    if constexpr (Pixels > 1)
        if (count < Pixels) return tile_of<Pixels - 1, Vectors>(count, w, step, n, x, pitch, pixels, sums, ahead);
    tile<Pixels, Vectors>(w, step, n, x, pitch, pixels, sums, ahead);
}

template <int Vectors>
void tiles_of(int vectors, const uint32_t* w, int64_t step, int n, const uint32_t* x, int64_t pitch,
              const Pixel8* pixels, int count, int32_t* sums, const Stretch8& next) {
    if constexpr (Vectors > 1)
        if (vectors < Vectors) return tiles_of<Vectors - 1>(vectors, w, step, n, x, pitch, pixels, count, sums, next);
    const int tiles = (count + kPixels<Vectors> - 1) / kPixels<Vectors>;
    Fetching8 ahead(next, int64_t(tiles) * n);
    for (int t = 0, size; t < tiles; ++t, pixels += size, count -= size) {
        size = (count + tiles - t - 1) / (tiles - t);
        tile_of<kPixels<Vectors>, Vectors>(size, w, step, n, x, pitch, pixels, sums, ahead);
    }
}

}  // namespace

void filters(const uint32_t* w, int vectors, int n, const uint32_t* x, int64_t pitch, const Pixel8* pixels, int count,
             int32_t* sums, const Stretch8& next) {
    const int64_t step = vectors * kLanes;
    for (int v = 0; v < vectors; v += kTileVectors)
        tiles_of<kTileVectors>(vectors - v < kTileVectors ? vectors - v : kTileVectors, w + v * kLanes, step, n, x,
                               pitch, pixels, count, sums + v * kLanes, v == 0 ? next : Stretch8{});
}

void filter_lines(const int32_t* sums, int filters, int n, int64_t pitch, int32_t* lines) {
#if defined(__AVX512F__)
    for (int v = 0; v < filters; v += kLanes)
        for (int i = 0; i < n; i += 4) {
            const int32_t* from = sums + int64_t(i) * kFilters8 + v;
            const __m512i a = __m512i(load(from)), b = __m512i(load(from + kFilters8));
            const __m512i c = __m512i(load(from + 2 * kFilters8)), d = __m512i(load(from + 3 * kFilters8));
            const __m512i ab = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
            const __m512i cd = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
            const __m512i rows[4] = {_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd),
                                     _mm512_unpacklo_epi64(ab_high, cd_high), _mm512_unpackhi_epi64(ab_high, cd_high)};
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
                int32_t* to = lines + (v + r) * pitch + i;
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(rows[r]));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4 * pitch), _mm512_extracti32x4_epi32(rows[r], 1));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8 * pitch), _mm512_extracti32x4_epi32(rows[r], 2));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 12 * pitch), _mm512_extracti32x4_epi32(rows[r], 3));
            }
        }
#else
    for (int f = 0; f < filters; ++f)
        for (int i = 0; i < n; ++i) lines[f * pitch + i] = sums[int64_t(i) * kFilters8 + f];
#endif
}

#if defined(__AVX512VNNI__)

namespace {

template <int Vectors>
void gathered(const int8_t* lines, const int* in, int n, __m512i places, uint32_t* to) {
    const __m512i none = _mm512_setzero_si512();
    const auto line = [&](int k) {
        return k < n ? _mm512_permutexvar_epi8(places, _mm512_loadu_si512(lines + int64_t(in[k]) * kFilters8)) : none;
    };
    const auto four = [&](__m512i a, __m512i b, __m512i c, __m512i d) __attribute__((always_inline)) {
        const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(ab, cd));
        if constexpr (Vectors > 1) _mm512_storeu_si512(to + kLanes, _mm512_unpackhi_epi16(ab, cd));
        if constexpr (Vectors > 2) {
            const __m512i ab_high = _mm512_unpackhi_epi8(a, b), cd_high = _mm512_unpackhi_epi8(c, d);
            _mm512_storeu_si512(to + 2 * kLanes, _mm512_unpacklo_epi16(ab_high, cd_high));
            if constexpr (Vectors > 3) _mm512_storeu_si512(to + 3 * kLanes, _mm512_unpackhi_epi16(ab_high, cd_high));
        }
        to += Vectors * kLanes;
    };
    int k = 0;
    for (; k + 4 <= n; k += 4) four(line(k), line(k + 1), line(k + 2), line(k + 3));
    if (k < n) four(line(k), line(k + 1), line(k + 2), none);
}

}  // namespace

// Unpacking works within quarters of a vector: byte 16 q + 4 v + j of a line ends in word 4 q + j of vector v.
void filter_words(const int8_t* lines, const int* in, int n, const uint8_t* places, int vectors, uint32_t* to) {
    alignas(64) static constexpr struct Order {
        uint8_t at[64];
        constexpr Order() : at() {
            for (int i = 0; i < 64; ++i) at[i] = uint8_t(16 * (i % 16 / 4) + 4 * (i / 16) + i % 4);
        }
    } order;
    const __m512i all = _mm512_permutexvar_epi8(_mm512_load_si512(order.at), _mm512_loadu_si512(places));
    (vectors == 1   ? gathered<1>
     : vectors == 2 ? gathered<2>
     : vectors == 3 ? gathered<3>
                    : gathered<4>)(lines, in, n, all, to);
}

#else

void filter_words(const int8_t* lines, const int* in, int n, const uint8_t* places, int vectors, uint32_t* to) {
    for (int k = 0; k < n; k += kChannels)
        for (int f = 0; f < vectors * kLanes; ++f) {
            uint32_t word = 0;
            for (int c = 0; c < kChannels && k + c < n; ++c) {
                const int weight = lines[int64_t(in[k + c]) * kFilters8 + places[f]];
                word |= (uint32_t(weight) & ((1u << kBits) - 1)) << c * kBits;
            }
            *to++ = word;
        }
}

#endif

}  // namespace COFIRE_ISA
}  // namespace cofire
