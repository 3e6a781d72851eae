// The inner loops: plain functions on plain memory, compiled once per instruction set and chosen when an engine is
// made.
//
// NaN and infinities go where docs/program.md says, in every one of them: a maximum or a clamp of a NaN is a NaN.
//
// They hold no state and use nothing of the standard library: a template instantiated here would be compiled for this
// instruction set, and the linker could hand it to code that runs on any CPU.
//
// Vector loops may read and write up to `kSlack` floats past `n`; whoever owns the memory leaves that room.
#pragma once

#include <cstdint>

#include "../program.h"

namespace cofire {

constexpr int kSlack = 64;   // floats of room after every array that a kernel walks
constexpr int kLine = 16;    // floats in a cache line
constexpr int kMaxRows = 8;  // the most that Kernels::rows is

// The sizes F(m, r) of Winograd's convs, by the name of Toom and Cook, whose scheme for products they use: m outputs of
// r taps each from m + r - 1 products. Kernels have (2, 2), (2, 3), (4, 2), (4, 3) and (4, 4).
struct Toom {
    int m, r;
    int a() const { return m + r - 1; }
};

// Every `stride`-th pixel of a plane from (y, x) on, which may lie outside; outside is zero.
struct Window {
    int y, x, stride;
};

inline bool only_clamps(Act act) { return act == Act::none || act == Act::relu || act == Act::relu6; }

// Where finished rows go: y[r] gets act(sum * factor[r] + bias[r]), the largest goes into *peak[r] as in
// Kernels::finish; null: nowhere.
struct Ending {
    Act act;  // one that only_clamps
    float factor[kMaxRows], bias[kMaxRows];
    float* y[kMaxRows];
    float* peak[kMaxRows];
};

// A tap of a kernel, and the pixel that it meets, counted from the first that is read.
struct Tap {
    int number, pixel;
};

// Weights with filters in vectors: that of filter f for input i lies at w[f / lanes * pitch + i * lanes + f % lanes].
struct Strips {
    const float* w;
    int64_t pitch;
    int count;      // one strip or two
    const int* in;  // inputs to walk, nk of them
    int nk;
    const float* ahead;  // what the next call reads, or null
    int64_t ahead_size;
    // Null: strips as they lie. Else filters of the whole conv, whose strips w is: they are picked into `to`.
    const int* filters;
    int listed;
    float* to;
};

// Pixels [begin, end) of each plane.
struct Planes {
    const float* x;
    int64_t pitch;
    int begin, end;
};

// Where pixels of whole strips go: numbers of each filter.
struct FilterEnding {
    Act act;  // one that only_clamps
    const float *factor, *bias;
    float* const* y;
    float* best;  // raised to the largest value, or NaN
};

// The microkernels of one instruction set: "v3" and so on, the kernel set that an
// engine is made with.
struct Kernels {
    const char* name;
    int lanes;          // floats in a vector
    int rows, vectors;  // a tile of gemm: filters that a call takes at most, and vectors of pixels that they fit best

    // out[r * ldo + i] = sum over k of w[r][wk[k]] * x[xk[k] + i], for r < rows, at most `rows` above, and i < n.
    // `ahead`: rows (as many) that the next call will read, or null. `far`: x is not in the nearest cache.
    void (*gemm)(const float* const* w, int rows, const int* wk, const int* xk, int nk, const float* x, int n,
                 float* out, int64_t ldo, const float* const* ahead, bool far);

    // The same, finished on the way; n must be a multiple of the lanes: nothing is written past it.
    void (*gemm_finished)(const float* const* w, int rows, const int* wk, const int* xk, int nk, const float* x, int n,
                          const Ending& ending, const float* const* ahead, bool far);

