// Convs as sums over (input, tap): an output line is a sum of shifted input lines, so the same inner loop serves every kernel
// size, stride and dilation, on lists of filters and inputs.
#include <cstring>

#include "conv_common.h"

namespace cofire {

Phases::Phases(const Op& op, Shape x, Shape y) : x_(x), stride_(op.stride), padding_(op.padding) {
    const int reach_h = (op.kernel.h - 1) * op.dilation.h, reach_w = (op.kernel.w - 1) * op.dilation.w;
    high_ = y.h + reach_h / stride_.h;  // lines of a phase that some tap of some output reads
    wide_ = y.w + reach_w / stride_.w;
    const int64_t phase = int64_t(high_) * wide_;
    size_ = phase * stride_.h * stride_.w;
    for (int ky = 0; ky < op.kernel.h; ++ky)
        for (int kx = 0; kx < op.kernel.w; ++kx) {
            const int dy = ky * op.dilation.h, dx = kx * op.dilation.w;
            taps_.push_back(int(((dy % stride_.h) * stride_.w + dx % stride_.w) * phase + dy / stride_.h * wide_ +
                                dx / stride_.w));
        }
}

void Phases::split(const float* plane, float* to) const {
    for (int py = 0; py < stride_.h; ++py)
        for (int px = 0; px < stride_.w; ++px)
            for (int line = 0; line < high_; ++line, to += wide_) {
                const int y = line * stride_.h + py - padding_.top;
                // columns [begin, end) of the phase lie inside the plane
                const int begin = std::min(std::max((padding_.left - px + stride_.w - 1) / stride_.w, 0), wide_);
                const int inside = (x_.w + padding_.left - px + stride_.w - 1) / stride_.w;
                const int end = y < 0 || y >= x_.h ? begin : std::min(std::max(inside, begin), wide_);
                std::fill(to, to + begin, 0.0f);
                const float* from = plane + int64_t(y) * x_.w + px - padding_.left;
                if (stride_.w == 1)
                    std::copy(from + begin, from + end, to + begin);
                else if (stride_.w == 2)
                    for (int i = begin; i < end; ++i) to[i] = from[2 * i];
                else
                    for (int i = begin; i < end; ++i) to[i] = from[int64_t(i) * stride_.w];
                std::fill(to + end, to + wide_, 0.0f);
            }
}

namespace {

constexpr int64_t kInputs = 48 * 1024;  // floats of input that a block of output pixels reads
constexpr int kMostColumns = 1024;

class Gemm final : public AbstractConv {
   public:
    // `columns`: inputs are copied tap by tap, which leaves no gaps between output lines: for small maps.
    Gemm(bool columns, const Leaf& leaf, const Op& op, Shape x, Shape y)
        : columns_(columns),
          leaf_(leaf),
          op_(op),
          x_(x),
          y_(y),
          phases_(op, x, y),
          taps_(op.kernel.h * op.kernel.w),
          in_per_group_(x.c / op.groups),
          out_per_group_(y.c / op.groups),
          ldw_(odd_lines(int64_t(in_per_group_) * taps_)),
          weights_(y.c * ldw_ + kSlack) {
        for (int o = 0; o < y.c; ++o)
            std::copy_n(op.weight + int64_t(o) * in_per_group_ * taps_, in_per_group_ * taps_, weights_.data() + o * ldw_);
        const bool as_is = !columns && taps_ == 1 && op.stride.h == 1 && op.stride.w == 1 && x == Shape{x.c, y.h, y.w} &&
                           op.padding.top == 0 && op.padding.left == 0;
        source_size_ = as_is ? x.area() : columns ? taps_ * up(y.area(), kLine) : odd_lines(phases_.size());
        copies_ = !as_is;
        const bool gapless = as_is || columns || y.h == 1 || phases_.pitch() == y.w;
        pitch_ = gapless ? y.area() : phases_.pitch();
        lines_ = gapless ? 1 : y.h;
        length_ = gapless ? y.area() : y.w;
    }

