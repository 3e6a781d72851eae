// Convs on maps of a few pixels, linear layers among them: a dot product along the weights for each pixel. The weights
// are what takes the time, so inputs that are off are zeros here and only filters are skipped.
#include "conv_common.h"

namespace cofire {
namespace {

constexpr int kGroup = 12;  // filters at a time: whole numbers of the rows that any kernel takes together

class Dot final : public AbstractConv {
   public:
    Dot(const Kernels& kernels, const Op& op, Shape x, Shape y)
        : kernels_(kernels),
          op_(op),
          x_(x),
          y_(y),
          taps_(op.kernel.h * op.kernel.w),
          nk_(x.c * taps_),
          pixels_(pixels_of(op, x, y)) {}

    Stretch weights() const override { return {op_.weight, int64_t(y_.c) * nk_}; }
    int64_t room(int) const override { return y_.area() * ldx() + up(x_.area() + 1, kLine) + kSlack; }

    int64_t run(const ConvCall& call, const Member& member) const override {
        float* columns = call.room;
        if (member.first()) gather(call, columns, call.room + y_.area() * ldx());
        member.meet();
        const Range mine = member.share(call.n_out);
        float sums[kGroup * kFewPixels];
        for (int f = mine.begin, size; f < mine.end; f += size) {
            size = std::min(kGroup, mine.end - f);
            const float *rows[kGroup], *ahead[kGroup];
            for (int r = 0; r < size; ++r) {
                rows[r] = op_.weight + int64_t(call.out[f + r]) * nk_;
                ahead[r] = op_.weight + int64_t(call.out[std::min(f + size + r, mine.end - 1)]) * nk_;
            }
            kernels_.dot(rows, size, nk_, columns, ldx(), y_.area(), sums, kFewPixels, ahead);
            for (int r = 0; r < size; ++r)
                finish(kernels_, op_, call, call.out[f + r], sums + r * kFewPixels, y_.area(), 0, y_.area());
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

    const Kernels& kernels_;
    const Op& op_;
    const Shape x_, y_;
    const int taps_, nk_;
    const std::vector<int> pixels_;
};

}  // namespace

std::unique_ptr<AbstractConv> make_dot(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena&) {
    return std::make_unique<Dot>(kernels, op, x, y);
}

}  // namespace cofire
