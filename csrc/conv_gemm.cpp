// Convs as sums over (input, tap): an output line is a sum of shifted input lines, so the same inner loop serves every
// kernel size, stride and dilation, on lists of filters and inputs.
#include "conv_common.h"

namespace cofire {

namespace {

// The weights of each filter in a row, rows a little apart.
class WeightRows {
   public:
    WeightRows(const Op& op, Shape x, Shape y, Arena& arena)
        : inputs_(x.c / op.groups),
          length_(inputs_ * op.kernel.h * op.kernel.w),
          pitch_(odd_lines(length_)),
          size_(y.c * pitch_ + kSlack),
          weights_(arena.take(size_)) {
        for (int o = 0; o < y.c; ++o) std::copy_n(op.weight + int64_t(o) * length_, length_, weights_ + o * pitch_);
    }

    int inputs() const { return inputs_; }  // that a filter reads
    Stretch all() const { return {weights_, size_}; }

    // Rows of the filters [f, f + size) of a call, and of those that come next before `end`.
    void rows(const ConvCall& call, int f, int size, int end, const float** rows, const float** ahead) const {
        for (int r = 0; r < size; ++r) {
            rows[r] = weights_ + call.out[f + r] * pitch_;
            ahead[r] = weights_ + call.out[std::min(f + size + r, end - 1)] * pitch_;
        }
    }

   private:
    int inputs_, length_;
    int64_t pitch_, size_;
    float* weights_;
};

constexpr int kNarrow = 8;

constexpr int64_t kInputs = 48 * 1024;  // floats of input that a block of output pixels reads
constexpr int kFewestColumns = 96, kMostColumns = 512;

// Inputs split by phase: an output line is a sum of shifted input lines. Where there is nothing to shift, a block of
// each input at a time is copied beside those of the others: planes are so far apart that every load would need a page
// and a place in the cache of its own.
class Gemm final : public AbstractConv {
   public:
    Gemm(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena)
        : kernels_(kernels),
          op_(op),
          x_(x),
          y_(y),
          phases_(op, x, y),
          taps_(op.kernel.h * op.kernel.w),
          weights_(op, x, y, arena),
          splits_(!lies_as_output(op, x, y)),
          plane_size_(odd_lines(phases_.size())) {
        const bool gapless = !splits_ || y.h == 1 || phases_.pitch() == y.w;
        pitch_ = gapless ? y.area() : phases_.pitch();
        lines_ = gapless ? 1 : y.h;
        length_ = gapless ? y.area() : y.w;
    }

    Stretch weights() const override { return weights_.all(); }

    int64_t room(int threads) const override {
        return 2 * tables_room() + source_room(threads) + threads * kMaxRows * sums_pitch() + kSlack;
    }

    int64_t run(const ConvCall& call, const Member& member) const override {
        int* wk = reinterpret_cast<int*>(call.room);
        int* xk = wk + tables_room();
        float* source = call.room + 2 * tables_room();
        float* sums = source + source_room(member.threads) + member.thread * kMaxRows * sums_pitch();
        if (!splits_) source += member.thread * block_room();
        const int columns = block_columns(call);
        if (splits_) {
            const Range mine = member.share(call.n_in);
            for (int k = mine.begin; k < mine.end; ++k)
                phases_.split(kernels_, call.x + int64_t(call.in[k]) * x_.area(), source + k * plane_size_);
        }
        if (member.first())
            for (int k = 0; k < call.n_in; ++k)
                for (int tap = 0; tap < taps_; ++tap) {
                    wk[k * taps_ + tap] = call.in[k] % weights_.inputs() * taps_ + tap;
                    xk[k * taps_ + tap] =
                        splits_ ? int(k * plane_size_) + phases_.taps()[tap] : int(k * odd_lines(columns));
                }
        member.meet();
        int64_t macs = 0;
        for (int group = 0, i = 0, f = 0; group < op_.groups; ++group) {
            int i_end = i, f_end = f;
            while (i_end < call.n_in && call.in[i_end] < (group + 1) * weights_.inputs()) ++i_end;
            while (f_end < call.n_out && call.out[f_end] < (group + 1) * (y_.c / op_.groups)) ++f_end;
            const Table table{wk + i * taps_, xk + i * taps_, (i_end - i) * taps_, call.in + i, source};
            macs += multiply(call, {f, f_end}, table, columns, sums, member);
            i = i_end, f = f_end;
        }
        return macs;
    }

