// Depthwise convs: channel by channel, 3 x 3 straight from the plane.
#include "conv_common.h"

namespace cofire {
namespace {

class Depthwise final : public AbstractConv {
   public:
    Depthwise(const Kernels& kernels, const Op& op, Shape x, Shape y)
        : kernels_(kernels),
          op_(op),
          x_(x),
          y_(y),
          phases_(op, x, y),
          taps_(op.kernel.h * op.kernel.w),
          direct_(op.kernel.h == 3 && op.kernel.w == 3 && op.dilation.h * op.dilation.w == 1 &&
                  op.stride.h == op.stride.w && op.stride.h <= 2 &&
                  std::max({op.padding.top, op.padding.left, op.padding.bottom, op.padding.right}) <= 1) {}

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
            call.upcoming->fetch_share(mine.end - f);
            while (live < call.in + call.n_in && *live < o) ++live;
            const bool reads = live < call.in + call.n_in && *live == o;  // a dead input leaves the bias
            if (reads && !call.residual && call.factor[o] == 1) {
                float* y = call.y + int64_t(o) * y_.area();
                filter(call, o, call.bias[o], op_.act, plane, y, call.peak ? call.peak + o : nullptr);
                if (call.sum) call.sum[o] = kernels_.sum(y, y_.area());
            } else {
                std::fill(sums, sums + y_.area(), 0.0f);
                if (reads) filter(call, o, 0, Act::none, plane, sums, nullptr);
                finish(kernels_, op_, call, o, sums, y_.area(), 0, y_.area());
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
            kernels_.depthwise3(x, x_, op_.stride.h, op_.padding.top, op_.padding.left, plane, weights, y_, bias, act,
                                op_.slope, y, peak);
        } else {
            phases_.split(kernels_, x, plane);
            kernels_.depthwise(plane, phases_.pitch(), phases_.taps().data(), weights, taps_, y_.h, y_.w, bias, act,
                               op_.slope, y, peak);
        }
    }

    const Kernels& kernels_;
    const Op& op_;
    const Shape x_, y_;
    const Phases phases_;
    const int taps_;
    const bool direct_;
};

}  // namespace

std::unique_ptr<AbstractConv> make_depthwise(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena&) {
    return std::make_unique<Depthwise>(kernels, op, x, y);
}

}  // namespace cofire
