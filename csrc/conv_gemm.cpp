// Convs as sums over (input, tap): an output line is a sum of shifted input lines, so the same inner loop serves every
// kernel size, stride and dilation, on lists of filters and inputs.
#include <cstring>

#include "conv_common.h"

namespace cofire {

Phases::Phases(const Op& op, Shape x, Shape y) : x_(x), stride_(op.stride), padding_(op.padding) {
    const int reach_h = (op.kernel.h - 1) * op.dilation.h, reach_w = (op.kernel.w - 1) * op.dilation.w;
    high_ = y.h + reach_h / stride_.h;  // lines of a phase that some tap of some output reads
    wide_ = y.w + reach_w / stride_.w;
    const int64_t phase = int64_t(high_) * wide_;
    size_ = phase * stride_.h * stride_.w;
    read_.resize(stride_.h * stride_.w);
    for (int ky = 0; ky < op.kernel.h; ++ky)
        for (int kx = 0; kx < op.kernel.w; ++kx) {
            const int dy = ky * op.dilation.h, dx = kx * op.dilation.w;
            const int number = dy % stride_.h * stride_.w + dx % stride_.w;
            taps_.push_back(int(number * phase + dy / stride_.h * wide_ + dx / stride_.w));
            read_[number] = true;
        }
}

void Phases::split(const Leaf& leaf, const float* plane, float* to) const {
    for (int py = 0; py < stride_.h; ++py)
        for (int px = 0; px < stride_.w; ++px) {
            if (!read_[py * stride_.w + px]) {
                to += int64_t(high_) * wide_;
                continue;
            }
            // columns [begin, end) of the phase lie inside the plane
            const int begin = std::min(std::max((padding_.left - px + stride_.w - 1) / stride_.w, 0), wide_);
            const int inside = (x_.w + padding_.left - px + stride_.w - 1) / stride_.w;
            const int end = std::min(std::max(inside, begin), wide_);
            for (int line = 0; line < high_; ++line, to += wide_) {
                const int y = line * stride_.h + py - padding_.top;
                const bool outside = y < 0 || y >= x_.h;
                for (int i = 0; i < (outside ? wide_ : begin); ++i) to[i] = 0;
                if (outside) continue;
                leaf.take(plane + int64_t(y) * x_.w + int64_t(begin) * stride_.w + px - padding_.left, stride_.w,
                          end - begin, to + begin);
                for (int i = end; i < wide_; ++i) to[i] = 0;
            }
        }
}

namespace {

// The weights of each filter in a row, rows a little apart.
class WeightRows {
   public:
    WeightRows(const Op& op, Shape x, Shape y)
        : inputs_(x.c / op.groups),
          length_(inputs_ * op.kernel.h * op.kernel.w),
          pitch_(odd_lines(length_)),
          weights_(y.c * pitch_ + kSlack) {
        for (int o = 0; o < y.c; ++o)
            std::copy_n(op.weight + int64_t(o) * length_, length_, weights_.data() + o * pitch_);
    }

    int inputs() const { return inputs_; }  // that a filter reads
    Stretch all() const { return {weights_.data(), weights_.size()}; }

    // Rows of the filters [f, f + size) of a call, and of those that come next before `end`.
    void rows(const ConvCall& call, int f, int size, int end, const float** rows, const float** ahead) const {
        for (int r = 0; r < size; ++r) {
            rows[r] = weights_.data() + call.out[f + r] * pitch_;
            ahead[r] = weights_.data() + call.out[std::min(f + size + r, end - 1)] * pitch_;
        }
    }

