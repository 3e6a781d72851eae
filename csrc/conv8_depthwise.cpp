// Depthwise convs on bytes: a filter at a time, with the taps of a kernel's line in words, as channels are elsewhere.
#include "conv8_common.h"

namespace cofire {
namespace {

// The tables of Kernels8::depthwise for a conv, if they are small enough.
class Tables8 {
   public:
    Tables8(const Kernels8& kernels, const Op& op, Shape x, Shape y, int words) {
        const int stride = op.stride.w, width = std::min(y.w, kernels.lanes);
        const int reach =
            (width - 1) * stride + (words * kernels.channels - 1) * op.dilation.w + 1;  // of a line's taps
        const bool narrow = y.w == width;
        const int pitch = narrow ? std::max(reach, op.padding.left + x.w) : reach;  // bytes of a table's line
        while (narrow && (rows_ + 1) * width <= kernels.lanes && (rows_ * op.stride.h + 1) * pitch <= kTable) ++rows_;
        fits_ = kernels.depthwise && pitch <= kTable;
        if (!fits_) return;
        const auto ones = [](int from, int to) {  // bits
            uint64_t bits = 0;
            for (int i = std::max(from, 0); i < std::min(to, kTable); ++i) bits |= uint64_t(1) << i;
            return bits;
        };
        for (int first = 0; first < y.w; first += width) {
            const int left = first * stride - op.padding.left;  // the column of the table's first byte
            // A narrow map's tables hold whole lines of the plane, whose insides the tables have.
            strips_.push_back({first, std::min(width, y.w - first), std::min(std::max(left, 0), x.w),
                               narrow ? ~uint64_t(0) : ones(-left, x.w - left)});
        }
        for (int line = 0; line < y.h; line += rows_)
            for (int ky = 0; ky < op.kernel.h; ++ky) {
                const int top = line * op.stride.h + ky * op.dilation.h - op.padding.top;
                Table8 table{int64_t(std::min(std::max(top, 0), x.h - 1)) * x.w, 0};
                for (int l = 0; l <= (rows_ - 1) * op.stride.h; ++l)
                    if (top + l >= 0 && top + l < x.h)
                        table.inside |= narrow ? ones(l * pitch + op.padding.left, l * pitch + op.padding.left + x.w)
                                               : ~uint64_t(0);
                tables_.push_back(table);
            }
        for (int word = 0; word < words; ++word)
            for (int lane = 0; lane < kernels.lanes; ++lane)
                for (int c = 0; c < kernels.channels; ++c) {
                    const int place = lane / width * op.stride.h * pitch + lane % width * stride +
                                      (word * kernels.channels + c) * op.dilation.w;
                    order_.push_back(uint8_t(place % kTable));  // lanes past the last line do not count
                }
    }

    bool fit() const { return fits_; }
    Depthwise8Map map(const Op& op, Shape y, int words, int zero_in) const {
        const bool rolls = rows_ == 1 && op.stride.h == 1 && op.dilation.h == 1;
        return {
            rows_,          y.h,          y.w, op.kernel.h, words, zero_in, rolls, strips_.data(), int(strips_.size()),
            tables_.data(), order_.data()};
    }

   private:
    static constexpr int kTable = 64;  // bytes

