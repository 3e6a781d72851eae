// Winograd: planes to tiles and back, a vector of tiles at a time.
//
// The vertical half of a transform runs along the lines of the plane. The horizontal half takes quads of four
// neighbouring tiles, which a transposition turns into one vector per column; tiles overlap, so that a tile's last
// columns are the first of its right neighbour.
#include "functions.h"
#include "vec.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

// Every position is a stream of its own, too many for the CPU to foresee: products are fetched this many floats ahead.
constexpr int kAhead = 32;

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

// Columns [begin, end) of the window's first `length` lie inside the plane.
struct Inside {
    int begin, end;

    Inside(int width, const Window& window, int length) {
        begin = window.x < 0 ? (-window.x + window.stride - 1) / window.stride : 0;
        end = width > window.x ? (width - window.x + window.stride - 1) / window.stride : 0;
        if (end > length) end = length;
        if (begin > end) begin = end = 0;
    }
};

// out = B' * lines; up to a vector past `width` is written.
template <int M, int R>
inline void vertical(const float* const* lines, int width, float* out, int64_t pitch) {
    constexpr int A = M + R - 1;
    for (int x = 0; x < width; x += kLanes) {
        vec d[A], halfway[A];
        for (int i = 0; i < A; ++i) d[i] = load(lines[i] + x);
        forward<M, R>(d, halfway, 1);
        for (int i = 0; i < A; ++i) store(out + i * pitch + x, halfway[i]);
    }
}

// The columns of the quads of tiles that begin at `from`: M of each tile's own, then the first of its right
// neighbour.
template <int M, int R>
inline __attribute__((always_inline)) void columns(const float* const* from, vec* column) {
    const auto part = [&](int number) {
        const float* at[kQuads];
        for (int q = 0; q < kQuads; ++q) at[q] = from[q] + 4 * number;
        return load_quads(at);
    };
    if constexpr (M == 4) {
        for (int j = 0; j < M; ++j) column[j] = part(j);
        transpose(column[0], column[1], column[2], column[3]);
    } else {
        const vec low = part(0), high = part(1);
        column[0] = pick<0, 2, 4, 6>(low, high);
        column[1] = pick<1, 3, 5, 7>(low, high);
    }
    const vec next = part(M);
    column[M] = pick<1, 2, 3, 4>(column[0], next);
    if constexpr (R > 2) column[M + 1] = pick<1, 2, 3, 5>(column[1], next);
    if constexpr (R > 3) column[M + 2] = pick<1, 2, 3, 6>(column[2], next);
}

template <int M, int R>
void input_of(const float* x, const int* channels, int count, Shape shape, const Window& window, int across, int row,
              int rows, float* room, float* v, int64_t ldv, int64_t position) {
    constexpr int A = M + R - 1;
    const int length = M * across + R - 1;
    const int64_t pitch = wino_pitch(Toom{M, R}, across);
    const Inside inside(shape.w, window, length);
    const int width = inside.end - inside.begin;
    float *halfway = room, *compact = room + rows * A * pitch, *zeros = compact + A * pitch;
    for (int i = 0; i < width; i += kLanes) store(zeros + i, vec{});
    const auto clear_right = [&] {
        for (int line = 0; line < rows * A; ++line)
            for (int i = inside.end; i < length; i += kLanes) store(halfway + line * pitch + i, vec{});
    };
    for (int line = 0; line < rows * A; ++line)
        for (int i = 0; i < inside.begin; ++i) halfway[line * pitch + i] = 0;
    clear_right();
    for (int k = 0; k < count; ++k, v += ldv) {
        const float* plane = x + int64_t(channels[k]) * shape.h * shape.w;
        for (int down = 0; down < rows; ++down) {
            const int top = window.y + (row + down) * M * window.stride;
            const float *lines[A], *line = plane + int64_t(top) * shape.w + window.x + inside.begin * window.stride;
            for (int i = 0; i < A; ++i, line += int64_t(window.stride) * shape.w)
                lines[i] = unsigned(top + i * window.stride) < unsigned(shape.h) ? line : zeros;
            if (window.stride > 1)
                for (int i = 0; i < A; ++i) {
                    if (lines[i] == zeros) continue;
                    take(lines[i], window.stride, width, compact + i * pitch);
                    lines[i] = compact + i * pitch;
                }
            vertical<M, R>(lines, width, halfway + down * A * pitch + inside.begin, pitch);
        }
        if (width % kLanes) clear_right();
        const int quads = (across + 3) / 4;  // in a tile row
        int down = 0, number = 0;            // of the next quad: its tile row, and its place in there
        for (int first = 0; first < rows * quads; first += kQuads) {
            const float* from[kQuads];
            int64_t tile[kQuads];
            for (int q = 0; q < kQuads; ++q) {
                from[q] = halfway + down * A * pitch + number * 4 * M;
                tile[q] = int64_t(down) * across + number * 4;
                if (++number == quads && first + q + 1 < rows * quads) number = 0, ++down;
            }
            // Quads that follow each other in v are stored as one.
            const bool whole =
                across % 4 == 0 || (first + kQuads <= rows * quads && tile[kQuads - 1] == tile[0] + kLanes - 4);
            float* to = v;
            for (int i = 0; i < A; ++i) {
                vec d[M + R - 1], out[A];
                columns<M, R>(from, d);
                forward<M, R>(d, out, 1);
                for (int j = 0; j < A; ++j, to += position) {
                    if (whole)
                        store(to + tile[0], out[j]);
                    else
                        for (int q = 0; q < kQuads; ++q)  // a quad runs over into the next row, whose own comes after
                            if (first + q < rows * quads) store4(to + tile[q], quad(out[j], q));
                }
                for (int q = 0; q < kQuads; ++q) from[q] += pitch;
            }
        }
    }
}

