// Winograd: planes to tiles and back, a vector of tiles at a time.
//
// A plane is first split by phase: element (i, j) of every tile lies in one row-major array over tiles, so that the
// transforms need no gathers. Tiles overlap by r - 1: the last columns of a tile are the first of its right neighbour
// and get arrays of their own, the last rows are read one tile row further down.
#include "leaves.h"
#include "vec.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

// One line of pixels, already padded, into its phase arrays, four tiles at a time. Columns from M on are stored as the
// neighbour's first, one place to the left. Writes one too many in front and up to three behind, the latter for the
// next line to overwrite, the former for the caller to mend.
template <int M, int R>
void split_line(const float* line, int across, float* phases, int64_t ldp) {
    for (int tile = 0; tile < across; tile += 4) {
        const float* from = line + tile * M;
        vec4 column[4] = {load4(from), load4(from + 4)};
        if constexpr (M == 4) {
            column[2] = load4(from + 8), column[3] = load4(from + 12);
            transpose4(column[0], column[1], column[2], column[3]);
        } else {
            const vec4 even = __builtin_shuffle(column[0], column[1], mask4{0, 2, 4, 6});
            column[1] = __builtin_shuffle(column[0], column[1], mask4{1, 3, 5, 7});
            column[0] = even;
        }
        for (int j = 0; j < M; ++j) store4(phases + j * ldp + tile, column[j]);
        for (int j = 0; j < R - 1; ++j) store4(phases + (M + j) * ldp + tile - 1, column[j]);
    }
}

// The matrices of F(M, R), from the points 0, 1, -1, 2, -2, 1/2 and infinity: inputs are multiplied by B', products by
// A'.
template <int M, int R>
struct Matrices {
    static constexpr int A = M + R - 1;
    float b[A][A] = {}, a[M][A] = {};

    constexpr Matrices() {
        constexpr float points[] = {0, 1, -1, 2, -2, 0.5f};
        for (int i = 0; i < A; ++i) {
            // the polynomial whose roots are all points but the i-th; infinity, the last, is no root
            b[i][0] = 1;
            int degree = 0;
            for (int p = 0; p < A - 1; ++p) {
                if (p == i) continue;
                ++degree;
                for (int k = degree; k >= 0; --k) b[i][k] = (k > 0 ? b[i][k - 1] : 0) - points[p] * b[i][k];
            }
        }
        for (int i = 0; i < A - 1; ++i) {
            float power = 1;
            for (int j = 0; j < M; ++j) a[j][i] = power, power *= points[i];
        }
        a[M - 1][A - 1] = 1;
    }
};

// out = matrix * d, with the zeros of the matrix left out by the compiler
template <int Rows, int Columns>
inline __attribute__((always_inline)) void multiply(const float (&matrix)[Rows][Columns], const vec* d, vec* out,
                                                    int step) {
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
        vec sum = {};
#pragma GCC unroll 8
        for (int k = 0; k < Columns; ++k)
            if (matrix[i][k] != 0) sum += matrix[i][k] * d[k];
        out[i * step] = sum;
    }
}

template <int M, int R>
inline __attribute__((always_inline)) void forward(const vec* d, vec* out, int step) {
    if constexpr (M == 4 && R == 3) {  // shares terms that the general way computes twice
        const vec even = d[4] - 4 * d[2], odd = d[3] - 4 * d[1], near = d[4] - d[2], twice = 2 * (d[3] - d[1]);
        out[0] = 4 * d[0] - 5 * d[2] + d[4];
        out[step] = even + odd;
        out[2 * step] = even - odd;
        out[3 * step] = near + twice;
        out[4 * step] = near - twice;
        out[5 * step] = 4 * d[1] - 5 * d[3] + d[5];
    } else {
        constexpr Matrices<M, R> matrices;
        multiply(matrices.b, d, out, step);
    }
}

template <int M, int R>
inline __attribute__((always_inline)) void backward(const vec* d, vec* out, int step) {
    if constexpr (M == 4 && R == 3) {
        const vec plus1 = d[1] + d[2], minus1 = d[1] - d[2], plus2 = d[3] + d[4], minus2 = d[3] - d[4];
        out[0] = d[0] + plus1 + plus2;
        out[step] = minus1 + 2 * minus2;
        out[2 * step] = plus1 + 4 * plus2;
        out[3 * step] = minus1 + 8 * minus2 + d[5];
    } else {
        constexpr Matrices<M, R> matrices;
        multiply(matrices.a, d, out, step);
    }
}

// Pixel (row, column) of the window.
inline float pixel(const float* plane, Shape shape, const Window& window, int row, int column) {
    const int y = window.y + row * window.stride, x = window.x + column * window.stride;
    return y >= 0 && y < shape.h && x >= 0 && x < shape.w ? plane[int64_t(y) * shape.w + x] : 0;
}

