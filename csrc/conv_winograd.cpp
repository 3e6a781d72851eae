// 3x3 convs of stride 1 in the Winograd domain.
//
// Tile rows are taken in blocks whose transformed inputs stay in the L2 cache; filters in chunks whose products do. Within a
// chunk the tile positions come first: then a position's inputs stay in the L1 cache while its weights stream by once.
#include "conv_common.h"

namespace cofire {

namespace {

constexpr int64_t kInputs = 160 * 1024;   // floats of transformed inputs in a block
constexpr int64_t kProducts = 40 * 1024;  // floats of products in a chunk

// G of F(2, 3) and F(4, 3)
constexpr double kG2[4][3] = {{1, 0, 0}, {0.5, 0.5, 0.5}, {0.5, -0.5, 0.5}, {0, 0, 1}};
constexpr double kG4[6][3] = {{1. / 4, 0, 0},             {-1. / 6, -1. / 6, -1. / 6}, {-1. / 6, 1. / 6, -1. / 6},
                              {1. / 24, 1. / 12, 1. / 6}, {1. / 24, -1. / 12, 1. / 6}, {0, 0, 1}};

class Winograd final : public AbstractConv {
   public:
    Winograd(int m, const Leaf& leaf, const Op& op, Shape x, Shape y)
        : m_(m),
          positions_((m + 2) * (m + 2)),
          leaf_(leaf),
          op_(op),
          x_(x),
          y_(y),
          across_((y.w + m - 1) / m),
          down_((y.h + m - 1) / m),
          ldw_(odd_lines(x.c)),
          weights_(positions_ * y.c * ldw_ + kSlack) {
        for (int o = 0; o < y.c; ++o)
            for (int i = 0; i < x.c; ++i) transform(op.weight + (int64_t(o) * x.c + i) * 9, o, i);
    }

    const char* name() const override { return m_ == 4 ? "wino4" : "wino2"; }

    int64_t room(int threads) const override {
        return offsets_room() + (apart(threads) ? threads : 1) * inputs_room() + threads * (products_room() + line_room());
    }

