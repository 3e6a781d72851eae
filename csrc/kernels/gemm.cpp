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
template <int Rows, int Vectors, bool Far, bool Zen5, class End>
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
                for (int r = 0; r < Rows; ++r) fetch_weights<Zen5>(ahead[r] + column);
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

// Two numbers of a list, none of them below zero, by one load.
struct Two {
    uint64_t both;

    explicit Two(const int* p) { __builtin_memcpy(&both, p, sizeof(both)); }
    int64_t first() const { return int64_t(both & 0xffffffffu); }
    int64_t second() const { return int64_t(both >> 32); }
};

// Rows that the next call will read, some lines of a cache at a time, all of them by the time this one has ended.
template <int Rows, bool Zen5>
class Fetching {
   public:
    Fetching(const float* const* ahead, const int* wk, int nk, int times)
        : ahead_(ahead), column_(nk > 0 ? wk[0] / kLine * kLine : 0) {
        if (!ahead || times <= 0) return;
        left_ = int((wk[nk - 1] - column_) / kLine + 1) * Rows;
        each_ = (left_ + times - 1) / times;
    }

    void go_on() {
        if (left_ <= 0) return;
        left_ -= each_;
        for (int i = 0; i < each_; ++i) {
            fetch_weights<Zen5>(ahead_[row_] + column_);
            if (++row_ == Rows) row_ = 0, column_ += kLine;
        }
    }

   private:
    const float* const* const ahead_;
    int64_t column_;
    int row_ = 0, left_ = 0, each_ = 0;
};

// A single vector of pixels needs a load for each product, so that those of the lists count.
template <int Rows, bool Zen5, class End>
void lone_tile(const float* const* w, const int* wk, const int* xk, int nk, const float* x, End end,
               const float* const* ahead) {
    vec sum[Rows] = {};
    const float* row[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) row[r] = w[r], end.prepare(r);
    Fetching<Rows, Zen5> fetching(ahead, wk, nk, nk / 2);
    int k = 0;
    for (; k + 2 <= nk; k += 2) {
        const Two columns(wk + k), places(xk + k);
        const vec one = load(x + places.first()), other = load(x + places.second());
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) sum[r] += splat(row[r][columns.first()]) * one;
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) sum[r] += splat(row[r][columns.second()]) * other;
        fetching.go_on();
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        if (k < nk) sum[r] += splat(row[r][wk[k]]) * load(x + xk[k]);
        end(r, 0, sum[r]);
    }
}

// How many vectors fit this many rows best: they keep the FMA units busy and the sums in registers.
constexpr int wide(int rows) {
    constexpr int sums = kTileRows * kTileVectors;
    return rows == 1 ? 8 : rows == 2 ? 5 : rows == 3 ? sums / 4 : sums / rows;
}

// Tiles as wide as they can be; what is left over has narrower ones.
template <int Rows, int Vectors, bool Far, class End>
void wide_tiles(const float* const* w, const int* wk, const int* xk, int nk, const float* x, int n, End end,
                const float* const* ahead) {
    int i = 0;
    for (; n - i > (Vectors - 1) * kLanes; i += Vectors * kLanes, ahead = nullptr)
        tile<Rows, Vectors, Far, false>(w, wk, xk, nk, x + i, end.at(i), ahead);
    if constexpr (Vectors > 1) {
        constexpr int fewer = Vectors > 4 ? 3 : Vectors - 1;
        if (i < n) wide_tiles<Rows, fewer, Far>(w, wk, xk, nk, x + i, n - i, end.at(i), ahead);
    }
}

// Tiles of nearly one width, for Zen 5: one left over with a single vector would load a weight for each product.
template <int Rows, int Vectors, bool Far, class End>
void even_tiles(const float* const* w, const int* wk, const int* xk, int nk, const float* x, int n, End end,
                const float* const* ahead) {
    const int vectors = (n + kLanes - 1) / kLanes, tiles = (vectors + Vectors - 1) / Vectors;
    const int fewer = tiles * Vectors - vectors;  // tiles that do with a vector less
    int i = 0;
    if constexpr (Vectors > 1) {
        if (fewer > tiles) return even_tiles<Rows, Vectors - 1, Far>(w, wk, xk, nk, x, n, end, ahead);
        for (int t = 0; t < tiles - fewer; ++t, i += Vectors * kLanes, ahead = nullptr)
            tile<Rows, Vectors, Far, true>(w, wk, xk, nk, x + i, end.at(i), ahead);
        for (int t = 0; t < fewer; ++t, i += (Vectors - 1) * kLanes, ahead = nullptr)
            tile<Rows, Vectors - 1, Far, true>(w, wk, xk, nk, x + i, end.at(i), ahead);
    } else {
        for (; i < n; i += kLanes, ahead = nullptr) tile<Rows, 1, Far, true>(w, wk, xk, nk, x + i, end.at(i), ahead);
    }
}

template <int Rows, bool Far, bool Zen5, class End>
void gemm_of(const float* const* w, int rows, const int* wk, const int* xk, int nk, const float* x, int n, End end,
             const float* const* ahead) {
    if constexpr (Rows > 1)
        if (rows < Rows) return gemm_of<Rows - 1, Far, Zen5, End>(w, rows, wk, xk, nk, x, n, end, ahead);
    if (n <= kLanes)
        lone_tile<Rows, Zen5>(w, wk, xk, nk, x, end, ahead);
    else if constexpr (Zen5)
        even_tiles<Rows, wide(Rows), Far>(w, wk, xk, nk, x, n, end, ahead);
    else
        wide_tiles<Rows, wide(Rows), Far>(w, wk, xk, nk, x, n, end, ahead);
}

template <class End>
void gemm_with(const float* const* w, int rows, const int* wk, const int* xk, int nk, const float* x, int n, End end,
               const float* const* ahead, bool far) {
    const auto chosen = is_zen5 ? (far ? gemm_of<kTileRows, true, true, End> : gemm_of<kTileRows, false, true, End>)
                                : (far ? gemm_of<kTileRows, true, false, End> : gemm_of<kTileRows, false, false, End>);
    chosen(w, rows, wk, xk, nk, x, n, end, ahead);
}

}  // namespace

void gemm(const float* const* w, int rows, const int* wk, const int* xk, int nk, const float* x, int n, float* out,
          int64_t ldo, const float* const* ahead, bool far) {
    gemm_with(w, rows, wk, xk, nk, x, n, Store{out, ldo}, ahead, far);
}

void gemm_finished(const float* const* w, int rows, const int* wk, const int* xk, int nk, const float* x, int n,
                   const Ending& ending, const float* const* ahead, bool far) {
    vec best[kMaxRows];
    for (int r = 0; r < rows; ++r) best[r] = splat(kLowest);
    const Finish end{ending, Clamp(ending.act), ending.peak[0] ? best : nullptr};
    gemm_with(w, rows, wk, xk, nk, x, n, end, ahead, far);
    for (int r = 0; r < rows; ++r) raise(ending.peak[r], best[r]);
}

}  // namespace COFIRE_ISA
}  // namespace cofire
