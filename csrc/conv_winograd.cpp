// Convs in the Winograd domain, of stride 1 or 2.
//
// A conv of stride 2 is a sum of four of stride 1, one for each phase of the input, with kernels of about half the
// size: every input counts as four here. A phase with fewer taps has no products at infinity, the last row or column of
// positions.
//
// Tile rows are taken in blocks, filters in chunks, and within a chunk the tile positions come first: a position's
// inputs stay near while its weights stream by, once per block. Blocks and chunks are so large that most convs are one
// of each: transformed inputs and products pass through the L3 cache once, where weights would once per block.
#include <cmath>

#include "conv_common.h"

namespace cofire {

namespace {

constexpr int64_t kInputs = 640 * 1024;    // floats of transformed inputs in a block
constexpr int64_t kProducts = 640 * 1024;  // floats of products in a chunk
constexpr int kFilters = 528;              // filters in a chunk: whole groups of every kernel set's rows

constexpr int kMostTaps = 4;  // of a phase, along one axis

constexpr double kPoints[] = {0, 1, -1, 2, -2, 0.5};  // as in kernels/winograd.cpp

// Weights of one dimension -> their factors at each point and at infinity.
std::vector<std::vector<double>> weight_matrix(Toom toom) {
    std::vector<std::vector<double>> g(toom.a(), std::vector<double>(toom.r));
    for (int i = 0; i < toom.a() - 1; ++i) {
        double power = 1;
        for (int p = 0; p < toom.a() - 1; ++p)
            if (p != i) power /= kPoints[i] - kPoints[p];
        for (int k = 0; k < toom.r; ++k) g[i][k] = power, power *= kPoints[i];
    }
    g[toom.a() - 1][toom.r - 1] = 1;
    return g;
}

// The taps of one dimension that read one phase of the input.
struct Taps {
    int start;                 // input coordinate that the first of them reads for output 0
    std::vector<int> numbers;  // of the kernel
};

std::vector<Taps> taps_by_phase(int kernel, int stride, int padding) {
    std::vector<Taps> found(stride);
    for (int k = 0; k < kernel; ++k) {
        Taps& taps = found[k % stride];
        if (taps.numbers.empty()) taps.start = k - padding;
        taps.numbers.push_back(k);
    }
    return found;
}

class Winograd final : public AbstractConv {
   public:
    Winograd(Toom toom, const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena)
        : toom_(toom),
          positions_(toom.a() * toom.a()),
          kernels_(kernels),
          op_(op),
          x_(x),
          y_(y),
          across_((y.w + toom.m - 1) / toom.m),
          down_((y.h + toom.m - 1) / toom.m) {
        for (const Taps& rows : taps_by_phase(op.kernel.h, op.stride.h, op.padding.top))
            for (const Taps& columns : taps_by_phase(op.kernel.w, op.stride.w, op.padding.left))
                phases_.push_back({rows, columns});
        ldw_ = odd_lines(int64_t(phases_.size()) * x.c);
        weights_ = arena.take(weights_size());
        const auto g = weight_matrix(toom);
        for (int o = 0; o < y.c; ++o)
            for (int phase = 0; phase < int(phases_.size()); ++phase)
                for (int i = 0; i < x.c; ++i) transform(g, phase, o, i);
    }

    Stretch weights() const override { return {weights_, weights_size()}; }

    int64_t room(int threads) const override {
        return tables_room() + (apart(threads) ? threads : 1) * inputs_room() +
               threads * (products_room() + line_room());
    }

    int64_t run(const ConvCall& call, const Member& member) const override {
        // With a block for each member there is nothing to wait for; else the team shares every block's inputs.
        const bool alone = apart(member.threads);
        const Member team = alone ? Member{0, 1, nullptr} : member;
        const int inputs = call.n_in * int(phases_.size());
        Block block;
        block.tables = reinterpret_cast<int*>(call.room);
        block.v = call.room + tables_room() + (alone ? member.thread * inputs_room() : 0);
        block.products = call.room + tables_room() + (alone ? member.threads : 1) * inputs_room() +
                         member.thread * (products_room() + line_room());
        block.line = block.products + products_room();
        const int rows = block_rows(inputs, member.threads);
        block.ldv = pitch(rows);
        block.position = (inputs + 1) * block.ldv;
        if (member.first()) fill_tables(call, block);
        member.meet();
        int64_t macs = 0;
        for (block.row = 0; block.row < down_; block.row += rows) {
            if (alone && block.row / rows % member.threads != member.thread) continue;
            block.rows = std::min(rows, down_ - block.row);
            transform_inputs(call, team.share(call.n_in), block);
            if (!alone) member.meet();
            macs += multiply(call, team.share(call.n_out), block);
            if (!alone) member.meet();
        }
        return macs;
    }

   private:
    struct Phase {
        Taps rows, columns;
    };

