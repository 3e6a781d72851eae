// Convs on bytes: filters times pixels in words of channels, and what becomes of the sums.
#include "vec8.h"

#define COFIRE_TEXT(x) #x
#define COFIRE_NAME(x) COFIRE_TEXT(x)

namespace cofire {
namespace COFIRE_ISA {

namespace {

// Numbers as small as bytes plus 1.5 * 2^23 are floats whose last bits are the nearest whole number, ties to even.
constexpr float kRound = 12582912.0f;
constexpr int32_t kRoundBits = 0x4B400000;

// The largest byte and the sum of all that a filter wrote.
struct Kept {
    ints best = {}, total = {};

    void add(ints y) {
        best = y > best ? y : best;
        total += y;
    }
    void end(const Ending8& ending, int r) const {
        if (ending.peak[r])
            for (int i = 0; i < kLanes; ++i)
                if (best[i] > *ending.peak[r]) *ending.peak[r] = uint8_t(best[i]);
        if (ending.sum[r])
            for (int i = 0; i < kLanes; ++i) *ending.sum[r] += total[i];
    }
};

inline floats scaled(ints sum, float multiplier) { return __builtin_convertvector(sum, floats) * splat(multiplier); }

inline ints rounded(floats real, const Ending8& ending) {
    const floats low = splat(float(ending.low - ending.zero_out)), high = splat(float(ending.high - ending.zero_out));
    real = real < low ? low : real;
    real = real > high ? high : real;
    return ints(real + splat(kRound)) + splat(int32_t(ending.zero_out - kRoundBits));
}

inline floats with_residual(floats real, bytes residual, const Ending8& ending) {
    return real + scaled(ints(widened(residual)) - splat(int32_t(ending.zero_residual)), ending.residual_multiplier);
}

// Pixels [i, i + Vectors * kLanes) of filter r.
template <int Vectors>
inline void finish_vectors(const ints* sum, int i, const Ending8& ending, int r, Kept* kept) {
    floats real[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) real[v] = scaled(sum[v], ending.multiplier[r]);
    if (const uint8_t* residual = ending.residual[r])
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) real[v] = with_residual(real[v], load(residual + i + v * kLanes), ending);
    if (float* y = ending.y_float[r]) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) store(y + i + v * kLanes, real[v]);
        return;
    }
    uint8_t* y = ending.y[r] + i;
    ints q[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) q[v] = rounded(real[v], ending);
    put<Vectors>(y, q);
    if (kept)
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) kept->add(q[v]);
}

// The same for pixels [i, i + n), n < kLanes: touches nothing past them.
void finish_some(ints sum, int i, int n, const Ending8& ending, int r, Kept* kept) {
    floats real = scaled(sum, ending.multiplier[r]);
    if (const uint8_t* residual = ending.residual[r]) {
        bytes some = {};
        for (int j = 0; j < n; ++j) some[j] = residual[i + j];
        real = with_residual(real, some, ending);
    }
    if (float* y = ending.y_float[r]) {
        for (int j = 0; j < n; ++j) y[i + j] = real[j];
        return;
    }
    ints q = rounded(real, ending);
    for (int j = 0; j < n; ++j) ending.y[r][i + j] = uint8_t(q[j]);
    for (int j = n; j < kLanes; ++j) q[j] = 0;
    if (kept) kept->add(q);
}

