// Convs on bytes: filters times pixels in words of channels, and what becomes of the sums.
#include "ending8.h"
#include "functions8.h"
#include "vec8.h"

#define COFIRE_TEXT(x) #x
#define COFIRE_NAME(x) COFIRE_TEXT(x)

namespace cofire {
namespace COFIRE_ISA {

namespace {

// Rows x Vectors sums stay in registers over all words; weights are broadcast, pixels are vectors.
template <int Rows, int Vectors>
void tile(const uint32_t* const* w, const Walk8& walk, int begin, int n, const Ending8& ending, const Rounding& shared,
          Kept* kept, const Ahead8* ahead) {
    ints sum[Rows][Vectors];
    const uint32_t* row[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        row[r] = w[r];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) sum[r][v] = splat(ending.start[r]);
    }
    const uint32_t* x = nullptr;
    const auto walk_to = [&](int k, int stop) __attribute__((always_inline)) {
        for (; k < stop; ++k, x += walk.pitch) {
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
    };
    const int step = ahead ? walk.words / int((ahead->pitch + 63) / 64) + 1 : 0;
    for (int tap = 0, k = 0; tap < walk.taps; ++tap) {
        x = walk.x + walk.at[tap] + begin;
        const int end = k + walk.words;
        if (ahead)
            // A line of each row at a time: memory that is asked for many at once has none for what is needed now.
            for (int64_t line = ahead->pitch * tap; line < ahead->pitch * (tap + 1); line += 64) {
                for (int r = 0; r < Rows; ++r) __builtin_prefetch(ahead->rows[r] + line);
                const int stop = k + step < end ? k + step : end;
                walk_to(k, stop);
                k = stop;
            }
        walk_to(k, end);
        k = end;
    }
    const int left = n - begin;
    const Rounding rounding = shared;
    if (left >= Vectors * kLanes) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) finish_vectors<Vectors>(sum[r], begin, rounding, Filter(ending, r), kept[r]);
    } else {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const Filter filter(ending, r);
            if constexpr (Vectors > 1) finish_vectors<Vectors - 1>(sum[r], begin, rounding, filter, kept[r]);
            finish_some(sum[r][Vectors - 1], begin + (Vectors - 1) * kLanes, left - (Vectors - 1) * kLanes, rounding,
                        filter, kept[r]);
        }
    }
}

#if defined(__AVX512BW__)

// A single vector of pixels, its inputs in pairs.
template <int Rows>
void pairs_of(const uint32_t* const* w, const Walk8& walk, int n, const Ending8& ending, const Rounding& shared,
              Kept* kept, const Ahead8* ahead) {
    ints low[Rows] = {}, high[Rows] = {};
    const uint32_t* row[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) row[r] = w[r];
    const int step = ahead ? walk.words / int((ahead->pitch + 63) / 64) / 2 * 2 + 2 : walk.words;
    for (int tap = 0, k = 0; tap < walk.taps; ++tap) {
        const uint32_t* x = walk.x + 2 * walk.at[tap];
        int64_t line = ahead ? ahead->pitch * tap : 0;
        for (const int end = k + walk.words; k < end;) {
            const int stop = k + step < end ? k + step : end;
            if (ahead && line < ahead->pitch * (tap + 1))
                for (int r = 0; r < Rows; ++r) __builtin_prefetch(ahead->rows[r] + line);
            line += 64;
            for (; k < stop; k += 2, x += 2 * walk.pitch) {
                const words first = load(x), second = load(x + kLanes);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    const words weights = both(row[r] + k);
                    low[r] = multiplied(low[r], first, weights);
                    high[r] = multiplied(high[r], second, weights);
                }
            }
            k = stop;
        }
    }
    const Rounding rounding = shared;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
        finish_some(wrapped(neighbours(low[r], high[r]), splat(ending.start[r])), 0, n, rounding, Filter(ending, r),
                    kept[r]);
}

#endif

// How many vectors fit this many rows best.
constexpr int wide(int rows) {
    constexpr int sums = kTileRows * kTileVectors;
    return sums / rows < 8 ? sums / rows : 8;
}

// Tiles of nearly one width: one left over with a single vector would wait for its own sums.
template <int Rows, int Vectors>
void rows_of(const uint32_t* const* w, const Walk8& walk, int n, const Ending8& ending, const Rounding& rounding,
             Kept* kept, const Ahead8* ahead) {
    const int vectors = (n + kLanes - 1) / kLanes, tiles = (vectors + Vectors - 1) / Vectors;
    const int fewer = tiles * Vectors - vectors;  // tiles that do with a vector less
    int begin = 0;
    if constexpr (Vectors > 1) {
        if (fewer > tiles) return rows_of<Rows, Vectors - 1>(w, walk, n, ending, rounding, kept, ahead);
        for (int t = 0; t < tiles - fewer; ++t, begin += Vectors * kLanes)
            tile<Rows, Vectors>(w, walk, begin, n, ending, rounding, kept, t == 0 ? ahead : nullptr);
        for (int t = 0; t < fewer; ++t, begin += (Vectors - 1) * kLanes)
            tile<Rows, Vectors - 1>(w, walk, begin, n, ending, rounding, kept, begin == 0 ? ahead : nullptr);
    } else {
        for (; begin < n; begin += kLanes)
            tile<Rows, 1>(w, walk, begin, n, ending, rounding, kept, begin == 0 ? ahead : nullptr);
    }
}