    const char* name() const override { return columns_ ? "im2col" : "gemm"; }

    int64_t room(int threads) const override {
        return 2 * tables_room() + (copies_ ? x_.c * source_size_ + phases_room() * threads : 0) + threads * sums_room() +
               kSlack;
    }

    int64_t run(const ConvCall& call, const Member& member) const override {
        int* wk = reinterpret_cast<int*>(call.room);
        int* xk = wk + tables_room();
        float* source = call.room + 2 * tables_room();
        float* sums = source + (copies_ ? x_.c * source_size_ + phases_room() * member.threads : 0) +
                      member.thread * sums_room();
        if (copies_) {
            const Range mine = member.share(call.n_in);
            float* phases = source + x_.c * source_size_ + phases_room() * member.thread;
            for (int k = mine.begin; k < mine.end; ++k)
                copy(call.x + int64_t(call.in[k]) * x_.area(), source + k * source_size_, phases);
        }
        if (member.first())
            for (int k = 0; k < call.n_in; ++k)
                for (int tap = 0; tap < taps_; ++tap) {
                    wk[k * taps_ + tap] = call.in[k] % in_per_group_ * taps_ + tap;
                    xk[k * taps_ + tap] = int((copies_ ? k : call.in[k]) * source_size_) + tap_offset(tap);
                }
        member.meet();
        int64_t macs = 0;
        for (int group = 0, i = 0, f = 0; group < op_.groups; ++group) {
            int i_end = i, f_end = f;
            while (i_end < call.n_in && call.in[i_end] < (group + 1) * in_per_group_) ++i_end;
            while (f_end < call.n_out && call.out[f_end] < (group + 1) * out_per_group_) ++f_end;
            const Table table{wk + i * taps_, xk + i * taps_, (i_end - i) * taps_, copies_ ? source : call.x};
            macs += multiply(call, {f, f_end}, table, sums, member);
            i = i_end, f = f_end;
        }
        return macs;
    }

   private:
    struct Table {
        const int *wk, *xk;
        int nk;
        const float* x;
    };

    int64_t tables_room() const { return up(int64_t(x_.c) * taps_, kLine); }
    int64_t phases_room() const { return columns_ ? odd_lines(phases_.size()) + kSlack : 0; }
    int64_t sums_room() const { return kMaxRows * sums_pitch(); }
    int64_t sums_pitch() const { return odd_lines(std::max(kMostColumns, pitch_ > kMostColumns && lines_ > 1 ? pitch_ : 0) + kSlack); }

    int tap_offset(int tap) const { return columns_ ? int(tap * up(y_.area(), kLine)) : phases_.taps()[tap] * copies_; }

    void copy(const float* plane, float* to, float* phases) const {
        if (!columns_) return phases_.split(plane, to);
        phases_.split(plane, phases);
        for (int tap = 0; tap < taps_; ++tap)
            for (int line = 0; line < y_.h; ++line)
                std::copy_n(phases + phases_.taps()[tap] + int64_t(line) * phases_.pitch(), y_.w,
                            to + tap_offset(tap) + line * y_.w);
    }

    // Blocks of whole lines where lines have gaps, else of columns.
    int64_t multiply(const ConvCall& call, Range filters, const Table& table, float* sums, const Member& member) const {
        const int n = filters.end - filters.begin;
        const int64_t per_column = std::max(1, table.nk / (columns_ ? 1 : taps_)) * (columns_ ? 1 : op_.stride.h * op_.stride.w);
        int64_t columns = std::min<int64_t>(std::max<int64_t>(kInputs / per_column, 96), kMostColumns);
        const int64_t all = int64_t(lines_) * pitch_;
        int step;  // lines, or columns
        if (lines_ > 1)
            step = int(std::max<int64_t>(columns / pitch_, 1));
        else
            step = int(up((all + (all + columns - 1) / columns - 1) / ((all + columns - 1) / columns), 16));
        const int total = lines_ > 1 ? lines_ : pitch_, blocks = (total + step - 1) / step;
        // Few blocks: members share the filters instead.
        const bool by_block = blocks >= 2 * member.threads;
        const Member alone{0, 1, nullptr};
        const Range mine_blocks = by_block ? member.share(blocks) : Range{0, blocks};
        const Range mine = (by_block ? alone : member).share(n);
        int64_t macs = 0;
        for (int block = mine_blocks.begin; block < mine_blocks.end; ++block) {
            const int begin = block * step, count = std::min(step, total - begin);
            macs += lines_ > 1 ? multiply_block(call, filters.begin + mine.begin, filters.begin + mine.end, table, sums,
                                                begin * pitch_, count, begin * length_)
                               : multiply_block(call, filters.begin + mine.begin, filters.begin + mine.end, table, sums, begin,
                                                count, begin);
        }
        return macs;
    }