    struct Block {
        int row, rows;  // of tiles
        int* tables;    // see Table
        float* v;       // transformed inputs (position, input of a phase, tile)
        int64_t ldv, position;
        float* products;  // (filter, position, tile)
        float* line;
    };

    // Which weights meet which inputs at a position; there are up to four kinds of positions.
    struct Table {
        int *weights, *offsets, *count;
    };

    void transform(const std::vector<std::vector<double>>& g, int phase, int o, int i) {
        const float* kernel = op_.weight + (int64_t(o) * x_.c + i) * op_.kernel.h * op_.kernel.w;
        const std::vector<int>&rows = phases_[phase].rows.numbers, &columns = phases_[phase].columns.numbers;
        for (int p = 0; p < toom_.a(); ++p) {
            double line[kMostTaps] = {};  // of the kernel, its rows multiplied
            for (size_t c = 0; c < columns.size(); ++c)
                for (size_t r = 0; r < rows.size(); ++r)
                    line[c] += g[p][r] * kernel[rows[r] * op_.kernel.w + columns[c]];
            for (int q = 0; q < toom_.a(); ++q) {
                double sum = 0;
                for (size_t c = 0; c < columns.size(); ++c) sum += g[q][c] * line[c];
                weights_[((p * toom_.a() + q) * int64_t(y_.c) + o) * ldw_ + phase * x_.c + i] = float(sum);
            }
        }
    }

    int64_t weights_size() const { return positions_ * y_.c * ldw_ + kSlack; }

    int kind(int position) const {
        const int last = toom_.a() - 1;
        return phases_.size() == 1 ? 0 : (position / toom_.a() == last) * 2 + (position % toom_.a() == last);
    }

    Table table(const Block& block, int kind) const {
        int* begin = block.tables + kind * (2 * up(int64_t(phases_.size()) * x_.c, kLine) + kLine);
        return {begin + kLine, begin + kLine + up(int64_t(phases_.size()) * x_.c, kLine), begin};
    }
    int64_t tables_room() const { return 4 * (2 * up(int64_t(phases_.size()) * x_.c, kLine) + kLine); }

    void fill_tables(const ConvCall& call, const Block& block) const {
        for (int kind = 0; kind < (phases_.size() == 1 ? 1 : 4); ++kind) {
            const Table table = this->table(block, kind);
            int n = 0;
            for (int phase = 0; phase < int(phases_.size()); ++phase) {
                const bool rows = kind < 2 || int(phases_[phase].rows.numbers.size()) == toom_.r;
                const bool columns = kind % 2 == 0 || int(phases_[phase].columns.numbers.size()) == toom_.r;
                if (!rows || !columns) continue;
                for (int k = 0; k < call.n_in; ++k, ++n) {
                    table.weights[n] = phase * x_.c + call.in[k];
                    table.offsets[n] = int((phase * call.n_in + k) * block.ldv);
                }
            }
            *table.count = n;
        }
    }

    bool apart(int threads) const { return threads > 1 && down_ / threads * across_ >= 24; }

    // Floats of transformed inputs; + 1: room between positions, so that they do not fall on each other in the cache
    int64_t inputs_size(int inputs, int rows) const { return positions_ * (inputs + 1) * pitch(rows); }
    int64_t pitch(int rows) const { return odd_lines(int64_t(rows) * across_ + (across_ % 4 ? 3 : 0)); }

    // Tile rows in a block: as many as fit the cache, but no fewer than make a cache line; evenly over the blocks.
    int block_rows(int inputs, int threads) const {
        int rows = apart(threads) ? (down_ + threads - 1) / threads : down_;
        while (rows > fewest_rows() && inputs_size(inputs, rows) > kInputs) --rows;
        int blocks = (down_ + rows - 1) / rows;
        if (apart(threads)) blocks = int(up(blocks, threads));
        return (down_ + blocks - 1) / blocks;
    }

    int fewest_rows() const { return std::min(std::max(kLine / across_, 1), down_); }
    int64_t inputs_room() const {
        const int inputs = x_.c * int(phases_.size());
        return std::min(std::max(kInputs, inputs_size(inputs, fewest_rows())), inputs_size(inputs, down_)) + kSlack;
    }
    int64_t products_room() const {
        const int64_t per_filter = positions_ * pitch(down_);
        return std::min(std::max(kProducts, kMaxRows * per_filter), y_.c * per_filter) + kSlack;
    }
    int64_t line_room() const {
        return up(wino_room(toom_, across_, down_), kLine) + int64_t(toom_.m) * toom_.m * across_ * down_ + kSlack;
    }

    void transform_inputs(const ConvCall& call, Range inputs, const Block& block) const {
        for (int phase = 0; phase < int(phases_.size()); ++phase) {
            const Window window{phases_[phase].rows.start, phases_[phase].columns.start, op_.stride.h};
            kernels_.wino_input(toom_, call.x, call.in + inputs.begin, inputs.end - inputs.begin, x_, window, across_,
                                block.row, block.rows, block.line,
                                block.v + (phase * call.n_in + inputs.begin) * block.ldv, block.ldv, block.position);
        }
    }