// The first `length` pixels of a row of the window.
inline void read_line(const float* plane, Shape shape, const Window& window, int row, int length, float* line) {
    const int y = window.y + row * window.stride, step = window.stride;
    int begin = window.x < 0 ? (-window.x + step - 1) / step : 0;  // pixels [begin, end) lie inside
    int end = shape.w > window.x ? (shape.w - window.x + step - 1) / step : 0;
    if (begin > length || y < 0 || y >= shape.h) begin = length;
    if (end > length) end = length;
    if (end < begin) end = begin;
    const float* pixels = plane + int64_t(y) * shape.w + window.x;
    for (int x = 0; x < begin; ++x) line[x] = 0;
    if (step == 1)
        for (int x = begin; x < end; ++x) line[x] = pixels[x];
    else
        for (int x = begin; x < end; ++x) line[x] = pixels[x * step];
    for (int x = end; x < length; ++x) line[x] = 0;
}

template <int M, int R>
void input_of(const float* plane, Shape shape, const Window& window, int across, int row, int rows, float* room,
              float* v, int64_t ldv) {
    constexpr int A = M + R - 1;
    const int64_t ldp =
        (rows + 1) * int64_t(across) + kSlack;  // phase array (i % M, j): at room + ((i % M) * A + j) * ldp
    room += kLanes;                             // split_line writes one place in front
    float* line = room + M * A * ldp;
    const auto phases = [&](int down, int i) { return room + i * A * ldp + down * int64_t(across); };
    for (int down = 0; down <= rows; ++down)
        for (int i = 0; i < (down < rows ? M : R - 1); ++i) {
            read_line(plane, shape, window, (row + down) * M + i, M * across, line);
            split_line<M, R>(line, across, phases(down, i), ldp);
        }
    // Columns from M on of each line's last tile: there is no neighbour to give them.
    for (int down = 0; down <= rows; ++down)
        for (int i = 0; i < (down < rows ? M : R - 1); ++i)
            for (int j = 0; j < R - 1; ++j)
                phases(down, i)[(M + j) * ldp + across - 1] =
                    pixel(plane, shape, window, (row + down) * M + i, M * across + j);
    for (int tile = 0; tile < rows * across; tile += kLanes) {
        vec d[A], half[A * A];
        for (int j = 0; j < A; ++j) {
            for (int i = 0; i < A; ++i) d[i] = load(room + ((i % M) * A + j) * ldp + (i / M) * across + tile);
            forward<M, R>(d, half + j, A);
        }
        for (int i = 0; i < A; ++i) {
            forward<M, R>(half + i * A, d, 1);
            for (int j = 0; j < A; ++j) store(v + (i * A + j) * ldv + tile, d[j]);
        }
    }
}

// Line i of up to four tiles: `pixels` has a vector for each of its M columns, with the tiles in its lanes.
template <int M>
inline void store_line(const float* pixels, float* const* to, int count, int64_t offset) {
    if constexpr (M == 4) {
        vec4 a = load4(pixels), b = load4(pixels + kLanes), c = load4(pixels + 2 * kLanes),
             d = load4(pixels + 3 * kLanes);
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

template <int M, int R>
void output_of(const float* u, int64_t ldu, int across, int rows, int width, float* y) {
    constexpr int A = M + R - 1;
    const int wide = M * across;  // pixels in a line, with those past the width
    int tile_x = 0, tile_y = 0;   // of the next tile to be stored
    for (int tile = 0; tile < rows * across; tile += kLanes) {
        vec d[A], half[M * A], pixels[M * M];
        for (int j = 0; j < A; ++j) {
            for (int i = 0; i < A; ++i) d[i] = load(u + (i * A + j) * ldu + tile);
            backward<M, R>(d, half + j, A);
        }
        for (int i = 0; i < M; ++i) backward<M, R>(half + i * A, pixels + i * M, 1);
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

void wino_input(Toom toom, const float* plane, Shape shape, const Window& window, int across, int row, int rows,
                float* room, float* v, int64_t ldv) {
    const auto run = toom.m == 2 ? (toom.r == 2 ? input_of<2, 2> : input_of<2, 3>)
                                 : (toom.r == 2   ? input_of<4, 2>
                                    : toom.r == 3 ? input_of<4, 3>
                                                  : input_of<4, 4>);
    run(plane, shape, window, across, row, rows, room, v, ldv);
}

void wino_output(Toom toom, const float* u, int64_t ldu, int across, int rows, int width, float* y) {
    const auto run = toom.m == 2 ? (toom.r == 2 ? output_of<2, 2> : output_of<2, 3>)
                                 : (toom.r == 2   ? output_of<4, 2>
                                    : toom.r == 3 ? output_of<4, 3>
                                                  : output_of<4, 4>);
    run(u, ldu, across, rows, width, y);
}

}  // namespace COFIRE_ISA
}  // namespace cofire