    int rows_ = 1;
    bool fits_ = false;
    std::vector<Strip8> strips_;
    std::vector<Table8> tables_;
    std::vector<uint8_t> order_;
};

// Those of Kernels8::depthwise_lines, if 16 bytes are enough for half a vector.
class Lines8 {
   public:
    Lines8(const Kernels8& kernels, const Op& op, const Quantized& q, Shape x, Shape y, int words) : x_(x), y_(y) {
        const int half = kernels.lanes / 2, stride = op.stride.w;
        fits_ = kernels.depthwise_lines && (half - 1) * stride + (op.kernel.w - 1) * op.dilation.w < kReach;
        if (!fits_) return;
        for (int first = 0; first < y.w; first += kernels.lanes) {
            const auto inside = [&](int column) {  // of the plane, from which the first tap there is reads
                return std::min(std::max(column * stride - op.padding.left, 0), x.w - 1);
            };
            const int at[2] = {inside(first), inside(first + half)};
            strips_.push_back({first, std::min(kernels.lanes, y.w - first), at[0], at[1] - at[0]});
            for (int word = 0; word < words; ++word)
                for (int lane = 0; lane < kernels.lanes; ++lane)
                    for (int tap = word * kernels.channels; tap < (word + 1) * kernels.channels; ++tap) {
                        const int place = (first + lane) * stride + tap * op.dilation.w - op.padding.left;
                        const bool counts = first + lane < y.w && tap < op.kernel.w, reads = place >= 0 && place < x.w;
                        const int bytes = 4 / kernels.channels;
                        order_.push_back(counts && reads ? uint8_t(place - at[lane / half]) : kNone);
                        paddings_.push_back(counts && !reads ? uint8_t(q.zero_in) : uint8_t(0));
                        order_.resize(order_.size() + bytes - 1, kNone);
                        paddings_.resize(order_.size(), uint8_t(0));
                    }
        }
    }

    bool fit() const { return fits_; }
    LinesMap8 map(const Op& op, int words, int zero_in) const {
        return {x_.h,           x_.w,
                y_.h,           y_.w,
                op.kernel.h,    words,
                op.stride.h,    op.dilation.h,
                op.padding.top, zero_in,
                strips_.data(), int(strips_.size()),
                order_.data(),  paddings_.data()};
    }

   private:
    static constexpr int kReach = 16;       // bytes
    static constexpr uint8_t kNone = 0x80;  // of a shuffle

    const Shape x_, y_;
    bool fits_ = false;
    std::vector<LinesStrip8> strips_;
    std::vector<uint8_t> order_, paddings_;
};

class Depthwise8 final : public AbstractConv8 {
   public:
    Depthwise8(const Kernels8& kernels, const Op& op, const Quantized& quantized, Shape x, Shape y, Arena& arena)
        : kernels_(kernels),
          op_(op),
          q_(quantized),
          x_(x),
          y_(y),
          taps_(op.kernel.h * op.kernel.w),
          words_((op.kernel.w + kernels.channels - 1) / kernels.channels),
          tables_(kernels, op, x, y, words_),
          lines_(kernels, op, quantized, x, y, words_),
          size_(int64_t(y.c) * op.kernel.h * words_),
          weights_(reinterpret_cast<uint32_t*>(arena.take(size_))),
          totals_(y.c) {
        const int reach = (op.kernel.h - 1) * op.dilation.h, bits = 32 / kernels.channels;
        phases_.resize(std::min(op.stride.h, reach + 1));
        lines_read_ = y.h + reach / op.stride.h;
        for (int ky = 0; ky < op.kernel.h; ++ky) {
            const int dy = ky * op.dilation.h, phase = dy % op.stride.h;
            phases_[phase] = true;
            at_.push_back((int64_t(phase) * lines_read_ + dy / op.stride.h) * y.w);
        }
        pitch_ = up(int64_t(phases_.size()) * lines_read_ * y.w + kernels.lanes, kLine);
        line_ = (y.w - 1) * op.stride.w + (words_ * kernels.channels - 1) * op.dilation.w + 1;
        for (int o = 0; o < y.c; ++o)
            for (int tap = 0; tap < taps_; ++tap) {
                const int weight = q_.weight[int64_t(o) * taps_ + tap], kx = tap % op.kernel.w;
                uint32_t& word =
                    weights_[(int64_t(o) * op.kernel.h + tap / op.kernel.w) * words_ + kx / kernels.channels];
                word |= (uint32_t(weight) & ((1u << bits) - 1)) << kx % kernels.channels * bits;
                totals_[o] += weight;
            }
    }

    Stretch weights() const override { return {reinterpret_cast<const float*>(weights_), size_}; }
    int64_t room(int threads) const override { return threads * own_room(); }

