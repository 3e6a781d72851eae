// Winograd F(4x4, 3x3) on bytes, exact: inputs and weights are transformed in whole numbers of 16 bits, two channels in
// a word, and everything after their products is right modulo 2^32. docs/int8.md says why that is enough.
#include "ending8.h"
#include "functions8.h"
#include "vec8.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

constexpr uint32_t kInverse9 = 0x38E38E39;  // 9 times it is 1 modulo 2^32
constexpr int kTilesAtOnce = kLanes / 4;    // that a vector of pixels has

typedef int16_t halves __attribute__((vector_size(4 * kLanes), may_alias));

inline halves halves_at(const uint32_t* p) { return halves(load(p)); }

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

// 24 * A' * (what the weights were not divided by), modulo 2^32, but for powers of two, row by row: see kHalved.
inline void backward(const words* d, words* out, int step) {
    const words plus1 = d[1] + d[2], minus1 = d[1] - d[2], plus2 = d[3] + d[4], minus2 = d[3] - d[4];
    const words near = d[0] - plus1, far = minus2 + d[5] + (d[5] + d[5]);
    const words once = near + near + d[0];
    out[0] = once + once + plus2;
    out[step] = minus2 - (minus1 + minus1);
    out[2 * step] = plus2 - plus1;
    out[3 * step] = far + far - minus1;
}

// How often each row that backward() makes is still to be doubled.
constexpr int kHalved[4] = {0, 1, 2, 2};

// A pixel's sum, of 576 times as much but for those powers of two.
inline ints divided(words x, int row, int column) {
    return ints(x * splat(kInverse9)) >> (6 - kHalved[row] - kHalved[column]);
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
#elif defined(__SSSE3__)
    for (int i = 0; i < inputs; i += 8) {
        const unsigned set = on[i / 64] >> i % 64 & 0xff;
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), live_bytes(row + i, set));
        to += __builtin_popcount(set);
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

// Filter r of a tile, without a pointer for each: there are fewer registers than filters.
inline const uint32_t* filter_of(const uint32_t* const* fourth, int64_t ldw, int r) {
    return fourth[r / 4] + r % 4 * ldw;
}

// Elements [first, first + count) of a vector, and no others.
inline void put_columns(words x, int first, int count, int32_t* to) {
#if defined(__AVX512F__)
    if (count == kLanes) return store(reinterpret_cast<uint32_t*>(to), x);
    _mm512_mask_storeu_epi32(to - first, __mmask16(((1u << count) - 1) << first), __m512i(x));
#else
    if (count == kLanes) return store(reinterpret_cast<uint32_t*>(to), x);
    const int32_t* from = reinterpret_cast<const int32_t*>(&x) + first;
    for (int i = 0; i < count; ++i) to[i] = from[i];
#endif
}

