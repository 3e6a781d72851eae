// Filters times pixels: rows and inputs are lists, so that what is off is never touched and nothing is packed.
#include "clamp.h"
#include "functions.h"
#include "vec.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

// What becomes of the sums of a tile: they are stored as they are,
struct Store {
    float* out;
    int64_t ldo;

    Store at(int i) const { return {out + i, ldo}; }
    void prepare(int) const {}
    void operator()(int r, int i, vec sum) const { store(out + r * ldo + i, sum); }
};

// or finished: factor, bias, activation, largest value so far.
struct Finish {
    const Ending& ending;
    Clamp clamp;
    vec* best;
    int begin = 0;

    Finish at(int i) const { return {ending, clamp, best, begin + i}; }
    void prepare(int r) const { __builtin_prefetch(ending.y[r] + begin, 1); }
    void operator()(int r, int i, vec sum) const {
        const vec value = clamp(sum * splat(ending.factor[r]) + splat(ending.bias[r]));
        store(ending.y[r] + begin + i, value);
        if (best) best[r] = either(value, best[r]);
    }
};

// Rows x Vectors accumulators stay in registers over all of k; weights are broadcast, pixels are vectors.
template <int Rows, int Vectors, bool Far, class End>
void tile(const float* const* w, const int* wk, const int* xk, int nk, const float* x, End end,
          const float* const* ahead) {
    vec sum[Rows][Vectors] = {};
    const float* row[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) row[r] = w[r], end.prepare(r);
    for (int begin = 0; begin < nk; begin += kLine) {
        const int stop = begin + kLine < nk ? begin + kLine : nk;
        if (ahead)
            for (int column = wk[begin]; column <= wk[stop - 1]; column += kLine)
                for (int r = 0; r < Rows; ++r) fetch_weights(ahead[r] + column);
        for (int k = begin; k < stop; ++k) {
            const float* in = x + xk[k];
            const int column = wk[k];
            if constexpr (Far) __builtin_prefetch(in + Vectors * kLanes);
            vec pixels[Vectors];
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v) pixels[v] = load(in + v * kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const vec weight = splat(row[r][column]);
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; ++v) sum[r][v] += weight * pixels[v];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) end(r, v * kLanes, sum[r][v]);
}

// How many vectors fit this many rows best: they keep the FMA units busy and the sums in registers.
constexpr int wide(int rows) {
    constexpr int sums = kTileRows * kTileVectors;
    return rows == 1 ? 8 : rows == 2 ? 5 : rows == 3 ? sums / 4 : sums / rows;
}

template <int Rows, int Vectors, bool Far, class End>
void rows_of(const float* const* w, const int* wk, const int* xk, int nk, const float* x, int n, End end,
             const float* const* ahead) {
    int i = 0;
    for (; n - i > (Vectors - 1) * kLanes; i += Vectors * kLanes, ahead = nullptr)
        tile<Rows, Vectors, Far>(w, wk, xk, nk, x + i, end.at(i), ahead);
    if constexpr (Vectors > 1) {
        constexpr int fewer = Vectors > 4 ? 3 : Vectors - 1;
        if (i < n) rows_of<Rows, fewer, Far>(w, wk, xk, nk, x + i, n - i, end.at(i), ahead);
    }
}

template <int Rows, bool Far, class End>
void gemm_of(const float* const* w, int rows, const int* wk, const int* xk, int nk, const float* x, int n, End end,
             const float* const* ahead) {
    if constexpr (Rows > 1)
        if (rows < Rows) return gemm_of<Rows - 1, Far, End>(w, rows, wk, xk, nk, x, n, end, ahead);
    rows_of<Rows, wide(Rows), Far>(w, wk, xk, nk, x, n, end, ahead);
}

}  // namespace

void gemm(const float* const* w, int rows, const int* wk, const int* xk, int nk, const float* x, int n, float* out,
          int64_t ldo, const float* const* ahead, bool far) {
    const Store end{out, ldo};
    (far ? gemm_of<kTileRows, true, Store> : gemm_of<kTileRows, false, Store>)(w, rows, wk, xk, nk, x, n, end, ahead);
}

void gemm_finished(const float* const* w, int rows, const int* wk, const int* xk, int nk, const float* x, int n,
                   const Ending& ending, const float* const* ahead, bool far) {
    vec best[kMaxRows];
    for (int r = 0; r < rows; ++r) best[r] = splat(kLowest);
    const Finish end{ending, Clamp(ending.act), ending.peak[0] ? best : nullptr};
    (far ? gemm_of<kTileRows, true, Finish> : gemm_of<kTileRows, false, Finish>)(w, rows, wk, xk, nk, x, n, end, ahead);
    for (int r = 0; r < rows; ++r) raise(ending.peak[r], best[r]);
}

}  // namespace COFIRE_ISA
}  // namespace cofire