    // Winograd F(m x m, r x r), a = m + r - 1. Takes the tile rows [row, row + rows) of one window of each listed plane
    // of x; tiles are counted along rows, `across` to a row. v[p * position + k * ldv + tile] for the a * a positions p
    // and the k-th plane; up to 3 more tiles are written if `across` is no multiple of 4. `room`: wino_room() floats.
    void (*wino_input)(Toom toom, const float* x, const int* channels, int count, Shape shape, const Window& window,
                       int across, int row, int rows, float* room, float* v, int64_t ldv, int64_t position);
    // y[i] = the rows * m lines of `width` pixels that the tiles u[p * ldu + tile] make.
    void (*wino_output)(Toom toom, const float* u, int64_t ldu, int across, int rows, int width, float* y);

    // y = act(x * factor + bias [+ residual]); the largest y goes into *peak if that is larger. x, residual and y may
    // be the same memory.
    void (*finish)(const float* x, int n, float factor, float bias, const float* residual, Act act, float slope,
                   float* y, float* peak);

    // out[r * ldo + i] = sum over k of w[r][k] * x[i * ldx + k], for r < rows and i < count; several rows are read at a
    // time, which memory gives faster than one. `ahead`: the rows (as many) of the next call.
    void (*dot)(const float* const* w, int rows, int nk, const float* x, int64_t ldx, int count, float* out,
                int64_t ldo, const float* const* ahead);

    // to[i][r * ldo + lane] = what each lane of a vector finds of the products of w[r] with pixel i over all taps,
    // added to what is there if `adds`; r < rows, at most 6, i < pixels, at most 4. Inputs of a pixel, and weights of a
    // tap, are `length` floats side by side, whole cache lines.
    void (*dots)(const float* const* w, int rows, const Tap* taps, int count, int length, const float* const* x,
                 int pixels, bool adds, float* const* to, int64_t ldo);
    // to[i] = the sum of the lanes of vector i < n of x, in an order of their own; to may be x. Up to kSlack floats
    // more are read and written.
    void (*add_lanes)(const float* x, int n, float* to);

    // y[f][i] = act(sum * factor[f] + bias[f]), where sum is that over all inputs of the weight of filter f times pixel
    // i; for the filters f of whole strips, some of which may mean nothing.
    void (*filters)(const Strips& strips, const Planes& x, const FilterEnding& ending);

    // One channel of a depthwise conv: y[l * width + i] = act(bias + sum over t of w[t] * x[l * pitch + at[t] + i]),
    // for `lines` lines of `width`; the largest goes into *peak as in finish.
    void (*depthwise)(const float* x, int pitch, const int* at, const float* w, int taps, int lines, int width,
                      float bias, Act act, float slope, float* y, float* peak);

    // The same for 3 x 3 taps, straight from a plane: stride 1 or 2, paddings of 0 or 1 (right and bottom follow from
    // `out`). `zeros`: as many as a line has, and slack.
    void (*depthwise3)(const float* x, Shape shape, int stride, int top_padding, int left_padding, const float* zeros,
                       const float* w, Shape out, float bias, Act act, float slope, float* y, float* peak);

    // The largest of each window of a plane, stride 2: 2 x 2 without padding, or 3 x 3 with paddings of 0 or 1.
    void (*max_pool)(const float* x, Shape shape, int kernel, int top_padding, int left_padding, Shape out, float* y);

    // to[i] = from[i * step], for i < n; writes nothing past n.
    void (*take)(const float* from, int step, int n, float* to);

    // x = softmax(x)
    void (*softmax)(float* x, int n);

    // y[i] = max(y[i], x[i])
    void (*maximum)(const float* x, int n, float* y);
    float (*largest)(const float* x, int n);
    float (*sum)(const float* x, int n);
    float (*sum_of_magnitudes)(const float* x, int n);
    bool (*finite)(const float* x, int n);  // all of them
};

// Room for the tile rows of one plane: the lines of the tile rows halfway, those of one tile row before, one of zeros.
inline int64_t wino_pitch(Toom toom, int across) { return int64_t(toom.m) * ((across + 3) / 4 * 4) + 2 * kSlack; }
inline int64_t wino_room(Toom toom, int across, int rows) {
    return ((rows + 1) * int64_t(toom.a()) + 1) * wino_pitch(toom, across);
}

// The best set for this CPU, or the named one; null if it is not there.
const Kernels* find_kernels(const char* name);

}  // namespace cofire