   private:
    int inputs_, length_;
    int64_t pitch_;
    Floats weights_;
};

// For maps too narrow for whole lines: where each tap of each output pixel lies in the plane, which is `x.area()`, the
// place of a zero, if it lies outside. (tap, pixel).
std::vector<int> pixels_of(const Op& op, Shape x, Shape y) {
    std::vector<int> found;
    for (int ky = 0; ky < op.kernel.h; ++ky)
        for (int kx = 0; kx < op.kernel.w; ++kx)
            for (int oy = 0; oy < y.h; ++oy)
                for (int ox = 0; ox < y.w; ++ox) {
                    const int iy = oy * op.stride.h + ky * op.dilation.h - op.padding.top;
                    const int ix = ox * op.stride.w + kx * op.dilation.w - op.padding.left;
                    const bool inside = iy >= 0 && iy < x.h && ix >= 0 && ix < x.w;
                    found.push_back(inside ? iy * x.w + ix : x.area());
                }
    return found;
}

constexpr int kNarrow = 8;

constexpr int64_t kInputs = 48 * 1024;  // floats of input that a block of output pixels reads
constexpr int kMostColumns = 512;

// Inputs as they lie, or split by phase: an output line is a sum of shifted input lines.
class Gemm final : public AbstractConv {
   public:
    Gemm(const Leaf& leaf, const Op& op, Shape x, Shape y)
        : leaf_(leaf),
          op_(op),
          x_(x),
          y_(y),
          phases_(op, x, y),
          taps_(op.kernel.h * op.kernel.w),
          weights_(op, x, y),
          copies_(!(taps_ == 1 && op.stride.h == 1 && op.stride.w == 1 && x.area() == y.area() && op.padding.top == 0 &&
                    op.padding.left == 0)),
          source_size_(copies_ ? odd_lines(phases_.size()) : x.area()) {
        const bool gapless = !copies_ || y.h == 1 || phases_.pitch() == y.w;
        pitch_ = gapless ? y.area() : phases_.pitch();
        lines_ = gapless ? 1 : y.h;
        length_ = gapless ? y.area() : y.w;
    }

    const char* name() const override { return "gemm"; }
    Stretch weights() const override { return weights_.all(); }

    int64_t room(int threads) const override {
        return 2 * tables_room() + (copies_ ? x_.c * source_size_ : 0) + threads * kMaxRows * sums_pitch() + kSlack;
    }