    int64_t multiply_block(const ConvCall& call, int f, int end, const Table& table, float* sums, int64_t from, int count,
                           int64_t to) const {
        const int columns = lines_ > 1 ? (count - 1) * pitch_ + length_ : count, pixels = lines_ > 1 ? count * length_ : count;
        int64_t macs = 0;
        for (int size; f < end; f += size) {
            size = group_size(end - f);
            const float *rows[kMaxRows], *ahead[kMaxRows];
            for (int r = 0; r < size; ++r) {
                rows[r] = weights_.data() + call.out[f + r] * ldw_;
                ahead[r] = weights_.data() + call.out[std::min(f + size + r, end - 1)] * ldw_;
            }
            leaf_.gemm(rows, size, table.wk, table.xk, table.nk, table.x + from, columns, sums, sums_pitch(), ahead);
            for (int r = 0; r < size; ++r) {
                if (lines_ > 1) close_gaps(sums + r * sums_pitch(), count, pitch_, length_);
                const int o = call.out[f + r];
                const int64_t at = int64_t(o) * y_.area() + to;
                leaf_.finish(sums + r * sums_pitch(), pixels, op_.bias[o], call.residual ? call.residual + at : nullptr,
                             op_.act, op_.slope, call.y + at, call.peak ? call.peak + o : nullptr);
            }
            macs += int64_t(size) * table.nk * pixels;
        }
        return macs;
    }

    const bool columns_;
    const Leaf& leaf_;
    const Op& op_;
    const Shape x_, y_;
    const Phases phases_;
    const int taps_, in_per_group_, out_per_group_;
    const int64_t ldw_;
    Floats weights_;
    bool copies_;
    int64_t source_size_;           // floats of one input in the table's x
    int pitch_, lines_, length_;  // output lines as the sums lie: one line without gaps, or y.h lines of `length_`
};

// Maps of a few pixels, linear layers among them: a dot product along the weights for each pixel. The weights are what
// takes the time, so inputs that are off are zeros here and only filters are skipped.
class Dot final : public AbstractConv {
   public:
    Dot(const Leaf& leaf, const Op& op, Shape x, Shape y)
        : leaf_(leaf), op_(op), x_(x), y_(y), phases_(op, x, y), taps_(op.kernel.h * op.kernel.w), nk_(x.c * taps_) {}

    const char* name() const override { return "dot"; }
    int64_t room(int) const override { return y_.area() * ldx() + up(phases_.size(), kLine) + kSlack; }

    int64_t run(const ConvCall& call, const Member& member) const override {
        float* columns = call.room;
        if (member.first()) gather(call, columns, call.room + y_.area() * ldx());
        member.meet();
        const Range mine = member.share(call.n_out);
        float sums[4];
        for (int f = mine.begin; f < mine.end; ++f) {
            const int o = call.out[f];
            const int64_t at = int64_t(o) * y_.area();
            leaf_.dot(op_.weight + int64_t(o) * nk_, nk_, columns, ldx(), y_.area(), sums);
            leaf_.finish(sums, y_.area(), op_.bias[o], call.residual ? call.residual + at : nullptr, op_.act, op_.slope,
                         call.y + at, call.peak ? call.peak + o : nullptr);
        }
        return int64_t(mine.end - mine.begin) * call.n_in * taps_ * y_.area();
    }