// Rows x Vectors sums stay in registers over all words; weights are broadcast, pixels are vectors.
template <int Rows, int Vectors>
void tile(const uint32_t* const* w, const Walk8& walk, int begin, int n, const Ending8& ending, Kept* kept) {
    ints sum[Rows][Vectors];
    const uint32_t* row[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        row[r] = w[r];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) sum[r][v] = splat(ending.start[r]);
    }
    for (int tap = 0, k = 0; tap < walk.taps; ++tap) {
        const uint32_t* x = walk.x + walk.at[tap] + begin;
        for (const int stop = k + walk.words; k < stop; ++k, x += walk.pitch) {
            words pixels[Vectors];
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v) pixels[v] = load(x + v * kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const words weight = splat(row[r][k]);
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; ++v) sum[r][v] = multiplied(sum[r][v], pixels[v], weight);
            }
        }
    }
    const int left = n - begin;
    if (left >= Vectors * kLanes) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) finish_vectors<Vectors>(sum[r], begin, ending, r, kept ? kept + r : nullptr);
    } else {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            if constexpr (Vectors > 1) finish_vectors<Vectors - 1>(sum[r], begin, ending, r, kept ? kept + r : nullptr);
            finish_some(sum[r][Vectors - 1], begin + (Vectors - 1) * kLanes, left - (Vectors - 1) * kLanes, ending, r,
                        kept ? kept + r : nullptr);
        }
    }
}

// How many vectors fit this many rows best.
constexpr int wide(int rows) {
    constexpr int sums = kTileRows * kTileVectors;
    return sums / rows < 8 ? sums / rows : 8;
}

// Tiles of nearly one width: one left over with a single vector would wait for its own sums.
template <int Rows, int Vectors>
void rows_of(const uint32_t* const* w, const Walk8& walk, int n, const Ending8& ending, Kept* kept) {
    const int vectors = (n + kLanes - 1) / kLanes, tiles = (vectors + Vectors - 1) / Vectors;
    const int fewer = tiles * Vectors - vectors;  // tiles that do with a vector less
    int begin = 0;
    if constexpr (Vectors > 1) {
        if (fewer > tiles) return rows_of<Rows, Vectors - 1>(w, walk, n, ending, kept);
        for (int t = 0; t < tiles - fewer; ++t, begin += Vectors * kLanes)
            tile<Rows, Vectors>(w, walk, begin, n, ending, kept);
        for (int t = 0; t < fewer; ++t, begin += (Vectors - 1) * kLanes)
            tile<Rows, Vectors - 1>(w, walk, begin, n, ending, kept);
    } else {
        for (; begin < n; begin += kLanes) tile<Rows, 1>(w, walk, begin, n, ending, kept);
    }
}

template <int Rows>
void gemm_of(const uint32_t* const* w, int rows, const Walk8& walk, int n, const Ending8& ending) {
    if constexpr (Rows > 1)
        if (rows < Rows) return gemm_of<Rows - 1>(w, rows, walk, n, ending);
    Kept kept[Rows];
    const bool keeps = ending.peak[0] || ending.sum[0];
    rows_of<Rows, wide(Rows)>(w, walk, n, ending, keeps ? kept : nullptr);
    for (int r = 0; r < Rows && keeps; ++r) kept[r].end(ending, r);
}

void gemm(const uint32_t* const* w, int rows, const Walk8& walk, int n, const Ending8& ending) {
    gemm_of<kTileRows>(w, rows, walk, n, ending);
}

void finish(const int32_t* sums, int n, const Ending8& ending, int row) {
    Kept kept;
    Kept* keeps = ending.peak[row] || ending.sum[row] ? &kept : nullptr;
    const ints start = splat(sums ? ending.start[row] : 0);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const ints sum = sums ? load(sums + i) + start : start;
        finish_vectors<1>(&sum, i, ending, row, keeps);
    }
    if (i < n) {
        ints sum = start;
        for (int j = 0; sums && j < n - i; ++j) sum[j] += sums[i + j];
        finish_some(sum, i, n - i, ending, row, keeps);
    }
    if (keeps) kept.end(ending, row);
}

template <class Take>
inline void interleave_by(const uint8_t* const* planes, int n, uint32_t* to, Take take) {
    for (int i = 0; i < n; i += kLanes) {
        words word = take(planes[0], i);
#pragma GCC unroll 4
        for (int c = 1; c < kChannels; ++c) word |= take(planes[c], i) << c * kBits;
        store(to + i, word);
    }
}