   private:
    struct Table {
        const int *wk, *xk;
        int nk;
        const int* in;
        float* x;
    };

    int64_t tables_room() const { return up(int64_t(x_.c) * taps_, kLine); }
    int64_t sums_pitch() const { return odd_lines(std::max(kMostColumns, lines_ > 1 ? pitch_ : 0) + kSlack); }

    // Output pixels of a block.
    int block_columns(const ConvCall& call) const {
        const int64_t columns = kInputs / (int64_t(std::max(1, call.n_in)) * op_.stride.h * op_.stride.w);
        return int(up(std::min<int64_t>(std::max<int64_t>(columns, kFewestColumns), kMostColumns), kLine));
    }

    // Of a block's inputs, for any number of them; see block_columns and odd_lines.
    int64_t block_room() const { return std::max<int64_t>(kInputs, int64_t(kFewestColumns) * x_.c) + 3 * kLine * x_.c; }

    // All inputs split by phase, or a block of each for every thread; the slack keeps their readers off the sums.
    int64_t source_room(int threads) const { return (splits_ ? x_.c * plane_size_ : threads * block_room()) + kSlack; }

    // Blocks of whole lines where lines have gaps, else of columns.
    int64_t multiply(const ConvCall& call, Range filters, const Table& table, int columns, float* sums,
                     const Member& member) const {
        const int step = lines_ > 1 ? std::max(columns / pitch_, 1) : columns;
        const int total = lines_ > 1 ? lines_ : pitch_, blocks = (total + step - 1) / step;
        const bool by_block = blocks >= 2 * member.threads;  // few blocks: members share the filters instead
        const Range mine = by_block ? member.share(blocks) : Range{0, blocks};
        const Range part = by_block ? Range{0, filters.end - filters.begin} : member.share(filters.end - filters.begin);
        int64_t macs = 0;
        for (int block = mine.begin; block < mine.end; ++block) {
            const int begin = block * step, count = std::min(step, total - begin);
            const Lines lines = lines_ > 1
                                    ? Lines{begin * int64_t(pitch_), begin * int64_t(length_), count, pitch_, length_}
                                    : Lines{splits_ ? begin : 0, begin, 1, count, count};
            if (!splits_) copy_block(call, table, begin, count);
            macs += multiply_block(call, {filters.begin + part.begin, filters.begin + part.end}, table, sums, lines);
        }
        return macs;
    }

    // `count` pixels of each input, from `begin` on. The next input's come meanwhile: planes are far apart, each would
    // begin with a wait for memory.
    void copy_block(const ConvCall& call, const Table& table, int begin, int count) const {
        const auto pixels = [&](int k) { return call.x + int64_t(table.in[k]) * x_.area() + begin; };
        for (int k = 0; k < table.nk; ++k) {
            const float* next = pixels(std::min(k + 1, table.nk - 1));
            for (int i = 0; i < count; i += kLine) __builtin_prefetch(next + i);
            kernels_.take(pixels(k), 1, count, table.x + table.xk[k]);
        }
    }

    struct Lines {
        int64_t from, to;  // in a source, in an output plane
        int count, pitch, length;
    };

