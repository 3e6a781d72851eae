// Depthwise convs on bytes: a filter at a time, with the taps of a kernel's line in words, as channels are elsewhere.
#include "conv8_common.h"

namespace cofire {
namespace {

class Depthwise8 final : public AbstractConv8 {
   public:
    Depthwise8(const Leaf8& leaf, const Op& op, const Quantized& quantized, Shape x, Shape y)
        : leaf_(leaf),
          op_(op),
          q_(quantized),
          x_(x),
          y_(y),
          taps_(op.kernel.h * op.kernel.w),
          words_((op.kernel.w + leaf.channels - 1) / leaf.channels),
          weights_(size_t(y.c) * op.kernel.h * words_),
          totals_(y.c) {
        const int reach = (op.kernel.h - 1) * op.dilation.h, bits = 32 / leaf.channels;
        phases_.resize(std::min(op.stride.h, reach + 1));
        lines_read_ = y.h + reach / op.stride.h;
        for (int ky = 0; ky < op.kernel.h; ++ky) {
            const int dy = ky * op.dilation.h, phase = dy % op.stride.h;
            phases_[phase] = true;
            at_.push_back((int64_t(phase) * lines_read_ + dy / op.stride.h) * y.w);
        }
        pitch_ = up(int64_t(phases_.size()) * lines_read_ * y.w + leaf.lanes, kLine);
        line_ = (y.w - 1) * op.stride.w + (words_ * leaf.channels - 1) * op.dilation.w + 1;
        for (int o = 0; o < y.c; ++o)
            for (int tap = 0; tap < taps_; ++tap) {
                const int weight = q_.weight[int64_t(o) * taps_ + tap], kx = tap % op.kernel.w;
                uint32_t& word = weights_[(int64_t(o) * op.kernel.h + tap / op.kernel.w) * words_ + kx / leaf.channels];
                word |= (uint32_t(weight) & ((1u << bits) - 1)) << kx % leaf.channels * bits;
                totals_[o] += weight;
            }
    }

    int64_t room(int threads) const override { return threads * own_room(); }

    int64_t run(const ConvCall8& call, const Member& member) const override {
        uint8_t* line = call.room + member.thread * own_room();
        uint32_t* packed = reinterpret_cast<uint32_t*>(line + line_room());
        std::fill_n(line, line_room(), uint8_t(q_.zero_in));
        const Range mine = member.share(call.n_out);
        const int *live = call.in, *stop = call.in + call.n_in;
        int64_t macs = 0;
        for (int f = mine.begin; f < mine.end; ++f) {
            const int o = call.out[f];
            live = std::lower_bound(live, stop, o);
            const bool reads = live < stop && *live == o;  // a dead input leaves the bias
            if (reads) pack(call.x + int64_t(o) * x_.area(), line, packed);
            Ending8 ending = ending_of(q_, call, &o, 1, y_.area(), 0);
            const int32_t total = reads ? totals_[o] : 0;
            ending.start[0] = int32_t(uint32_t(q_.bias[o]) - uint32_t(total) * uint32_t(q_.zero_in));
            const uint32_t* weights = weights_.data() + int64_t(o) * op_.kernel.h * words_;
            const Walk8 walk{packed, at_.data(), reads ? op_.kernel.h : 0, words_, pitch_};
            leaf_.gemm(&weights, 1, walk, y_.area(), ending);
            macs += reads ? int64_t(taps_) * y_.area() : 0;
        }
        keep_residuals(leaf_, q_, call, y_, member);
        return macs;
    }

   private:
    int64_t line_room() const { return up(std::max(line_, op_.padding.left + x_.w), kLine8) + 2 * kSlack8; }
    int64_t own_room() const { return line_room() + 4 * words_ * pitch_; }

    // Each line of the plane between its paddings, which stand in `line` already, then word by word of its taps.
    void pack(const uint8_t* plane, uint8_t* line, uint32_t* packed) const {
        const uint32_t zero = uint32_t(q_.zero_in) * (leaf_.channels == 4 ? 0x01010101u : 0x00010001u);
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
                    for (int c = 0; c < leaf_.channels; ++c)
                        at[c] = line + (word * leaf_.channels + c) * op_.dilation.w;
                    leaf_.interleave(at, op_.stride.w, y_.w, to + word * pitch_);
                }
            }
        }
    }

    const Leaf8& leaf_;
    const Op& op_;
    const Quantized q_;
    const Shape x_, y_;
    const int taps_, words_;  // words of a kernel's line
    std::vector<uint32_t> weights_;
    std::vector<int32_t> totals_;  // of each filter's weights
    std::vector<bool> phases_;     // of the stride: whether some tap reads it
    int lines_read_, line_;        // lines read of each phase; bytes of a line with its paddings
    int64_t pitch_;                // words of all lines
    std::vector<int64_t> at_;      // where each line of the kernel lies
};

}  // namespace

std::unique_ptr<AbstractConv8> make_depthwise8(const Leaf8& leaf, const Op& op, const Quantized& quantized, Shape x,
                                               Shape y) {
    return std::make_unique<Depthwise8>(leaf, op, quantized, x, y);
}

}  // namespace cofire