   private:
    int64_t ldx() const { return odd_lines(nk_); }

    void gather(const ConvCall& call, float* columns, float* phases) const {
        std::fill(columns, columns + y_.area() * ldx(), 0.0f);
        for (int k = 0; k < call.n_in; ++k) {
            const float* plane = call.x + int64_t(call.in[k]) * x_.area();
            phases_.split(plane, phases);
            for (int pixel = 0; pixel < y_.area(); ++pixel)
                for (int tap = 0; tap < taps_; ++tap)
                    columns[pixel * ldx() + int64_t(call.in[k]) * taps_ + tap] =
                        phases[phases_.taps()[tap] + pixel / y_.w * phases_.pitch() + pixel % y_.w];
        }
    }

    const Leaf& leaf_;
    const Op& op_;
    const Shape x_, y_;
    const Phases phases_;
    const int taps_, nk_;
};

class Depthwise final : public AbstractConv {
   public:
    Depthwise(const Leaf& leaf, const Op& op, Shape x, Shape y)
        : leaf_(leaf), op_(op), x_(x), y_(y), phases_(op, x, y), taps_(op.kernel.h * op.kernel.w) {}

    const char* name() const override { return "depthwise"; }
    int64_t room(int threads) const override { return up(taps_, kLine) + threads * own_room(); }

    int64_t run(const ConvCall& call, const Member& member) const override {
        int* steps = reinterpret_cast<int*>(call.room);
        if (member.first())
            for (int tap = 0; tap < taps_; ++tap) steps[tap] = tap;
        member.meet();
        float* plane = call.room + up(taps_, kLine) + member.thread * own_room();
        float* sums = plane + up(phases_.size(), kLine) + kSlack;
        const int columns = (y_.h - 1) * phases_.pitch() + y_.w;
        const Range mine = member.share(call.n_out);
        const int* live = std::lower_bound(call.in, call.in + call.n_in, mine.begin < mine.end ? call.out[mine.begin] : 0);
        int64_t macs = 0;
        for (int f = mine.begin; f < mine.end; ++f) {
            const int o = call.out[f];
            while (live < call.in + call.n_in && *live < o) ++live;
            if (live < call.in + call.n_in && *live == o) {
                const float* weights = op_.weight + int64_t(o) * taps_;
                phases_.split(call.x + int64_t(o) * x_.area(), plane);
                leaf_.gemm(&weights, 1, steps, phases_.taps().data(), taps_, plane, columns, sums, 0, nullptr);
                close_gaps(sums, y_.h, phases_.pitch(), y_.w);
                macs += int64_t(taps_) * y_.area();
            } else {
                std::fill(sums, sums + y_.area(), 0.0f);
            }
            const int64_t at = int64_t(o) * y_.area();
            leaf_.finish(sums, y_.area(), op_.bias[o], call.residual ? call.residual + at : nullptr, op_.act, op_.slope,
                         call.y + at, call.peak ? call.peak + o : nullptr);
        }
        return macs;
    }

   private:
    int64_t own_room() const { return up(phases_.size(), kLine) + kSlack + up(int64_t(y_.h) * phases_.pitch(), kLine) + 2 * kSlack; }

    const Leaf& leaf_;
    const Op& op_;
    const Shape x_, y_;
    const Phases phases_;
    const int taps_;
};

}  // namespace

std::unique_ptr<AbstractConv> make_gemm(bool columns, const Leaf& leaf, const Op& op, Shape x, Shape y) {
    return std::make_unique<Gemm>(columns, leaf, op, x, y);
}
std::unique_ptr<AbstractConv> make_dot(const Leaf& leaf, const Op& op, Shape x, Shape y) {
    return std::make_unique<Dot>(leaf, op, x, y);
}
std::unique_ptr<AbstractConv> make_depthwise(const Leaf& leaf, const Op& op, Shape x, Shape y) {
    return std::make_unique<Depthwise>(leaf, op, x, y);
}

}  // namespace cofire