    int64_t multiply_block(const ConvCall& call, Range filters, const Table& table, float* sums,
                           const Lines& lines) const {
        const bool at_once = lines.length % kernels_.lanes == 0 && !call.residual && only_clamps(op_.act);
        const int n = at_once ? lines.length : (lines.count - 1) * lines.pitch + lines.length;
        int64_t macs = 0;
        for (int f = filters.begin, size; f < filters.end; f += size) {
            size = group_size(filters.end - f, best_rows(kernels_, n));
            const float *rows[kMaxRows], *ahead[kMaxRows];
            weights_.rows(call, f, size, filters.end, rows, ahead);
            macs += int64_t(size) * table.nk * lines.count * lines.length;
            if (at_once) {
                for (int line = 0; line < lines.count; ++line) {
                    Ending ending{op_.act, {}, {}, {}, {}};
                    for (int r = 0; r < size; ++r) {
                        const int o = call.out[f + r];
                        ending.factor[r] = call.factor[o];
                        ending.bias[r] = call.bias[o];
                        ending.y[r] = call.y + int64_t(o) * y_.area() + lines.to + line * lines.length;
                        ending.peak[r] = call.peak ? call.peak + o : nullptr;
                    }
                    kernels_.gemm_finished(rows, size, table.wk, table.xk, table.nk,
                                           table.x + lines.from + line * lines.pitch, n, ending,
                                           line == 0 ? ahead : nullptr, splits_);
                }
                call.upcoming->fetch();
                for (int r = 0; r < size && call.sum && lines.count * lines.length == y_.area(); ++r) {
                    const int o = call.out[f + r];
                    call.sum[o] = kernels_.sum(call.y + int64_t(o) * y_.area(), y_.area());
                }
                continue;
            }
            kernels_.gemm(rows, size, table.wk, table.xk, table.nk, table.x + lines.from, n, sums, sums_pitch(), ahead,
                          splits_);
            call.upcoming->fetch();
            for (int r = 0; r < size; ++r) {
                close_gaps(sums + r * sums_pitch(), lines.count, lines.pitch, lines.length);
                finish(kernels_, op_, call, call.out[f + r], sums + r * sums_pitch(), y_.area(), int(lines.to),
                       lines.count * lines.length);
            }
        }
        return macs;
    }

    const Kernels& kernels_;
    const Op& op_;
    const Shape x_, y_;
    const Phases phases_;
    const int taps_;
    const WeightRows weights_;
    const bool splits_;           // inputs by phase; else they lie as outputs do
    const int64_t plane_size_;    // floats of an input split by phase
    int pitch_, lines_, length_;  // output lines as the sums lie: one line without gaps, or y.h lines of `length_`
};

// Inputs copied tap by tap into panels (columns / width, input and tap, width) that the inner loop walks in one stream.
// The few columns that are left over are dot products along the weights, as in Dot.
class Im2col final : public AbstractConv {
   public:
    Im2col(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena)
        : kernels_(kernels),
          op_(op),
          x_(x),
          y_(y),
          phases_(op, x, y),
          taps_(op.kernel.h * op.kernel.w),
          plain_(lies_as_output(op, x, y)),
          pixels_(plain_ || y.w >= kNarrow ? std::vector<int>() : pixels_of(op, x, y)),
          weights_(op, x, y, arena),
          over_(y.area() % kernels.lanes <= 4 && y.area() > kernels.lanes ? y.area() % kernels.lanes : 0),
          width_(int(std::min<int64_t>(kernels.vectors * kernels.lanes, up(y.area() - over_, kernels.lanes)))),
          panels_((y.area() - over_ + width_ - 1) / width_) {}

    Stretch weights() const override { return weights_.all(); }

    int64_t room(int threads) const override {
        return 2 * table_room() + int64_t(panels_) * x_.c * taps_ * width_ + over_ * ldx() +
               threads * (kMaxRows * sums_pitch() + line_room());
    }

    int64_t run(const ConvCall& call, const Member& member) const override {
        const int nk = call.n_in * taps_;
        int* wk = reinterpret_cast<int*>(call.room);
        int* xk = wk + table_room();
        float* panels = call.room + 2 * table_room();
        float* over = panels + int64_t(panels_) * x_.c * taps_ * width_;
        float* sums = over + over_ * ldx() + member.thread * (kMaxRows * sums_pitch() + line_room());
        if (member.first()) {
            std::fill(over, over + over_ * ldx(), 0.0f);
            for (int k = 0; k < nk; ++k) {
                wk[k] = call.in[k / taps_] * taps_ + k % taps_;
                xk[k] = k * width_;
            }
        }
        member.meet();
        const Range mine = member.share(call.n_in);
        for (int k = mine.begin; k < mine.end; ++k) copy(call, k, nk, panels, over, sums + kMaxRows * sums_pitch());
        member.meet();
        const Range filters = member.share(call.n_out);
        const int block = int(std::max<int64_t>(2 * kInputs / (int64_t(std::max(nk, 1)) * width_), 1));
        for (int panel = 0; panel < panels_; panel += block)
            multiply(call, filters, {panel, std::min(panel + block, panels_)}, wk, xk, nk, panels, over, sums);
        return int64_t(filters.end - filters.begin) * nk * y_.area();
    }

