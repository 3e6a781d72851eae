// Winograd F(2x2, 3x3) and F(4x4, 3x3): planes to tiles and back, eight tiles (a vector) at a time.
//
// A plane is first split by phase: element (i, j) of every tile lies in one row-major array over tiles, so that the
// transforms need no gathers. Tiles overlap by two; columns m and m + 1 of a tile are columns 0 and 1 of its right neighbour and
// get arrays of their own, rows m and m + 1 are read one tile row further down.
#include "leaves.h"
#include "vec.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

// One line of pixels, already padded, into its m + 2 phase arrays. Four tiles at a time; writes up to three too many, which the
// next line overwrites.
template <int M>
void split_line(const float* line, int across, float* phases, int64_t ldp) {
    for (int tile = 0; tile < across; tile += 4) {
        const float* from = line + tile * M;
        float* to = phases + tile;
        if constexpr (M == 4) {
            vec4 a = load4(from), b = load4(from + 4), c = load4(from + 8), d = load4(from + 12);
            transpose4(a, b, c, d);
            store4(to, a);
            store4(to + ldp, b);
            store4(to + 2 * ldp, c);
            store4(to + 3 * ldp, d);
            a = load4(from + 4), b = load4(from + 8), c = load4(from + 12), d = load4(from + 16);
            transpose4(a, b, c, d);
            store4(to + 4 * ldp, a);
            store4(to + 5 * ldp, b);
        } else {
            for (int half = 0; half < 2; ++half) {
                const vec4 a = load4(from + 2 * half), b = load4(from + 2 * half + 4);
                store4(to + (2 * half) * ldp, __builtin_shuffle(a, b, mask4{0, 2, 4, 6}));
                store4(to + (2 * half + 1) * ldp, __builtin_shuffle(a, b, mask4{1, 3, 5, 7}));
            }
        }
    }
}

// One-dimensional transforms, in place in d[0], d[step], ...
template <int M>
inline void forward(const vec* d, int step, vec* out, int out_step) {
    if constexpr (M == 4) {
        const vec d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step], d4 = d[4 * step], d5 = d[5 * step];
        const vec even = d4 - 4 * d2, odd = d3 - 4 * d1, near = d4 - d2, twice = 2 * (d3 - d1);
        out[0] = 4 * d0 - 5 * d2 + d4;
        out[out_step] = even + odd;
        out[2 * out_step] = even - odd;
        out[3 * out_step] = near + twice;
        out[4 * out_step] = near - twice;
        out[5 * out_step] = 4 * d1 - 5 * d3 + d5;
    } else {
        const vec d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step];
        out[0] = d0 - d2;
        out[out_step] = d1 + d2;
        out[2 * out_step] = d2 - d1;
        out[3 * out_step] = d1 - d3;
    }
}

template <int M>
inline void backward(const vec* d, int step, vec* out, int out_step) {
    if constexpr (M == 4) {
        const vec d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step], d4 = d[4 * step], d5 = d[5 * step];
        const vec plus1 = d1 + d2, minus1 = d1 - d2, plus2 = d3 + d4, minus2 = d3 - d4;
        out[0] = d0 + plus1 + plus2;
        out[out_step] = minus1 + 2 * minus2;
        out[2 * out_step] = plus1 + 4 * plus2;
        out[3 * out_step] = minus1 + 8 * minus2 + d5;
    } else {
        const vec d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step];
        out[0] = d0 + d1 + d2;
        out[out_step] = d1 - d2 - d3;
    }
}