template <int Rows, int Vectors>
inline void tile(const uint32_t* w, int64_t ldw, const uint32_t* v, int count, int64_t pitch, int32_t* out,
                 int64_t ldo) {
    ints sum[Rows][Vectors] = {};
    const uint32_t* fourth[(Rows + 3) / 4];
#pragma GCC unroll 3
    for (int r = 0; r < Rows; r += 4) fourth[r / 4] = w + r * ldw;
    for (int k = 0; k < count; ++k, v += pitch) {
        words pixels[Vectors];
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; ++i) pixels[i] = load(v + i * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const words weight = splat(filter_of(fourth, ldw, r)[k]);
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
void rows_of(const uint32_t* w, int64_t ldw, const uint32_t* v, int count, int64_t pitch, int vectors, int32_t* out,
             int64_t ldo) {
    const int tiles = (vectors + Vectors - 1) / Vectors, fewer = tiles * Vectors - vectors;
    if constexpr (Vectors > 1) {
        if (fewer > tiles) return rows_of<Rows, Vectors - 1>(w, ldw, v, count, pitch, vectors, out, ldo);
        for (int t = 0; t < tiles - fewer; ++t, v += Vectors * kLanes, out += Vectors * kLanes)
            tile<Rows, Vectors>(w, ldw, v, count, pitch, out, ldo);
        for (int t = 0; t < fewer; ++t, v += (Vectors - 1) * kLanes, out += (Vectors - 1) * kLanes)
            tile<Rows, Vectors - 1>(w, ldw, v, count, pitch, out, ldo);
    } else {
        for (int t = 0; t < vectors; ++t, v += kLanes, out += kLanes) tile<Rows, 1>(w, ldw, v, count, pitch, out, ldo);
    }
}

// The sums of a tile whose words lie side by side, with zeros to the end of a vector.
template <int Rows>
void column_of(const uint32_t* w, int64_t ldw, const uint32_t* column, int count, int32_t* out, int64_t ldo) {
    ints sum[Rows] = {};
    for (int k = 0; k < count; k += kLanes) {
        const words pixels = load(column + k);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) sum[r] = multiplied_pairs(sum[r], pixels, load(w + r * ldw + k));
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) out[r * ldo] = total(sum[r]);
}

template <int Rows>
void gemm_of(const uint32_t* w, int64_t ldw, int rows, const uint32_t* v, int count, int64_t pitch, int n,
             const uint32_t* column, int32_t* out, int64_t ldo) {
    if constexpr (Rows > 1)
        if (rows < Rows) return gemm_of<Rows - 1>(w, ldw, rows, v, count, pitch, n, column, out, ldo);
    const int vectors = column ? n / kLanes : (n + kLanes - 1) / kLanes;
    rows_of<Rows, (kTileRows * kTileVectors / Rows < 6 ? kTileRows * kTileVectors / Rows : 6)>(w, ldw, v, count, pitch,
                                                                                               vectors, out, ldo);
    if (column) column_of<Rows>(w, ldw, column, count, out + n - 1, ldo);
}

#if defined(__AVX512BW__)

template <int Rows>
void pairs_of(const uint32_t* w, int64_t ldw, int rows, const uint32_t* v, int count, int64_t pitch, int32_t* out,
              int64_t ldo) {
    if constexpr (Rows > 1)
        if (rows < Rows) return pairs_of<Rows - 1>(w, ldw, rows, v, count, pitch, out, ldo);
    ints low[Rows] = {}, high[Rows] = {};
    const uint32_t* fourth[(Rows + 3) / 4];
#pragma GCC unroll 3
    for (int r = 0; r < Rows; r += 4) fourth[r / 4] = w + r * ldw;
    for (int k = 0; k < count; k += 2, v += 2 * pitch) {
        const words first = load(v), second = load(v + kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            const words weights = both(filter_of(fourth, ldw, r) + k);
            low[r] = multiplied_pairs(low[r], first, weights);
            high[r] = multiplied_pairs(high[r], second, weights);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
        store(reinterpret_cast<uint32_t*>(out) + r * ldo, words(neighbours(low[r], high[r])));
}

#endif

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

void wino_gemm(const uint32_t* w, int64_t ldw, int rows, const uint32_t* v, int count, int64_t pitch, int n,
               const uint32_t* column, int32_t* out, int64_t ldo) {
    gemm_of<kTileRows>(w, ldw, rows, v, count, pitch, n, column, out, ldo);
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
            for (int j = 0; j < 4; ++j) line[j] = words(divided(line[j], i, j));
            const words low0 = by_turns_low(line[0], line[2]), high0 = by_turns_high(line[0], line[2]);
            const words low1 = by_turns_low(line[1], line[3]), high1 = by_turns_high(line[1], line[3]);
            pixels[i][0] = by_turns_low(low0, low1), pixels[i][1] = by_turns_high(low0, low1);
            pixels[i][2] = by_turns_low(high0, high1), pixels[i][3] = by_turns_high(high0, high1);
        }
        for (int v = 0; v < 4; ++v) {
            const int left = rows * across - tile - v * kTilesAtOnce;
            if (left <= 0) return;
            const int count = left < kTilesAtOnce ? left : kTilesAtOnce;
            for (int done = 0; done < count;) {  // goes on where the next tile row begins
                const int most = across - tile_x, tiles = count - done < most ? count - done : most;
                const int columns = 4 * tiles - (tiles == most ? 4 - last : 0);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) put_columns(pixels[i][v], 4 * done, columns, to + int64_t(i) * width);
                done += tiles;
                step(tiles);
            }
        }
    }
}

#if defined(__AVX512BW__)

void pair(const uint32_t* a, const uint32_t* b, int n, uint32_t* to) {
    for (int i = 0; i < n; i += kLanes, to += 2 * kLanes) {
        const words first = load(a + i), second = load(b + i);
        store(to, by_turns_low(first, second));
        store(to + kLanes, by_turns_high(first, second));
    }
}

void wino_pairs(const uint32_t* w, int64_t ldw, int rows, const uint32_t* v, int count, int64_t pitch, int32_t* out,
                int64_t ldo) {
    pairs_of<kPairRows>(w, ldw, rows, v, count, pitch, out, ldo);
}