    int64_t run(const ConvCall& call, const Member& member) const override {
        int* wk = reinterpret_cast<int*>(call.room);
        int* xk = wk + tables_room();
        float* source = call.room + 2 * tables_room();
        float* sums = source + (copies_ ? x_.c * source_size_ : 0) + member.thread * kMaxRows * sums_pitch();
        if (copies_) {
            const Range mine = member.share(call.n_in);
            for (int k = mine.begin; k < mine.end; ++k)
                phases_.split(leaf_, call.x + int64_t(call.in[k]) * x_.area(), source + k * source_size_);
        }
        if (member.first())
            for (int k = 0; k < call.n_in; ++k)
                for (int tap = 0; tap < taps_; ++tap) {
                    wk[k * taps_ + tap] = call.in[k] % weights_.inputs() * taps_ + tap;
                    xk[k * taps_ + tap] =
                        int((copies_ ? k : call.in[k]) * source_size_) + (copies_ ? phases_.taps()[tap] : 0);
                }
        member.meet();
        int64_t macs = 0;
        for (int group = 0, i = 0, f = 0; group < op_.groups; ++group) {
            int i_end = i, f_end = f;
            while (i_end < call.n_in && call.in[i_end] < (group + 1) * weights_.inputs()) ++i_end;
            while (f_end < call.n_out && call.out[f_end] < (group + 1) * (y_.c / op_.groups)) ++f_end;
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
    int64_t sums_pitch() const { return odd_lines(std::max(kMostColumns, lines_ > 1 ? pitch_ : 0) + kSlack); }

    // Blocks of whole lines where lines have gaps, else of columns.
    int64_t multiply(const ConvCall& call, Range filters, const Table& table, float* sums, const Member& member) const {
        const int64_t per_column = std::max(1, table.nk / taps_) * op_.stride.h * op_.stride.w;
        const int64_t columns = std::min<int64_t>(std::max<int64_t>(kInputs / per_column, 96), kMostColumns);
        const int step = int(lines_ > 1 ? std::max<int64_t>(columns / pitch_, 1) : up(columns, kLine));
        const int total = lines_ > 1 ? lines_ : pitch_, blocks = (total + step - 1) / step;
        const bool by_block = blocks >= 2 * member.threads;  // few blocks: members share the filters instead
        const Range mine = by_block ? member.share(blocks) : Range{0, blocks};
        const Range part = by_block ? Range{0, filters.end - filters.begin} : member.share(filters.end - filters.begin);
        int64_t macs = 0;
        for (int block = mine.begin; block < mine.end; ++block) {
            const int begin = block * step, count = std::min(step, total - begin);
            const Lines lines = lines_ > 1
                                    ? Lines{begin * int64_t(pitch_), begin * int64_t(length_), count, pitch_, length_}
                                    : Lines{begin, begin, 1, count, count};
            macs += multiply_block(call, {filters.begin + part.begin, filters.begin + part.end}, table, sums, lines);
        }
        return macs;
    }

    struct Lines {
        int64_t from, to;  // in a source, in an output plane
        int count, pitch, length;
    };

    int64_t multiply_block(const ConvCall& call, Range filters, const Table& table, float* sums,
                           const Lines& lines) const {
        int64_t macs = 0;
        for (int f = filters.begin, size; f < filters.end; f += size) {
            size = group_size(filters.end - f);
            const float *rows[kMaxRows], *ahead[kMaxRows];
            weights_.rows(call, f, size, filters.end, rows, ahead);
            macs += int64_t(size) * table.nk * lines.count * lines.length;
            if (lines.count == 1 && lines.length % leaf_.lanes == 0 && !call.residual && only_clamps(op_.act)) {
                Ending ending{op_.act, {}, {}, {}};
                for (int r = 0; r < size; ++r) {
                    const int o = call.out[f + r];
                    ending.bias[r] = op_.bias[o];
                    ending.y[r] = call.y + int64_t(o) * y_.area() + lines.to;
                    ending.peak[r] = call.peak ? call.peak + o : nullptr;
                }
                leaf_.gemm_finished(rows, size, table.wk, table.xk, table.nk, table.x + lines.from, lines.length,
                                    ending, ahead);
                call.upcoming->fetch();
                continue;
            }
            leaf_.gemm(rows, size, table.wk, table.xk, table.nk, table.x + lines.from,
                       (lines.count - 1) * lines.pitch + lines.length, sums, sums_pitch(), ahead, true);
            call.upcoming->fetch();
            for (int r = 0; r < size; ++r) {
                close_gaps(sums + r * sums_pitch(), lines.count, lines.pitch, lines.length);
                const int o = call.out[f + r];
                const int64_t at = int64_t(o) * y_.area() + lines.to;
                leaf_.finish(sums + r * sums_pitch(), lines.count * lines.length, op_.bias[o],
                             call.residual ? call.residual + at : nullptr, op_.act, op_.slope, call.y + at,
                             call.peak ? call.peak + o : nullptr);
            }
        }
        return macs;
    }

    const Leaf& leaf_;
    const Op& op_;
    const Shape x_, y_;
    const Phases phases_;
    const int taps_;
    const WeightRows weights_;
    const bool copies_;
    const int64_t source_size_;   // floats of one input in the table's x
    int pitch_, lines_, length_;  // output lines as the sums lie: one line without gaps, or y.h lines of `length_`
};

// Inputs copied tap by tap into panels (columns / width, input and tap, width) that the inner loop walks in one stream.
// The few columns that are left over are dot products along the weights, as in Dot.
class Im2col final : public AbstractConv {
   public:
    Im2col(const Leaf& leaf, const Op& op, Shape x, Shape y)
        : leaf_(leaf),
          op_(op),
          x_(x),
          y_(y),
          phases_(op, x, y),
          taps_(op.kernel.h * op.kernel.w),
          plain_(taps_ == 1 && op.stride.h == 1 && op.stride.w == 1 && x.area() == y.area() && op.padding.top == 0 &&
                 op.padding.left == 0),
          pixels_(plain_ || y.w >= kNarrow ? std::vector<int>() : pixels_of(op, x, y)),
          weights_(op, x, y),
          width_(2 * leaf.lanes),
          over_(y.area() % width_ <= 4 && y.area() > width_ ? y.area() % width_ : 0),
          panels_((y.area() - over_ + width_ - 1) / width_) {}

    const char* name() const override { return "im2col"; }
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
            phases_.split(leaf_, plane, line);
        for (int tap = 0; tap < taps_; ++tap) {
            const float* from = plain_ ? plane : columns;
            if (!pixels_.empty())
                for (int i = 0; i < y_.area(); ++i) columns[i] = line[pixels_[tap * y_.area() + i]];
            else if (!plain_)
                for (int y = 0; y < y_.h; ++y)
                    leaf_.take(line + phases_.taps()[tap] + int64_t(y) * phases_.pitch(), 1, y_.w, columns + y * y_.w);
            const int full = (y_.area() - over_) / width_;
            float* to = panels + int64_t(k * taps_ + tap) * width_;
            for (int panel = 0; panel < full; ++panel, from += width_, to += int64_t(nk) * width_)
                leaf_.take(from, 1, width_, to);
            if (full < panels_) std::copy_n(from, y_.area() - full * width_, to);
            for (int i = 0; i < over_; ++i) over[i * ldx() + int64_t(call.in[k]) * taps_ + tap] = from[i];
        }
    }

    void multiply(const ConvCall& call, Range filters, Range panels, const int* wk, const int* xk, int nk,
                  const float* x, const float* over, float* sums) const {
        const bool last = panels.end == panels_;
        const int begin = panels.begin * width_, end = last ? y_.area() : panels.end * width_;
        for (int f = filters.begin, size; f < filters.end; f += size) {
            size = group_size(filters.end - f);
            const float *rows[kMaxRows], *ahead[kMaxRows];
            weights_.rows(call, f, size, filters.end, rows, ahead);
            for (int panel = panels.begin; panel < panels.end; ++panel) {
                const int n = std::min(width_, y_.area() - over_ - panel * width_);
                leaf_.gemm(rows, size, wk, xk, nk, x + int64_t(panel) * nk * width_, n, sums + panel * width_ - begin,
                           sums_pitch(), panel == panels.begin ? ahead : nullptr, false);
                call.upcoming->fetch();
            }
            if (last && over_)
                leaf_.dot(rows, size, x_.c * taps_, over, ldx(), over_, sums + y_.area() - over_ - begin, sums_pitch(),
                          rows);
            for (int r = 0; r < size; ++r) {
                const int o = call.out[f + r];
                const float* row = sums + r * sums_pitch();
                const int64_t at = int64_t(o) * y_.area() + begin;
                leaf_.finish(row, end - begin, op_.bias[o], call.residual ? call.residual + at : nullptr, op_.act,
                             op_.slope, call.y + at, call.peak ? call.peak + o : nullptr);
            }
        }
    }

    const Leaf& leaf_;
    const Op& op_;
    const Shape x_, y_;
    const Phases phases_;
    const int taps_;
    const bool plain_;               // inputs lie as outputs do
    const std::vector<int> pixels_;  // see pixels_of; empty for maps that are not narrow
    const WeightRows weights_;
    const int width_, over_, panels_;  // columns of a panel, columns left over, panels
};

// Maps of a few pixels, linear layers among them: a dot product along the weights for each pixel. The weights are what
// takes the time, so inputs that are off are zeros here and only filters are skipped.
class Dot final : public AbstractConv {
   public:
    Dot(const Leaf& leaf, const Op& op, Shape x, Shape y)
        : leaf_(leaf),
          op_(op),
          x_(x),
          y_(y),
          taps_(op.kernel.h * op.kernel.w),
          nk_(x.c * taps_),
          pixels_(pixels_of(op, x, y)) {}

