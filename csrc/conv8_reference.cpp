// The definition of a conv on bytes: plain loops, no kernel, MACs counted one by one.
#include <algorithm>
#include <cmath>

#include "conv8_common.h"

namespace cofire {
namespace {

class Reference8 final : public AbstractConv8 {
   public:
    Reference8(const Op& op, const Quantized& quantized, Shape x, Shape y) : op_(op), q_(quantized), x_(x), y_(y) {}

    Stretch weights() const override { return {}; }
    int64_t room(int) const override { return 0; }

    int64_t run(const ConvCall8& call, const Member& member) const override {
        int64_t macs = 0;
        const Range mine = member.share(y_.c);
        for (int o = mine.begin; o < mine.end; ++o) {
            const bool on = std::binary_search(call.out, call.out + call.n_out, o);
            const bool adds = call.residual && (!call.residual_on || call.residual_on[o]);
            if (!on && !adds) continue;
            for (int oy = 0; oy < y_.h; ++oy)
                for (int ox = 0; ox < y_.w; ++ox) {
                    const int64_t at = int64_t(o) * y_.area() + oy * y_.w + ox;
                    float real = on ? float(sum(call, o, oy, ox, &macs)) * q_.multiplier[o] : 0;
                    if (adds) real += float(call.residual[at] - q_.zero_residual) * q_.residual_multiplier;
                    write(call, o, at, real);
                }
        }
        return macs;
    }

   private:
    int32_t sum(const ConvCall8& call, int o, int oy, int ox, int64_t* macs) const {
        const int per_group = x_.c / op_.groups, first = o / (y_.c / op_.groups) * per_group;
        uint32_t sum = uint32_t(q_.bias[o]);
        for (int k = 0; k < call.n_in; ++k) {
            const int i = call.in[k] - first;
            if (i < 0 || i >= per_group) continue;
            const uint8_t* plane = call.x + int64_t(call.in[k]) * x_.area();
            const int8_t* weights = q_.weight + (int64_t(o) * per_group + i) * op_.kernel.h * op_.kernel.w;
            for (int ky = 0; ky < op_.kernel.h; ++ky)
                for (int kx = 0; kx < op_.kernel.w; ++kx) {
                    const int iy = oy * op_.stride.h + ky * op_.dilation.h - op_.padding.top;
                    const int ix = ox * op_.stride.w + kx * op_.dilation.w - op_.padding.left;
                    if (iy >= 0 && iy < x_.h && ix >= 0 && ix < x_.w)
                        sum +=
                            uint32_t(weights[ky * op_.kernel.w + kx] * (plane[int64_t(iy) * x_.w + ix] - q_.zero_in));
                    ++*macs;
                }
        }
        return int32_t(sum);
    }

    void write(const ConvCall8& call, int o, int64_t at, float real) const {
        if (q_.to_float) {
            call.y_float[at] = real;
            return;
        }
        const float low = float(q_.low - q_.zero_out), high = float(q_.high - q_.zero_out);
        const uint8_t y = uint8_t(int(std::nearbyint(std::min(std::max(real, low), high))) + q_.zero_out);
        call.y[at] = y;
        if (call.peak) call.peak[o] = std::max(call.peak[o], y);
        if (call.sum) call.sum[o] += y;
    }

    const Op& op_;
    const Quantized q_;
    const Shape x_, y_;
};

}  // namespace

std::unique_ptr<AbstractConv8> make_reference8(const Kernels8&, const Op& op, const Quantized& quantized, Shape x,
                                               Shape y, Arena&) {
    return std::make_unique<Reference8>(op, quantized, x, y);
}

}  // namespace cofire