namespace {

// Rows 0 and 2 of what backward() makes, or 1 and 3: half of the inputs at a time stays in registers.
template <bool Odd>
inline void backward_half(const int32_t* products, int64_t step, words* one, words* other) {
    const auto at = [&](int i) { return words(load(products + i * step)); };
    if constexpr (Odd) {
        const words minus1 = at(1) - at(2), minus2 = at(3) - at(4), last = at(5), far = minus2 + last + (last + last);
        *one = minus2 - (minus1 + minus1);
        *other = far + far - minus1;
    } else {
        const words plus1 = at(1) + at(2), plus2 = at(3) + at(4), first = at(0), near = first - plus1;
        const words once = near + near + first;
        *one = once + once + plus2;
        *other = plus2 - plus1;
    }
}

class Finisher {
   public:
    Finisher(const Finish8Map& map, const Ending8& ending)
        : map_(map), rounding_(ending), filter_(ending, 0), start_(splat(ending.start[0])) {}

    template <bool Odd>
    void two_lines(const int32_t* products, int64_t position, const TileVector8& tiles) {
        words one[6], other[6];
#pragma GCC unroll 6
        for (int j = 0; j < 6; ++j) backward_half<Odd>(products + j * position, 6 * position, &one[j], &other[j]);
        line<Odd ? 1 : 0>(one, tiles);
        line<Odd ? 3 : 2>(other, tiles);
    }

    void end(const Ending8& ending) const { kept_.end(ending, 0); }

   private:
    template <int Line>
    void line(const words* half, const TileVector8& tiles) {
        words columns[4];
        backward(half, columns, 1);
        const words residual = filter_.residual ? residuals<Line>(tiles) : words{};
        const words bytes = pixels<Line, 0>(columns[0], residual, tiles) |
                            pixels<Line, 1>(columns[1], residual, tiles) |
                            pixels<Line, 2>(columns[2], residual, tiles) | pixels<Line, 3>(columns[3], residual, tiles);
        for (int p = tiles.piece; p < tiles.piece + tiles.pieces; ++p) {
            const Piece8& piece = map_.pieces[p];
            if (!piece.bottom || Line < map_.lines)
                _mm512_mask_storeu_epi8(filter_.y + piece.at + Line * int64_t(map_.width), piece.bytes, __m512i(bytes));
        }
    }

    template <int Line>
    words residuals(const TileVector8& tiles) const {
        __m512i found = _mm512_setzero_si512();
        for (int p = tiles.piece; p < tiles.piece + tiles.pieces; ++p) {
            const Piece8& piece = map_.pieces[p];
            const uint8_t* from = filter_.residual + piece.at + Line * int64_t(map_.width);
            if (!piece.bottom || Line < map_.lines) found = _mm512_mask_loadu_epi8(found, piece.bytes, from);
        }
        return words(found);
    }

    // Those of one column of each tile, in their place among the bytes of a line.
    template <int Line, int Column>
    words pixels(words x, words residual, const TileVector8& tiles) {
        floats real = __builtin_convertvector(wrapped(divided(x, Line, Column), start_), floats) * filter_.multiplier;
        if (filter_.residual) real += rounding_.residual(residual >> 8 * Column & 255u);
        const ints q = rounding_.rounded(real);
        uint32_t counts = tiles.inside;
        if (Line >= map_.lines) counts &= ~tiles.bottom;
        if (Column >= map_.columns) counts &= ~tiles.right;
        const __mmask16 mask = __mmask16(counts);
        if (filter_.peaks)
            kept_.best = ints(_mm512_mask_max_epi32(__m512i(kept_.best), mask, __m512i(kept_.best), __m512i(q)));
        if (filter_.sums)
            kept_.total = ints(_mm512_mask_add_epi32(__m512i(kept_.total), mask, __m512i(kept_.total), __m512i(q)));
        return words(q) << 8 * Column;
    }

    const Finish8Map& map_;
    const Rounding rounding_;
    const Filter filter_;
    const ints start_;
    Kept kept_;
};

}  // namespace

void wino_finish(const int32_t* products, int64_t position, const Finish8Map& map, const Ending8& ending) {
    Finisher finisher(map, ending);
    for (int v = 0; v < map.count; ++v, products += kLanes) {
        finisher.two_lines<false>(products, position, map.vectors[v]);
        finisher.two_lines<true>(products, position, map.vectors[v]);
    }
    finisher.end(ending);
}

#endif

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