// The pixels that lie in columns, from pixel `begin` on: dot products along the weights.
template <int Rows>
void columns_of(const uint32_t* const* w, const Walk8& walk, int begin, const Ending8& ending, const Rounding& rounding,
                Kept* kept) {
    ints found[Rows] = {};
    for (int i = 0; i < walk.column_count; ++i) {
        const uint32_t* column = walk.columns + i * walk.column_pitch;
        ints sum[Rows] = {};
        for (int k = 0; k < walk.taps * walk.words; k += kLanes) {
            const words pixels = load(column + k);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) sum[r] = multiplied(sum[r], pixels, load(w[r] + k));
        }
        for (int r = 0; r < Rows; ++r) found[r][i] = total(sum[r]);
    }
    for (int r = 0; r < Rows; ++r)
        finish_some(wrapped(found[r], splat(ending.start[r])), begin, walk.column_count, rounding, Filter(ending, r),
                    kept[r]);
}

template <int Rows>
void gemm_of(const uint32_t* const* w, int rows, const Walk8& walk, int n, const Ending8& ending, const Ahead8* ahead) {
    if constexpr (Rows > 1)
        if (rows < Rows) return gemm_of<Rows - 1>(w, rows, walk, n, ending, ahead);
    Kept kept[Rows];
    const Rounding rounding(ending);
#if defined(__AVX512BW__)
    if (walk.pairs)
        pairs_of<Rows>(w, walk, n, ending, rounding, kept, ahead);
    else
#endif
        if constexpr (Rows > kTileRows)
        tile<Rows, 1>(w, walk, 0, n, ending, rounding, kept, ahead);
    else
        rows_of<Rows, wide(Rows)>(w, walk, n - walk.column_count, ending, rounding, kept, ahead);
    if (walk.column_count > 0) columns_of<Rows>(w, walk, n - walk.column_count, ending, rounding, kept);
    for (int r = 0; r < Rows; ++r) kept[r].end(ending, r);
}

void gemm(const uint32_t* const* w, int rows, const Walk8& walk, int n, const Ending8& ending, const Ahead8* ahead) {
    gemm_of<kTallRows>(w, rows, walk, n, ending, ahead);
}

void finish(const int32_t* sums, int n, const Ending8& ending, int row) {
    const Rounding rounding(ending);
    const Filter filter(ending, row);
    const ints start = splat(sums ? ending.start[row] : 0);
    Kept kept;
    int i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        ints all[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) all[v] = sums ? wrapped(load(sums + i + v * kLanes), start) : start;
        finish_vectors<4>(all, i, rounding, filter, kept);
    }
    for (; i + kLanes <= n; i += kLanes) {
        const ints sum = sums ? wrapped(load(sums + i), start) : start;
        finish_vectors<1>(&sum, i, rounding, filter, kept);
    }
    if (i < n) {
        finish_some(sums ? wrapped(load(sums + i), start) : start, i, n - i, rounding, filter, kept);
    }
    kept.end(ending, row);
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

template <bool Sums>
inline int32_t gathered(const int8_t* row, const uint64_t* on, int inputs, uint32_t* to) {
    int8_t* next = reinterpret_cast<int8_t*>(to);
    ints sum = {};
    for (int i = 0; i < inputs; i += 64, ++on) {
        const __m512i live = _mm512_maskz_compress_epi8(*on, _mm512_loadu_si512(row + i));
        if constexpr (Sums) sum = multiplied(sum, splat(0x01010101u), words(live));
        _mm512_storeu_si512(next, live);
        next += __builtin_popcountll(*on);
    }
    __builtin_memset(next, 0, 4);
    return Sums ? total(sum) : 0;
}

int32_t gather(const int8_t* row, const int*, int, const uint64_t* on, int inputs, bool sums, uint32_t* to) {
    return (sums ? gathered<true> : gathered<false>)(row, on, inputs, to);
}

// The words of a vector's taps in one line of the kernel.
inline __m512i table_of(const uint8_t* plane, const Table8& table, const Strip8& strip, __m512i zero) {
    const __m512i found = _mm512_loadu_si512(plane + table.at + strip.at);
    return _mm512_mask_expand_epi8(zero, table.inside & strip.inside, found);
}