   private:
    int64_t table_room() const { return up(int64_t(x_.c) * taps_, kLine); }
    int64_t line_room() const {
        return up(std::max<int64_t>(phases_.size(), x_.area() + 1), kLine) + up(y_.area(), kLine) + 2 * kSlack;
    }
    int64_t ldx() const { return odd_lines(int64_t(x_.c) * taps_); }
    int64_t sums_pitch() const { return odd_lines(int64_t(panels_) * width_ + over_ + kSlack); }

    void copy(const ConvCall& call, int k, int nk, float* panels, float* over, float* line) const {
        const float* plane = call.x + int64_t(call.in[k]) * x_.area();
        float* columns = line + line_room() - up(y_.area(), kLine) - kSlack;
        if (!pixels_.empty())
            *std::copy_n(plane, x_.area(), line) = 0;
        else if (!plain_)
            phases_.split(kernels_, plane, line);
        for (int tap = 0; tap < taps_; ++tap) {
            const float* from = plain_ ? plane : columns;
            if (!pixels_.empty())
                for (int i = 0; i < y_.area(); ++i) columns[i] = line[pixels_[tap * y_.area() + i]];
            else if (!plain_)
                for (int y = 0; y < y_.h; ++y)
                    kernels_.take(line + phases_.taps()[tap] + int64_t(y) * phases_.pitch(), 1, y_.w,
                                  columns + y * y_.w);
            const int full = (y_.area() - over_) / width_;
            float* to = panels + int64_t(k * taps_ + tap) * width_;
            for (int panel = 0; panel < full; ++panel, from += width_, to += int64_t(nk) * width_)
                kernels_.take(from, 1, width_, to);
            const int rest = y_.area() - over_ - full * width_;  // of a last panel that is not full
            std::copy_n(from, rest, to);
            for (int i = 0; i < over_; ++i) over[i * ldx() + int64_t(call.in[k]) * taps_ + tap] = from[rest + i];
        }
    }

    void multiply(const ConvCall& call, Range filters, Range panels, const int* wk, const int* xk, int nk,
                  const float* x, const float* over, float* sums) const {
        const bool last = panels.end == panels_;
        const int begin = panels.begin * width_, end = last ? y_.area() : panels.end * width_;
        for (int f = filters.begin, size; f < filters.end; f += size) {
            size = group_size(filters.end - f, best_rows(kernels_, y_.area() - over_));
            const float *rows[kMaxRows], *ahead[kMaxRows];
            weights_.rows(call, f, size, filters.end, rows, ahead);
            for (int panel = panels.begin; panel < panels.end; ++panel) {
                const int n = std::min(width_, y_.area() - over_ - panel * width_);
                kernels_.gemm(rows, size, wk, xk, nk, x + int64_t(panel) * nk * width_, n,
                              sums + panel * width_ - begin, sums_pitch(), panel == panels.begin ? ahead : nullptr,
                              false);
                call.upcoming->fetch();
            }
            if (last && over_)
                kernels_.dot(rows, size, x_.c * taps_, over, ldx(), over_, sums + y_.area() - over_ - begin,
                             sums_pitch(), rows);
            for (int r = 0; r < size; ++r)
                finish(kernels_, op_, call, call.out[f + r], sums + r * sums_pitch(), y_.area(), begin, end - begin);
        }
    }

    const Kernels& kernels_;
    const Op& op_;
    const Shape x_, y_;
    const Phases phases_;
    const int taps_;
    const bool plain_;               // inputs lie as outputs do
    const std::vector<int> pixels_;  // see pixels_of; empty for maps that are not narrow
    const WeightRows weights_;
    const int over_, width_, panels_;  // columns left over, columns of a panel, panels
};

}  // namespace

std::unique_ptr<AbstractConv> make_gemm(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena) {
    return std::make_unique<Gemm>(kernels, op, x, y, arena);
}
std::unique_ptr<AbstractConv> make_im2col(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena) {
    return std::make_unique<Im2col>(kernels, op, x, y, arena);
}

}  // namespace cofire