// A vector that starts before n may end behind it; the reader's rows have kSlack8 bytes of room for that.
void interleave(const uint8_t* const* planes, int step, int n, uint32_t* to) {
    if (step == 1) return interleave_by(planes, n, to, [](const uint8_t* x, int i) { return widened(load(x + i)); });
    if (step == 2)
        return interleave_by(planes, n, to, [](const uint8_t* x, int i) {
            const pairs both = *reinterpret_cast<const pairs_anywhere*>(x + 2 * i);
            return __builtin_convertvector(both & uint16_t(0xff), words);
        });
    for (int i = 0; i < n; ++i) {
        to[i] = 0;
        for (int c = 0; c < kChannels; ++c) to[i] |= uint32_t(planes[c][int64_t(i) * step]) << c * kBits;
    }
}

#if defined(__AVX512VNNI__)

int32_t gather(const int8_t* row, const int*, int, const uint64_t* on, int inputs, uint32_t* to) {
    int8_t* next = reinterpret_cast<int8_t*>(to);
    ints sum = {};
    for (int i = 0; i < inputs; i += 64, ++on) {
        const __m512i live = _mm512_maskz_compress_epi8(*on, _mm512_loadu_si512(row + i));
        sum = multiplied(sum, splat(0x01010101u), words(live));
        _mm512_storeu_si512(next, live);
        next += __builtin_popcountll(*on);
    }
    __builtin_memset(next, 0, 4);
    return _mm512_reduce_add_epi32(__m512i(sum));
}

void dot(const int8_t* const* w, int rows, int n, const uint8_t* x, int64_t ldx, int count, int32_t* sums) {
    for (int i = 0; i < count; ++i, x += ldx)
        for (int r = 0; r < rows; ++r) {
            ints sum = {};
            for (int k = 0; k < n; k += 64)
                sum = multiplied(sum, words(_mm512_loadu_si512(x + k)), words(_mm512_loadu_si512(w[r] + k)));
            sums[r * count + i] = _mm512_reduce_add_epi32(__m512i(sum));
        }
}

#else

int32_t gather(const int8_t* row, const int* in, int n, const uint64_t*, int, uint32_t* to) {
    int32_t sum = 0;
    for (int k = 0; k < n; k += 2) {
        const int first = row[in[k]], second = k + 1 < n ? row[in[k + 1]] : 0;
        sum += first + second;
        to[k / 2] = uint32_t(first & 0xffff) | uint32_t(second) << 16;
    }
    return sum;
}

void dot(const int8_t* const* w, int rows, int n, const uint8_t* x, int64_t ldx, int count, int32_t* sums) {
    typedef int8_t small __attribute__((vector_size(2 * kLanes), aligned(1), may_alias));
    typedef uint8_t small_unsigned __attribute__((vector_size(2 * kLanes), aligned(1), may_alias));
    typedef int16_t wider __attribute__((vector_size(4 * kLanes)));
    for (int i = 0; i < count; ++i, x += ldx)
        for (int r = 0; r < rows; ++r) {
            ints sum = {};
            for (int k = 0; k < n; k += 2 * kLanes) {
                const auto pixels = __builtin_convertvector(*reinterpret_cast<const small_unsigned*>(x + k), wider);
                const auto weights = __builtin_convertvector(*reinterpret_cast<const small*>(w[r] + k), wider);
                sum = multiplied(sum, words(pixels), words(weights));
            }
            int32_t all = 0;
            for (int lane = 0; lane < kLanes; ++lane) all += sum[lane];
            sums[r * count + i] = all;
        }
}

#endif

}  // namespace

extern const Leaf8 leaf8;
const Leaf8 leaf8{
    COFIRE_NAME(COFIRE_ISA), kLanes, kChannels, kTileRows, kTileVectors, interleave, gather, gemm, dot, finish};

}  // namespace COFIRE_ISA
}  // namespace cofire