// Where each line of the plane serves the next two vectors too.
template <bool Rolls>
void depthwise3(const uint8_t* plane, const uint32_t* w, const Depthwise8Map& map, const Ending8& ending) {
    const Rounding rounding(ending);
    const Filter filter(ending, 0);
    const __m512i zero = _mm512_set1_epi8(char(map.zero_in)), order = _mm512_loadu_si512(map.order);
    const ints start = splat(ending.start[0]);
    const words top = splat(w[0]), middle = splat(w[1]), bottom = splat(w[2]);
    const int lines = map.lines, rows = map.rows, pitch = map.pitch;
    Kept kept;
    for (int s = 0; s < map.strip_count; ++s) {
        const Strip8 strip = map.strips[s];
        const Table8* table = map.tables;
        const auto taps = [&](int ky) {
            return words(_mm512_permutexvar_epi8(order, table_of(plane, table[ky], strip, zero)));
        };
        words one = taps(0), two = taps(1);
        for (int line = 0; line < lines; line += rows, table += 3) {
            if (!Rolls) one = taps(0), two = taps(1);
            const words three = taps(2);
            const ints sum = multiplied(multiplied(multiplied(start, one, top), two, middle), three, bottom);
            one = two, two = three;
            const int n = (lines - line < rows ? lines - line : rows) * strip.width, i = line * pitch + strip.first;
            if (n == kLanes)
                finish_vectors<1>(&sum, i, rounding, filter, kept);
            else
                finish_some(sum, i, n, rounding, filter, kept);
        }
    }
    kept.end(ending, 0);
}

void depthwise(const uint8_t* plane, const uint32_t* w, const Depthwise8Map& map, const Ending8& ending) {
    if (map.kernel_lines == 3 && map.words == 1)
        return (map.rolls ? depthwise3<true> : depthwise3<false>)(plane, w, map, ending);
    const Rounding rounding(ending);
    const Filter filter(ending, 0);
    const __m512i zero = _mm512_set1_epi8(char(map.zero_in));
    Kept kept;
    for (int s = 0; s < map.strip_count; ++s) {
        const Strip8 strip = map.strips[s];
        const Table8* table = map.tables;
        for (int line = 0; line < map.lines; line += map.rows) {
            ints sum = splat(ending.start[0]);
            const uint32_t* weight = w;
            for (int ky = 0; ky < map.kernel_lines; ++ky, ++table) {
                const __m512i bytes = table_of(plane, *table, strip, zero);
                for (int word = 0; word < map.words; ++word, ++weight) {
                    const __m512i order = _mm512_loadu_si512(map.order + 64 * word);
                    sum = multiplied(sum, words(_mm512_permutexvar_epi8(order, bytes)), splat(*weight));
                }
            }
            const int lines = map.lines - line < map.rows ? map.lines - line : map.rows;
            finish_some(sum, line * map.pitch + strip.first, lines * strip.width, rounding, filter, kept);
        }
    }
    kept.end(ending, 0);
}

#else

constexpr void (*depthwise)(const uint8_t*, const uint32_t*, const Depthwise8Map&, const Ending8&) = nullptr;

#if defined(__SSE4_1__)
template <bool Sums>
inline int32_t gathered(const int8_t* row, const uint64_t* on, int inputs, uint32_t* to) {
    int16_t* next = reinterpret_cast<int16_t*>(to);
    __m128i all = _mm_setzero_si128();
    for (int i = 0; i < inputs; i += 8) {
        const unsigned set = on[i / 64] >> i % 64 & 0xff;
        const __m128i live = _mm_cvtepi8_epi16(live_bytes(row + i, set));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(next), live);
        if constexpr (Sums) all = _mm_add_epi32(all, _mm_madd_epi16(live, _mm_set1_epi16(1)));
        next += __builtin_popcount(set);
    }
    *next = 0;
    all = _mm_hadd_epi32(all, all);
    return _mm_cvtsi128_si32(_mm_hadd_epi32(all, all));
}
#endif

int32_t gather(const int8_t* row, const int* in, int n, const uint64_t* on, int inputs, bool sums, uint32_t* to) {
    if (n == inputs && n % kAlong == 0) {
        ints all = {};
        for (int k = 0; k < n; k += kAlong) {
            const words weights = weights_at(row + k);
            store(to + k / 2, weights);
            all = multiplied(all, splat(0x00010001u), weights);
        }
        return total(all);
    }
#if defined(__SSE4_1__)
    return (sums ? gathered<true> : gathered<false>)(row, on, inputs, to);
#else
    int32_t sum = 0;
    for (int k = 0; k < n; k += 2) {
        const int first = row[in[k]], second = k + 1 < n ? row[in[k + 1]] : 0;
        sum += first + second;
        to[k / 2] = uint32_t(first & 0xffff) | uint32_t(second) << 16;
    }
    return sum;
#endif
}

#endif

}  // namespace

extern const Kernels8 kernels8;
const Kernels8 kernels8{COFIRE_NAME(COFIRE_ISA),
                        kLanes,
                        kChannels,
                        kTileRows,
                        kTileVectors,
                        kTallRows,
                        kPairRows,
                        interleave,
                        pair,
                        gather,
                        gemm,
                        dot,
                        dot_lacks,
                        filter_words,
                        filters,
                        filter_lines,
                        wino_input,
                        wino_weights,
                        wino_gemm,
                        wino_pairs,
                        wino_output,
                        wino_finish,
                        depthwise,
                        depthwise_lines,
                        finish,
                        quantize,
                        largest,
                        sum,
                        max_pool};

}  // namespace COFIRE_ISA
}  // namespace cofire