    int64_t multiply(const ConvCall& call, Range filters, const Block& block) const {
        const int tiles = block.rows * across_;
        const int64_t per_filter = positions_ * block.ldv;
        const int most = best_rows(kernels_, tiles);
        const int fit = std::min(std::max(most, int(kProducts / per_filter) / most * most), kFilters);
        int64_t macs = 0;
        for (int begin = filters.begin; begin < filters.end; begin += fit) {
            const int* chunk = call.out + begin;
            const int size = std::min(fit, filters.end - begin);
            int groups = 0, sizes[kFilters];
            for (int f = 0; f < size; f += sizes[groups++]) sizes[groups] = group_size(size - f, most);
            for (int p = 0; p < positions_; ++p) {
                const float* rows[kFilters + kMaxRows];
                fill_rows(chunk, size, p, rows);
                const Table table = this->table(block, kind(p));
                for (int group = 0, f = 0; group < groups; f += sizes[group++]) {
                    kernels_.gemm(rows + f, sizes[group], table.weights, table.offsets, *table.count,
                                  block.v + p * block.position, tiles, block.products + f * per_filter + p * block.ldv,
                                  per_filter, rows + f + sizes[group], false);
                    call.upcoming->fetch();
                }
            }
            for (int f = 0; f < size; ++f) macs += put(call, chunk[f], block, block.products + f * per_filter);
        }
        return macs;
    }

    // The weights of a chunk's filters at a position, and after them what comes then: the next position's first ones.
    void fill_rows(const int* chunk, int size, int position, const float** rows) const {
        const int64_t step = y_.c * ldw_;
        const float* weights = weights_ + position * step;
        for (int f = 0; f < size; ++f) rows[f] = weights + chunk[f] * ldw_;
        const int64_t next = position + 1 < positions_ ? step : 0;
        for (int r = 0; r < kMaxRows; ++r) rows[size + r] = rows[std::min(r, size - 1)] + next;
    }

    // Products -> pixels of filter o; returns the MACs that a direct conv takes for them.
    int64_t put(const ConvCall& call, int o, const Block& block, const float* products) const {
        float* pixels = block.line;
        kernels_.wino_output(toom_, products, block.ldv, across_, block.rows, y_.w, pixels);
        const int first = block.row * toom_.m, n = std::min(block.rows * toom_.m, y_.h - first) * y_.w;
        if (!kernels_.finite(pixels, n))
            for (int i = 0; i < n; ++i)
                if (!std::isfinite(pixels[i])) pixels[i] = direct(call, o, first + i / y_.w, i % y_.w);
        finish(kernels_, op_, call, o, pixels, y_.area(), first * y_.w, n);
        return int64_t(call.n_in) * op_.kernel.h * op_.kernel.w * n;
    }

    // One pixel as the definition has it. What is not finite in a tile, or becomes so on the way, spoils all pixels
    // that the tile makes, and with them every one that it should: those are computed anew.
    float direct(const ConvCall& call, int o, int row, int column) const {
        double sum = 0;
        for (int k = 0; k < call.n_in; ++k) {
            const float* plane = call.x + int64_t(call.in[k]) * x_.area();
            const float* weights = op_.weight + (int64_t(o) * x_.c + call.in[k]) * op_.kernel.h * op_.kernel.w;
            for (int ky = 0; ky < op_.kernel.h; ++ky)
                for (int kx = 0; kx < op_.kernel.w; ++kx) {
                    const int iy = row * op_.stride.h + ky - op_.padding.top;
                    const int ix = column * op_.stride.w + kx - op_.padding.left;
                    if (iy >= 0 && iy < x_.h && ix >= 0 && ix < x_.w)
                        sum += double(weights[ky * op_.kernel.w + kx]) * plane[int64_t(iy) * x_.w + ix];
                }
            if (sum != sum) break;  // NaN for good
        }
        return float(sum);
    }

    const Toom toom_;
    const int positions_;
    const Kernels& kernels_;
    const Op& op_;
    const Shape x_, y_;
    const int across_, down_;  // tiles
    std::vector<Phase> phases_;
    int64_t ldw_;
    float* weights_;  // (position, filter, input of a phase)
};

std::unique_ptr<AbstractConv> make_winograd(int m, const Kernels& kernels, const Op& op, Shape x, Shape y,
                                            Arena& arena) {
    return std::make_unique<Winograd>(Toom{m, (op.kernel.h + op.stride.h - 1) / op.stride.h}, kernels, op, x, y, arena);
}

}  // namespace

std::unique_ptr<AbstractConv> make_winograd2(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena) {
    return make_winograd(2, kernels, op, x, y, arena);
}
std::unique_ptr<AbstractConv> make_winograd4(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena) {
    return make_winograd(4, kernels, op, x, y, arena);
}

}  // namespace cofire
