// Winograd F(4x4, 3x3) on bytes, exact: inputs and weights are transformed in whole numbers of 16 bits, two channels in
// a word, and everything after their products is right modulo 2^32. docs/int8.md says why that is enough.
#include "functions8.h"
#include "vec8.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

constexpr uint32_t kInverse9 = 0x38E38E39;  // 9 times it is 1 modulo 2^32
constexpr int kTilesAtOnce = kLanes / 4;    // that a vector of pixels has

typedef int16_t halves __attribute__((vector_size(4 * kLanes), may_alias));

inline halves halves_at(const uint32_t* p) { return halves(load(p)); }

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

// Elements of two vectors by turns: of their first halves, of their second.
inline words by_turns_low(words a, words b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX__)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}
inline words by_turns_high(words a, words b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX__)
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// B' of points 0, 1, -1, 2, -2 and infinity. Inputs of 9 bits become sums of at most 100 of them, which 16 bits hold.
inline void forward(const halves* d, halves* out) {
    const halves even = d[4] - (d[2] << 2), odd = d[3] - (d[1] << 2), near = d[4] - d[2], twice = (d[3] - d[1]) << 1;
    out[0] = (d[0] << 2) - (d[2] << 2) + near;
    out[1] = even + odd;
    out[2] = even - odd;
    out[3] = near + twice;
    out[4] = near - twice;
    out[5] = ((d[1] - d[3]) << 2) - d[3] + d[5];
}

// 24 * A' * (what the weights were not divided by), modulo 2^32.
inline void backward(const words* d, words* out, int step) {
    const words plus1 = (d[1] + d[2]) << 2, minus1 = (d[1] - d[2]) << 2, plus2 = d[3] + d[4], minus2 = d[3] - d[4];
    out[0] = (d[0] << 2) + (d[0] << 1) - plus1 + plus2;
    out[step] = (minus2 << 1) - minus1;
    out[2 * step] = (plus2 << 2) - plus1;
    out[3 * step] = (minus2 << 3) - minus1 + (d[5] << 4) + (d[5] << 3);
}

// 24 * G, each row divided by what backward() multiplies by: weights of 8 bits become sums of at most 49 of them.
inline void weigh(const halves* d, halves* out) {
    const halves near = d[0] + d[2], far = d[0] + (d[2] << 2), twice = d[1] << 1;
    out[0] = d[0];
    out[1] = near + d[1];
    out[2] = near - d[1];
    out[3] = far + twice;
    out[4] = far - twice;
    out[5] = d[2];
}

// 2 * kLanes bytes.
inline halves halves_of(const int8_t* p) {
#if defined(__AVX512BW__)
    return halves(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
    return halves(weights_at(p));
#endif
}

// The weights row[in[k]], k < n, and a zero.
inline void compact(const int8_t* row, const int* in, int n, const uint64_t* on, int inputs, int8_t* to) {
#if defined(__AVX512VBMI2__)
    for (int i = 0; i < inputs; i += 64, ++on) {
        _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(*on, _mm512_loadu_si512(row + i)));
        to += __builtin_popcountll(*on);
    }
    *to = 0;
#else
    for (int k = 0; k < n; ++k) to[k] = row[in[k]];
    to[n] = 0;
#endif
}

// Two planes as words of q - zero, with zeros around them, as far as these tile rows read.
void pad(const uint8_t* const* planes, const Tiles8& map, uint32_t* to, int64_t pitch) {
    const halves zero = halves(splat(uint32_t(map.zero) * 0x00010001u));
    const int length = 4 * map.across + 2, top = 4 * map.row - map.top;
    const int end = map.width + map.left < length ? map.width + map.left : length;  // of the columns inside
    for (int l = 0; l < 4 * map.rows + 2; ++l, to += pitch) {
        const bool inside = top + l >= 0 && top + l < map.height && map.left < end;
        for (int i = 0; i < (inside ? map.left : length); i += kLanes) store(to + i, words{});
        if (!inside) continue;
        const int64_t line = int64_t(top + l) * map.width;
        for (int i = map.left; i < end; i += kLanes) {
            const words both =
                widened(load(planes[0] + line + i - map.left)) | widened(load(planes[1] + line + i - map.left)) << 16;
            store(to + i, words(halves(both) - zero));
        }
        for (int i = end; i < length; i += kLanes) store(to + i, words{});
    }
}

template <int Rows, int Vectors>
inline void tile(const uint32_t* const* w, const uint32_t* v, int count, int64_t pitch, int32_t* out, int64_t ldo) {
    ints sum[Rows][Vectors] = {};
    const uint32_t* row[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) row[r] = w[r];
    for (int k = 0; k < count; ++k, v += pitch) {
        words pixels[Vectors];
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; ++i) pixels[i] = load(v + i * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const words weight = splat(row[r][k]);
#pragma GCC unroll 8
            for (int i = 0; i < Vectors; ++i) sum[r][i] = multiplied_pairs(sum[r][i], pixels[i], weight);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; ++i)
            store(reinterpret_cast<uint32_t*>(out) + r * ldo + i * kLanes, words(sum[r][i]));
}

