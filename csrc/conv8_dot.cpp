// Convs on maps of a few pixels, linear layers among them: a dot product along the weights for each pixel. The weights
// are what takes the time, so inputs that are off are zeros here and only filters are skipped.
#include <numeric>

#include "conv8_common.h"

namespace cofire {
namespace {

constexpr int kGroup8 = 8;  // filters at a time

class Dot8 final : public AbstractConv8 {
   public:
    Dot8(const Kernels8& kernels, const Op& op, const Quantized& quantized, Shape x, Shape y)
        : kernels_(kernels),
          op_(op),
          q_(quantized),
          x_(x),
          y_(y),
          taps_(op.kernel.h * op.kernel.w),
          nk_(x.c * taps_),
          pitch_(odd_lines((nk_ + 3) / 4) * 4),
          pixels_(pixels_of(op, x, y)),
          memory_((y.c * pitch_ + kSlack8) / 4),
          starts_(y.c) {
        int8_t* to = reinterpret_cast<int8_t*>(memory_.data());
        for (int o = 0; o < y.c; ++o) {
            const int8_t* weights = q_.weight + int64_t(o) * nk_;
            std::copy_n(weights, nk_, to + o * pitch_);
            starts_[o] = start_of(q_, o, std::accumulate(weights, weights + nk_, int32_t(0)));
        }
    }

    int64_t room(int) const override { return y_.area() * pitch_ + up(x_.area() + 1, kLine8) + kSlack8; }

    int64_t run(const ConvCall8& call, const Member& member) const override {
        uint8_t* columns = call.room;
        if (member.first()) gather(call, columns, call.room + y_.area() * pitch_);
        member.meet();
        const Range mine = member.share(call.n_out);
        const int8_t* weights = reinterpret_cast<const int8_t*>(memory_.data());
        Ending8 ending = ending_of(q_);
        int32_t sums[kGroup8 * kFewPixels];
        for (int f = mine.begin, size; f < mine.end; f += size) {
            size = std::min(kGroup8, mine.end - f);
            const int8_t* rows[kGroup8];
            for (int r = 0; r < size; ++r) rows[r] = weights + call.out[f + r] * pitch_;
            kernels_.dot(rows, size, nk_, columns, pitch_, y_.area(), sums);
            for (int r = 0; r < size; ++r) {
                end_filter(ending, 0, q_, call, call.out[f + r], y_.area(), 0, starts_[call.out[f + r]]);
                kernels_.finish(sums + r * y_.area(), y_.area(), ending, 0);
            }
        }
        keep_residuals(kernels_, q_, call, y_, member);
        return int64_t(mine.end - mine.begin) * call.n_in * taps_ * y_.area();
    }

   private:
    void gather(const ConvCall8& call, uint8_t* columns, uint8_t* plane) const {
        std::fill_n(columns, y_.area() * pitch_, uint8_t(q_.zero_in));
        for (int k = 0; k < call.n_in; ++k) {
            *std::copy_n(call.x + int64_t(call.in[k]) * x_.area(), x_.area(), plane) = uint8_t(q_.zero_in);
            uint8_t* to = columns + int64_t(call.in[k]) * taps_;
            for (int tap = 0, i = 0; tap < taps_; ++tap)
                for (int pixel = 0; pixel < y_.area(); ++pixel, ++i) to[pixel * pitch_ + tap] = plane[pixels_[i]];
        }
    }

    const Kernels8& kernels_;
    const Op& op_;
    const Quantized q_;
    const Shape x_, y_;
    const int taps_, nk_;
    const int64_t pitch_;  // bytes of a filter's weights, and of a pixel's inputs
    const std::vector<int> pixels_;
    Floats memory_;
    std::vector<int32_t> starts_;  // what each filter's sums start with
};

}  // namespace

std::unique_ptr<AbstractConv8> make_dot8(const Kernels8& kernels, const Op& op, const Quantized& quantized, Shape x,
                                         Shape y) {
    return std::make_unique<Dot8>(kernels, op, quantized, x, y);
}

}  // namespace cofire