template <int M>
void input_of(const float* plane, Shape shape, int top, int left, int across, int row, int rows, float* room, float* v,
              int64_t ldv) {
    constexpr int A = M + 2;
    const int64_t ldp = (rows + 1) * int64_t(across) + kSlack;  // phase array (i % M, j): at room + ((i % M) * A + j) * ldp
    float* line = room + M * A * ldp;
    const int length = M * across + 2, from = left < length ? left : length;
    const int copied = shape.w < length - from ? shape.w : length - from;
    for (int x = 0; x < length + kSlack; ++x) line[x] = 0;
    for (int down = 0; down <= rows; ++down)
        for (int i = 0; i < (down < rows ? M : 2); ++i) {
            const int y = (row + down) * M + i - top;
            float* phases = room + i * A * ldp + down * int64_t(across);
            if (y < 0 || y >= shape.h) {
                for (int j = 0; j < A; ++j)
                    for (int tile = 0; tile < across; ++tile) phases[j * ldp + tile] = 0;
                continue;
            }
            const float* pixels = plane + int64_t(y) * shape.w;
            for (int x = 0; x < copied; ++x) line[from + x] = pixels[x];
            split_line<M>(line, across, phases, ldp);
        }
    for (int tile = 0; tile < rows * across; tile += kLanes) {
        vec d[A], half[A * A];
        for (int j = 0; j < A; ++j) {
            for (int i = 0; i < A; ++i) d[i] = load(room + ((i % M) * A + j) * ldp + (i / M) * across + tile);
            forward<M>(d, 1, half + j, A);
        }
        for (int i = 0; i < A; ++i) {
            forward<M>(half + i * A, 1, d, 1);
            for (int j = 0; j < A; ++j) store(v + (i * A + j) * ldv + tile, d[j]);
        }
    }
}

// Line i of up to four tiles: `pixels` has a vector for each of its M columns, with the tiles in its lanes.
template <int M>
inline void store_line(const float* pixels, float* const* to, int count, int64_t offset) {
    if constexpr (M == 4) {
        vec4 a = load4(pixels), b = load4(pixels + kLanes), c = load4(pixels + 2 * kLanes), d = load4(pixels + 3 * kLanes);
        transpose4(a, b, c, d);
        store4(to[0] + offset, a);
        if (count > 1) store4(to[1] + offset, b);
        if (count > 2) store4(to[2] + offset, c);
        if (count > 3) store4(to[3] + offset, d);
    } else {
        for (int t = 0; t < 4 && t < count; ++t) {
            to[t][offset] = pixels[t];
            to[t][offset + 1] = pixels[kLanes + t];
        }
    }
}

template <int M>
void output_of(const float* u, int64_t ldu, int across, int rows, int width, float* y) {
    constexpr int A = M + 2;
    const int wide = M * across;  // pixels in a line, with those past the width
    int tile_x = 0, tile_y = 0;   // of the next tile to be stored
    for (int tile = 0; tile < rows * across; tile += kLanes) {
        vec d[A], half[M * A], pixels[M * M];
        for (int j = 0; j < A; ++j) {
            for (int i = 0; i < A; ++i) d[i] = load(u + (i * A + j) * ldu + tile);
            backward<M>(d, 1, half + j, A);
        }
        for (int i = 0; i < M; ++i) backward<M>(half + i * A, 1, pixels + i * M, 1);
        const int count = rows * across - tile < kLanes ? rows * across - tile : kLanes;
        float* to[kLanes];
        for (int t = 0; t < kLanes; ++t) {
            to[t] = y + int64_t(tile_y) * M * wide + tile_x * M;
            if (++tile_x == across) tile_x = 0, ++tile_y;
        }
        const float* lanes = reinterpret_cast<const float*>(pixels);
        for (int t = 0; t < count; t += 4)
            for (int i = 0; i < M; ++i) store_line<M>(lanes + i * M * kLanes + t, to + t, count - t, i * int64_t(wide));
    }
    if (wide == width) return;
    for (int line = 1; line < rows * M; ++line)  // close the gaps, front to back
        for (int x = 0; x < width; ++x) y[int64_t(line) * width + x] = y[int64_t(line) * wide + x];
}

}  // namespace

void wino_input(int m, const float* plane, Shape shape, int top, int left, int across, int row, int rows, float* room,
                float* v, int64_t ldv) {
    (m == 4 ? input_of<4> : input_of<2>)(plane, shape, top, left, across, row, rows, room, v, ldv);
}

void wino_output(int m, const float* u, int64_t ldu, int across, int rows, int width, float* y) {
    (m == 4 ? output_of<4> : output_of<2>)(u, ldu, across, rows, width, y);
}

}  // namespace COFIRE_ISA
}  // namespace cofire