template <int M, int R>
void output_of(const float* u, int64_t ldu, int across, int rows, int width, float* y) {
    constexpr int A = M + R - 1;
    const int last = width - M * (across - 1);  // columns of the last tile in a row
    const bool whole_quads = across % 4 == 0 && last == M;
    int tile_x = 0;            // of the next tile to be stored,
    float *line = y, *to = y;  // its tile row, and its corner there
    const auto step = [&](int tiles) {
        tile_x += tiles, to += tiles * M;
        if (tile_x == across) tile_x = 0, to = line += M * int64_t(width);
    };
    for (int tile = 0; tile < rows * across; tile += kLanes) {
        vec d[A], half[M * A], pixels[M * M];
        for (int j = 0; j < A; ++j) {
            for (int i = 0; i < A; ++i) {
                const float* from = u + (i * A + j) * ldu + tile;
                __builtin_prefetch(from + kAhead);
                d[i] = load(from);
            }
            backward<M, R>(d, half + j, A);
        }
        for (int i = 0; i < M; ++i) {
            backward<M, R>(half + i * A, pixels + i * M, 1);
            vec* line = pixels + i * M;  // columns of tiles -> tiles
            if constexpr (M == 4) {
                transpose(line[0], line[1], line[2], line[3]);
            } else {
                const vec low = pick<0, 4, 1, 5>(line[0], line[1]);
                line[1] = pick<2, 6, 3, 7>(line[0], line[1]);
                line[0] = low;
            }
        }
        if (whole_quads) {
            for (int q = 0; q < kQuads && tile + 4 * q < rows * across; ++q, step(4))
                for (int i = 0; i < M; ++i)
                    for (int j = 0; j < M; ++j) store4(to + i * int64_t(width) + 4 * j, quad(pixels[i * M + j], q));
            continue;
        }
#pragma GCC unroll 16
        for (int t = 0; t < kLanes; ++t, step(1)) {
            if (tile + t == rows * across) break;
            const int count = tile_x + 1 == across ? last : M;
            for (int i = 0; i < M; ++i) {
                const vec4 piece = quad(pixels[i * M + t % 4 * M / 4], t / 4);
                const float* from = reinterpret_cast<const float*>(&piece) + t * M % 4;
                if (count == M)
                    __builtin_memcpy(to + i * int64_t(width), from, M * sizeof(float));
                else
                    for (int j = 0; j < count; ++j) to[i * int64_t(width) + j] = from[j];
            }
        }
    }
}

}  // namespace

void wino_input(Toom toom, const float* x, const int* channels, int count, Shape shape, const Window& window,
                int across, int row, int rows, float* room, float* v, int64_t ldv, int64_t position) {
    const auto run = toom.m == 2 ? (toom.r == 2 ? input_of<2, 2> : input_of<2, 3>)
                                 : (toom.r == 2   ? input_of<4, 2>
                                    : toom.r == 3 ? input_of<4, 3>
                                                  : input_of<4, 4>);
    run(x, channels, count, shape, window, across, row, rows, room, v, ldv, position);
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