    int64_t run(const ConvCall8& call, const Member& member) const override {
        uint8_t* line = call.room + member.thread * own_room();
        uint32_t* packed = reinterpret_cast<uint32_t*>(line + line_room());
        std::fill_n(line, line_room(), uint8_t(q_.zero_in));
        const Range mine = member.share(call.n_out);
        const int *live = call.in, *stop = call.in + call.n_in;
        const Depthwise8Map map = tables_.map(op_, y_, words_, q_.zero_in);
        const LinesMap8 lines = lines_.map(op_, words_, q_.zero_in);
        Ending8 ending = ending_of(q_);
        int64_t macs = 0;
        for (int f = mine.begin; f < mine.end; ++f) {
            const int o = call.out[f];
            live = std::lower_bound(live, stop, o);
            call.upcoming->fetch_share(mine.end - f);
            const bool reads = live < stop && *live == o;  // a dead input leaves the bias
            const uint8_t* plane = call.x + int64_t(o) * x_.area();
            end_filter(ending, 0, q_, call, o, y_.area(), 0, start_of(q_, o, reads ? totals_[o] : 0));
            const uint32_t* weights = weights_ + int64_t(o) * op_.kernel.h * words_;
            if (reads && tables_.fit()) {
                kernels_.depthwise(plane, weights, map, ending);
            } else if (reads && lines_.fit()) {
                kernels_.depthwise_lines(plane, weights, lines, ending);
            } else {
                if (reads) pack(plane, line, packed);
                const Walk8 walk{packed, at_.data(), reads ? op_.kernel.h : 0, words_, pitch_};
                kernels_.gemm(&weights, 1, walk, y_.area(), ending, nullptr);
            }
            macs += reads ? int64_t(taps_) * y_.area() : 0;
        }
        keep_residuals(kernels_, q_, call, y_, member);
        return macs;
    }

   private:
    int64_t line_room() const { return up(std::max(line_, op_.padding.left + x_.w), kLine8) + 2 * kSlack8; }
    int64_t own_room() const { return line_room() + 4 * words_ * pitch_; }

    // Each line of the plane between its paddings, which stand in `line` already, then word by word of its taps.
    void pack(const uint8_t* plane, uint8_t* line, uint32_t* packed) const {
        const uint32_t zero = uint32_t(q_.zero_in) * (kernels_.channels == 4 ? 0x01010101u : 0x00010001u);
        for (int phase = 0; phase < int(phases_.size()); ++phase) {
            if (!phases_[phase]) continue;
            uint32_t* to = packed + int64_t(phase) * lines_read_ * y_.w;
            for (int l = 0; l < lines_read_; ++l, to += y_.w) {
                const int y = l * op_.stride.h + phase - op_.padding.top;
                const bool inside = y >= 0 && y < x_.h;
                if (inside) std::copy_n(plane + int64_t(y) * x_.w, x_.w, line + op_.padding.left);
                for (int word = 0; word < words_; ++word) {
                    if (!inside) {
                        std::fill_n(to + word * pitch_, y_.w, zero);
                        continue;
                    }
                    const uint8_t* at[4];
                    for (int c = 0; c < kernels_.channels; ++c)
                        at[c] = line + (word * kernels_.channels + c) * op_.dilation.w;
                    kernels_.interleave(at, op_.stride.w, y_.w, to + word * pitch_);
                }
            }
        }
    }

    const Kernels8& kernels_;
    const Op& op_;
    const Quantized q_;
    const Shape x_, y_;
    const int taps_, words_;  // words of a kernel's line
    const Tables8 tables_;
    const Lines8 lines_;
    const int64_t size_;  // words of all weights
    uint32_t* const weights_;
    std::vector<int32_t> totals_;  // of each filter's weights
    std::vector<bool> phases_;     // of the stride: whether some tap reads it
    int lines_read_, line_;        // lines read of each phase; bytes of a line with its paddings
    int64_t pitch_;                // words of all lines
    std::vector<int64_t> at_;      // where each line of the kernel lies
};

}  // namespace

std::unique_ptr<AbstractConv8> make_depthwise8(const Kernels8& kernels, const Op& op, const Quantized& quantized,
                                               Shape x, Shape y, Arena& arena) {
    return std::make_unique<Depthwise8>(kernels, op, quantized, x, y, arena);
}

}  // namespace cofire