// Tiles of nearly one width, of which all but the last few have most.
template <int Rows, int Vectors>
void rows_of(const uint32_t* const* w, const uint32_t* v, int count, int64_t pitch, int vectors, int32_t* out,
             int64_t ldo) {
    const int tiles = (vectors + Vectors - 1) / Vectors, fewer = tiles * Vectors - vectors;
    if constexpr (Vectors > 1) {
        if (fewer > tiles) return rows_of<Rows, Vectors - 1>(w, v, count, pitch, vectors, out, ldo);
        for (int t = 0; t < tiles - fewer; ++t, v += Vectors * kLanes, out += Vectors * kLanes)
            tile<Rows, Vectors>(w, v, count, pitch, out, ldo);
        for (int t = 0; t < fewer; ++t, v += (Vectors - 1) * kLanes, out += (Vectors - 1) * kLanes)
            tile<Rows, Vectors - 1>(w, v, count, pitch, out, ldo);
    } else {
        for (int t = 0; t < vectors; ++t, v += kLanes, out += kLanes) tile<Rows, 1>(w, v, count, pitch, out, ldo);
    }
}

// The sums of a tile whose words lie side by side, with zeros to the end of a vector.
template <int Rows>
void column_of(const uint32_t* const* w, const uint32_t* column, int count, int32_t* out, int64_t ldo) {
    ints sum[Rows] = {};
    for (int k = 0; k < count; k += kLanes) {
        const words pixels = load(column + k);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) sum[r] = multiplied_pairs(sum[r], pixels, load(w[r] + k));
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) out[r * ldo] = total(sum[r]);
}

template <int Rows>
void gemm_of(const uint32_t* const* w, int rows, const uint32_t* v, int count, int64_t pitch, int n,
             const uint32_t* column, int32_t* out, int64_t ldo) {
    if constexpr (Rows > 1)
        if (rows < Rows) return gemm_of<Rows - 1>(w, rows, v, count, pitch, n, column, out, ldo);
    const int vectors = column ? n / kLanes : (n + kLanes - 1) / kLanes;
    rows_of<Rows, (kTileRows * kTileVectors / Rows < 6 ? kTileRows * kTileVectors / Rows : 6)>(w, v, count, pitch,
                                                                                               vectors, out, ldo);
    if (column) column_of<Rows>(w, column, count, out + n - 1, ldo);
}

}  // namespace

void wino_input(const uint8_t* const* planes, const Tiles8& map, uint32_t* room, uint32_t* v, int64_t position) {
    const int64_t pitch = wino_pitch8(map.across);
    uint32_t* halfway = room + (4 * map.rows + 2) * pitch;
    pad(planes, map, room, pitch);
    for (int row = 0; row < map.rows; ++row)
        for (int x = 0; x < 4 * map.across + 2; x += kLanes) {
            halves d[6], out[6];
#pragma GCC unroll 6
            for (int i = 0; i < 6; ++i) d[i] = halves_at(room + (4 * row + i) * pitch + x);
            forward(d, out);
#pragma GCC unroll 6
            for (int i = 0; i < 6; ++i) store(halfway + (6 * row + i) * pitch + x, words(out[i]));
        }
    // A vector of tiles is four of words, which hold some whole tiles each. Where they fill the tile rows, a
    // vector goes on in the next row; else each row begins one, which runs over into the next that comes after it.
    const bool flat = map.across % kTilesAtOnce == 0;
    const int per_row = (map.across + kTilesAtOnce - 1) / kTilesAtOnce;
    const int parts = flat ? map.rows * per_row : per_row;
    for (int row = 0; row < (flat ? 1 : map.rows); ++row)
        for (int part = 0; part < parts; part += 4) {
            const uint32_t* from[4];
#pragma GCC unroll 4
            for (int m = 0; m < 4; ++m) {
                const int number = !flat || part + m < parts ? part + m : parts - 1;
                from[m] =
                    halfway + (flat ? number / per_row : row) * 6 * pitch + (flat ? number % per_row : number) * kLanes;
            }
            uint32_t* to = v + row * map.across + part * kTilesAtOnce;
            for (int i = 0; i < 6; ++i) {
                const auto at = [&](int m, int further) { return load(from[m] + i * pitch + further); };
                const words even0 = even(at(0, 0), at(1, 0)), even1 = even(at(2, 0), at(3, 0));
                const words odd0 = odd(at(0, 0), at(1, 0)), odd1 = odd(at(2, 0), at(3, 0));
                const words next0 = even(at(0, 4), at(1, 4)), next1 = even(at(2, 4), at(3, 4));
                const words last0 = odd(at(0, 4), at(1, 4)), last1 = odd(at(2, 4), at(3, 4));
                const halves d[6] = {halves(even(even0, even1)), halves(even(odd0, odd1)),
                                     halves(odd(even0, even1)),  halves(odd(odd0, odd1)),
                                     halves(even(next0, next1)), halves(even(last0, last1))};
                halves out[6];
                forward(d, out);
#pragma GCC unroll 6
                for (int j = 0; j < 6; ++j, to += position) store(to, words(out[j]));
            }
        }
}