    const char* name() const override { return "dot"; }
    Stretch weights() const override { return {op_.weight, int64_t(y_.c) * nk_}; }
    int64_t room(int) const override { return y_.area() * ldx() + up(x_.area() + 1, kLine) + kSlack; }

    int64_t run(const ConvCall& call, const Member& member) const override {
        float* columns = call.room;
        if (member.first()) gather(call, columns, call.room + y_.area() * ldx());
        member.meet();
        const Range mine = member.share(call.n_out);
        float sums[kMaxRows * kFewPixels];
        for (int f = mine.begin, size; f < mine.end; f += size) {
            size = std::min(kMaxRows, mine.end - f);
            const float *rows[kMaxRows], *ahead[kMaxRows];
            for (int r = 0; r < size; ++r) {
                rows[r] = op_.weight + int64_t(call.out[f + r]) * nk_;
                ahead[r] = op_.weight + int64_t(call.out[std::min(f + size + r, mine.end - 1)]) * nk_;
            }
            leaf_.dot(rows, size, nk_, columns, ldx(), y_.area(), sums, kFewPixels, ahead);
            for (int r = 0; r < size; ++r) {
                const int o = call.out[f + r];
                const int64_t at = int64_t(o) * y_.area();
                leaf_.finish(sums + r * kFewPixels, y_.area(), op_.bias[o],
                             call.residual ? call.residual + at : nullptr, op_.act, op_.slope, call.y + at,
                             call.peak ? call.peak + o : nullptr);
            }
        }
        return int64_t(mine.end - mine.begin) * call.n_in * taps_ * y_.area();
    }

   private:
    int64_t ldx() const { return odd_lines(nk_); }

    void gather(const ConvCall& call, float* columns, float* plane) const {
        std::fill(columns, columns + y_.area() * ldx(), 0.0f);
        for (int k = 0; k < call.n_in; ++k) {
            *std::copy_n(call.x + int64_t(call.in[k]) * x_.area(), x_.area(), plane) = 0;
            float* to = columns + int64_t(call.in[k]) * taps_;
            for (int tap = 0, i = 0; tap < taps_; ++tap)
                for (int pixel = 0; pixel < y_.area(); ++pixel, ++i) to[pixel * ldx() + tap] = plane[pixels_[i]];
        }
    }