    int64_t run(const ConvCall& call, const Member& member) const override {
        // With a block for each member there is nothing to wait for; else the team shares every block's inputs.
        const bool alone = apart(member.threads);
        const Member team = alone ? Member{0, 1, nullptr} : member;
        Block block;
        block.offsets = reinterpret_cast<int*>(call.room);
        block.v = call.room + offsets_room() + (alone ? member.thread * inputs_room() : 0);
        block.products = call.room + offsets_room() + (alone ? member.threads : 1) * inputs_room() +
                         member.thread * (products_room() + line_room());
        block.line = block.products + products_room();
        const int rows = block_rows(call.n_in, member.threads);
        block.ldv = odd_lines(int64_t(rows) * across_);
        if (member.first())
            for (int k = 0; k < call.n_in; ++k) block.offsets[k] = int(k * block.ldv);
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
    struct Block {
        int row, rows;  // of tiles
        int* offsets;   // of each input's tiles in v
        float* v;       // transformed inputs (position, input, tile)
        int64_t ldv;
        float* products;  // (filter, position, tile)
        float* line;
    };

    void transform(const float* g, int o, int i) {
        const int a = m_ + 2;
        const auto row = [&](int p) { return m_ == 4 ? kG4[p] : kG2[p]; };
        double half[6][3];
        for (int p = 0; p < a; ++p)
            for (int x = 0; x < 3; ++x) half[p][x] = row(p)[0] * g[x] + row(p)[1] * g[3 + x] + row(p)[2] * g[6 + x];
        for (int p = 0; p < a; ++p)
            for (int q = 0; q < a; ++q) {
                const double u = half[p][0] * row(q)[0] + half[p][1] * row(q)[1] + half[p][2] * row(q)[2];
                weights_[((p * a + q) * int64_t(y_.c) + o) * ldw_ + i] = float(u);
            }
    }

    bool apart(int threads) const { return threads > 1 && down_ / threads * across_ >= 24; }

    // Floats of transformed inputs; n_in + 1: room between positions, so that they do not fall on each other in the cache
    int64_t inputs_size(int n_in, int rows) const { return positions_ * (n_in + 1) * odd_lines(int64_t(rows) * across_); }

    // Tile rows in a block: as many as fit the cache, evenly over the blocks.
    int block_rows(int n_in, int threads) const {
        int rows = apart(threads) ? (down_ + threads - 1) / threads : down_;
        while (rows > 1 && inputs_size(n_in, rows) > kInputs) --rows;
        int blocks = (down_ + rows - 1) / rows;
        if (apart(threads)) blocks = int(up(blocks, threads));
        return (down_ + blocks - 1) / blocks;
    }

    int64_t offsets_room() const { return up(x_.c, kLine); }
    int64_t inputs_room() const { return std::max(kInputs, inputs_size(x_.c, 1)) + kSlack; }
    int64_t products_room() const {
        return kProducts + kMaxRows * positions_ * odd_lines(int64_t(across_) * down_) + kSlack;
    }
    int64_t line_room() const { return up(wino_room(m_, across_, down_), kLine) + int64_t(m_) * m_ * across_ * down_ + kSlack; }

    void transform_inputs(const ConvCall& call, Range inputs, const Block& block) const {
        for (int k = inputs.begin; k < inputs.end; ++k)
            leaf_.wino_input(m_, call.x + int64_t(call.in[k]) * x_.area(), x_, op_.padding.top, op_.padding.left, across_,
                             block.row, block.rows, block.line, block.v + k * block.ldv, (call.n_in + 1) * block.ldv);
    }

    int64_t multiply(const ConvCall& call, Range filters, const Block& block) const {
        const int tiles = block.rows * across_;
        const int64_t per_filter = positions_ * block.ldv;
        const int fit = std::max(kMaxRows, int(kProducts / per_filter) / kMaxRows * kMaxRows);
        int64_t macs = 0;
        for (int begin = filters.begin; begin < filters.end; begin += fit) {
            const int end = std::min(begin + fit, filters.end);
            for (int p = 0; p < positions_; ++p) {
                const float* v = block.v + p * (call.n_in + 1) * block.ldv;
                const float *rows[kMaxRows], *ahead[kMaxRows];
                for (int f = begin, size; f < end; f += size) {
                    size = group_size(end - f);
                    for (int r = 0; r < size; ++r) {
                        rows[r] = weight_row(p, call.out[f + r]);
                        const bool last = f + size + r >= end;  // then the next position's first filters come
                        const int next = last ? std::min(begin + (f + size + r - end), end - 1) : f + size + r;
                        ahead[r] = weight_row(last && p + 1 < positions_ ? p + 1 : p, call.out[next]);
                    }
                    leaf_.gemm(rows, size, call.in, block.offsets, call.n_in, v, tiles,
                               block.products + (f - begin) * per_filter + p * block.ldv, per_filter, ahead);
                }
            }
            for (int f = begin; f < end; ++f) macs += put(call, call.out[f], block, block.products + (f - begin) * per_filter);
        }
        return macs;
    }

    const float* weight_row(int position, int o) const { return weights_.data() + (position * int64_t(y_.c) + o) * ldw_; }

    // Products -> pixels of filter o; returns the MACs that a direct conv takes for them.
    int64_t put(const ConvCall& call, int o, const Block& block, const float* products) const {
        float* pixels = block.line;
        leaf_.wino_output(m_, products, block.ldv, across_, block.rows, y_.w, pixels);
        const int first = block.row * m_, n = std::min(block.rows * m_, y_.h - first) * y_.w;
        const int64_t at = int64_t(o) * y_.area() + int64_t(first) * y_.w;
        leaf_.finish(pixels, n, op_.bias[o], call.residual ? call.residual + at : nullptr, op_.act, op_.slope, call.y + at,
                     call.peak ? call.peak + o : nullptr);
        return int64_t(call.n_in) * 9 * n;
    }

    const int m_, positions_;
    const Leaf& leaf_;
    const Op& op_;
    const Shape x_, y_;
    const int across_, down_;  // tiles
    const int64_t ldw_;
    std::vector<float> weights_;  // (position, filter, input)
};

}  // namespace

std::unique_ptr<AbstractConv> make_winograd(int m, const Leaf& leaf, const Op& op, Shape x, Shape y) {
    return std::make_unique<Winograd>(m, leaf, op, x, y);
}

}  // namespace cofire