void wino_gemm(const uint32_t* const* w, int rows, const uint32_t* v, int count, int64_t pitch, int n,
               const uint32_t* column, int32_t* out, int64_t ldo) {
    gemm_of<kTileRows>(w, rows, v, count, pitch, n, column, out, ldo);
}

void wino_output(const int32_t* products, int64_t position, int across, int rows, int width, int32_t* sums) {
    const int last = width - 4 * (across - 1);  // columns of a line's last tile
    int tile_x = 0;
    int32_t *to = sums, *line = sums;  // the corner of the next tile, and the line where its row begins
    const auto step = [&](int tiles) {
        tile_x += tiles, to += 4 * tiles;
        if (tile_x == across) tile_x = 0, to = line += 4 * int64_t(width);
    };
    for (int tile = 0; tile < rows * across; tile += kLanes) {
        words half[4][6];
#pragma GCC unroll 6
        for (int j = 0; j < 6; ++j) {
            words d[6];
#pragma GCC unroll 6
            for (int i = 0; i < 6; ++i) d[i] = words(load(products + (i * 6 + j) * position + tile));
            backward(d, &half[0][j], 6);
        }
        words pixels[4][4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            words line[4];
            backward(half[i], line, 1);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) line[j] = words(ints(line[j] * splat(kInverse9)) >> 6);
            const words low0 = by_turns_low(line[0], line[2]), high0 = by_turns_high(line[0], line[2]);
            const words low1 = by_turns_low(line[1], line[3]), high1 = by_turns_high(line[1], line[3]);
            pixels[i][0] = by_turns_low(low0, low1), pixels[i][1] = by_turns_high(low0, low1);
            pixels[i][2] = by_turns_low(high0, high1), pixels[i][3] = by_turns_high(high0, high1);
        }
        for (int v = 0; v < 4; ++v) {
            const int left = rows * across - tile - v * kTilesAtOnce;
            if (left <= 0) return;
            // What a line's last tile has too much goes where the next line begins, which comes after it.
            const bool whole = last == 4 || tile_x + kTilesAtOnce < across || across == kTilesAtOnce;
            if (whole && tile_x + kTilesAtOnce <= across && left >= kTilesAtOnce) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) store(reinterpret_cast<uint32_t*>(to) + int64_t(i) * width, pixels[i][v]);
                step(kTilesAtOnce);
                continue;
            }
            for (int t = 0; t < kTilesAtOnce && t < left; ++t, step(1))
                for (int i = 0; i < 4; ++i) {
                    const uint32_t* from = reinterpret_cast<const uint32_t*>(&pixels[i][v]) + 4 * t;
                    if (last == 4 || tile_x + 1 < across)
                        __builtin_memcpy(to + int64_t(i) * width, from, 16);
                    else
                        for (int j = 0; j < last; ++j) to[int64_t(i) * width + j] = int32_t(from[j]);
                }
        }
    }
}

void wino_weights(const int8_t* taps, int64_t row, const int* in, int n, const uint64_t* on, int inputs, int8_t* room,
                  uint32_t* to, int64_t position) {
    if (n < inputs) {
        const int64_t pitch = (n + 1 + 63) / 64 * 64;
        for (int tap = 0; tap < 9; ++tap) compact(taps + tap * row, in, n, on, inputs, room + tap * pitch);
        taps = room, row = pitch;
    }
    for (int k = 0; k < (n + 1) / 2; k += kLanes) {
        halves half[6][3];
#pragma GCC unroll 3
        for (int column = 0; column < 3; ++column) {
            halves d[3], out[6];
#pragma GCC unroll 3
            for (int line = 0; line < 3; ++line) d[line] = halves_of(taps + (3 * line + column) * row + 2 * k);
            weigh(d, out);
#pragma GCC unroll 6
            for (int i = 0; i < 6; ++i) half[i][column] = out[i];
        }
#pragma GCC unroll 6
        for (int i = 0; i < 6; ++i) {
            halves out[6];
            weigh(half[i], out);
#pragma GCC unroll 6
            for (int j = 0; j < 6; ++j) store(to + (6 * i + j) * position + k, words(out[j]));
        }
    }
}

}  // namespace COFIRE_ISA
}  // namespace cofire