    const Leaf& leaf_;
    const Op& op_;
    const Shape x_, y_;
    const int taps_, nk_;
    const std::vector<int> pixels_;
};

class Depthwise final : public AbstractConv {
   public:
    Depthwise(const Leaf& leaf, const Op& op, Shape x, Shape y)
        : leaf_(leaf),
          op_(op),
          x_(x),
          y_(y),
          phases_(op, x, y),
          taps_(op.kernel.h * op.kernel.w),
          direct_(op.kernel.h == 3 && op.kernel.w == 3 && op.dilation.h * op.dilation.w == 1 &&
                  op.stride.h == op.stride.w && op.stride.h <= 2 &&
                  std::max({op.padding.top, op.padding.left, op.padding.bottom, op.padding.right}) <= 1) {}

    const char* name() const override { return "depthwise"; }
    Stretch weights() const override { return {op_.weight, int64_t(y_.c) * taps_}; }
    int64_t room(int threads) const override { return threads * own_room(); }

    int64_t run(const ConvCall& call, const Member& member) const override {
        float* plane = call.room + member.thread * own_room();
        float* sums = plane + plane_room();
        if (direct_) std::fill_n(plane, x_.w + kSlack, 0.0f);
        const Range mine = member.share(call.n_out);
        const int* live =
            std::lower_bound(call.in, call.in + call.n_in, mine.begin < mine.end ? call.out[mine.begin] : 0);
        int64_t macs = 0;
        for (int f = mine.begin; f < mine.end; ++f) {
            const int o = call.out[f];
            while (live < call.in + call.n_in && *live < o) ++live;
            const bool reads = live < call.in + call.n_in && *live == o;  // a dead input leaves the bias
            const int64_t at = int64_t(o) * y_.area();
            float* peak = call.peak ? call.peak + o : nullptr;
            if (reads && !call.residual) {
                filter(call, o, op_.bias[o], op_.act, plane, call.y + at, peak);
            } else {
                std::fill(sums, sums + y_.area(), 0.0f);
                if (reads) filter(call, o, 0, Act::none, plane, sums, nullptr);
                leaf_.finish(sums, y_.area(), op_.bias[o], call.residual ? call.residual + at : nullptr, op_.act,
                             op_.slope, call.y + at, peak);
            }
            macs += reads ? int64_t(taps_) * y_.area() : 0;
        }
        return macs;
    }

   private:
    int64_t plane_room() const { return up(std::max<int64_t>(phases_.size(), x_.w), kLine) + kSlack; }
    int64_t own_room() const { return plane_room() + up(y_.area(), kLine) + kSlack; }

    // `plane`: zeros where the taps read from the input itself, else room for its phases
    void filter(const ConvCall& call, int o, float bias, Act act, float* plane, float* y, float* peak) const {
        const float *x = call.x + int64_t(o) * x_.area(), *weights = op_.weight + int64_t(o) * taps_;
        if (direct_) {
            leaf_.depthwise3(x, x_, op_.stride.h, op_.padding.top, op_.padding.left, plane, weights, y_, bias, act,
                             op_.slope, y, peak);
        } else {
            phases_.split(leaf_, x, plane);
            leaf_.depthwise(plane, phases_.pitch(), phases_.taps().data(), weights, taps_, y_.h, y_.w, bias, act,
                            op_.slope, y, peak);
        }
    }

    const Leaf& leaf_;
    const Op& op_;
    const Shape x_, y_;
    const Phases phases_;
    const int taps_;
    const bool direct_;
};

}  // namespace

std::unique_ptr<AbstractConv> make_gemm(const Leaf& leaf, const Op& op, Shape x, Shape y) {
    return std::make_unique<Gemm>(leaf, op, x, y);
}
std::unique_ptr<AbstractConv> make_im2col(const Leaf& leaf, const Op& op, Shape x, Shape y) {
    return std::make_unique<Im2col>(leaf, op, x, y);
}
std::unique_ptr<AbstractConv> make_dot(const Leaf& leaf, const Op& op, Shape x, Shape y) {
    return std::make_unique<Dot>(leaf, op, x, y);
}
std::unique_ptr<AbstractConv> make_depthwise(const Leaf& leaf, const Op& op, Shape x, Shape y) {
    return std::make_unique<Depthwise>(leaf, op, x, y);
}

}  // namespace cofire
