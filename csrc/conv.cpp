#include "conv.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "conv_common.h"

namespace cofire {

namespace {

float activated(float x, Act act, float slope) {
    switch (act) {
        case Act::none:
            return x;
        case Act::relu:
            return x < 0 ? 0 : x;
        case Act::relu6:
            return x < 0 ? 0 : x > 6 ? 6 : x;
        case Act::leaky:
            return x < 0 ? x * slope : x;
        case Act::silu:
            return x / (1 + std::exp(-x));
        case Act::hardswish:
            return x * std::min(std::max(x + 3, 0.0f), 6.0f) / 6;
        case Act::sigmoid:
            return 1 / (1 + std::exp(-x));
        case Act::hardsigmoid:
            return std::min(std::max(x + 3, 0.0f), 6.0f) / 6;
        case Act::gelu:
            return x * 0.5f * (1 + std::erf(x * 0.70710678f));
        case Act::gelu_tanh:
            return x * 0.5f * (1 + std::tanh(x * (0.7978845608f + 0.0356774081f * std::min(x * x, 1e4f))));
        case Act::elu:
            return x < 0 ? slope * std::expm1(x) : x;
        case Act::tanh:
            return std::tanh(x);
        case Act::hardtanh:
            return x < -slope ? -slope : x > slope ? slope : x;
        case Act::mish:
            return x * std::tanh(std::log1p(std::exp(std::min(x, 20.0f))));
        case Act::softplus:
            return (x < 0 ? 0 : x) + std::log1p(std::exp(-std::abs(x)));
    }
    return x;
}

// The definition: plain loops, no kernel, MACs counted one by one.
class Reference final : public AbstractConv {
   public:
    Reference(const Op& op, Shape x, Shape y) : op_(op), x_(x), y_(y) {}

    int64_t room(int) const override { return 0; }
    Stretch weights() const override { return {}; }

    int64_t run(const ConvCall& call, const Member& member) const override {
        int64_t macs = 0;
        const Range mine = member.share(call.n_out);
        for (int f = mine.begin; f < mine.end; ++f) {
            const int o = call.out[f];
            for (int oy = 0; oy < y_.h; ++oy)
                for (int ox = 0; ox < y_.w; ++ox) {
                    const int64_t at = int64_t(o) * y_.area() + oy * y_.w + ox;
                    const float sum = pixel(call, o, oy, ox, &macs) * call.factor[o] + call.bias[o] +
                                      (call.residual ? call.residual[at] : 0);
                    call.y[at] = activated(sum, op_.act, op_.slope);
                    if (call.peak && (call.y[at] > call.peak[o] || std::isnan(call.y[at]))) call.peak[o] = call.y[at];
                }
        }
        return macs;
    }

   private:
    float pixel(const ConvCall& call, int o, int oy, int ox, int64_t* macs) const {
        const int per_group = x_.c / op_.groups, first = o / (y_.c / op_.groups) * per_group;
        float sum = 0;
        for (int k = 0; k < call.n_in; ++k) {
            const int i = call.in[k] - first;
            if (i < 0 || i >= per_group) continue;
            const float* plane = call.x + int64_t(call.in[k]) * x_.area();
            const float* weights = op_.weight + (int64_t(o) * per_group + i) * op_.kernel.h * op_.kernel.w;
            for (int ky = 0; ky < op_.kernel.h; ++ky)
                for (int kx = 0; kx < op_.kernel.w; ++kx) {
                    const int iy = oy * op_.stride.h + ky * op_.dilation.h - op_.padding.top;
                    const int ix = ox * op_.stride.w + kx * op_.dilation.w - op_.padding.left;
                    const bool inside = iy >= 0 && iy < x_.h && ix >= 0 && ix < x_.w;
                    sum += weights[ky * op_.kernel.w + kx] * (inside ? plane[int64_t(iy) * x_.w + ix] : 0);
                    ++*macs;
                }
        }
        return sum;
    }

    const Op& op_;
    const Shape x_, y_;
};

std::unique_ptr<AbstractConv> make_reference(const Kernels&, const Op& op, Shape x, Shape y, Arena&) {
    return std::make_unique<Reference>(op, x, y);
}

bool always(const Op&, Shape, Shape) { return true; }

bool is_depthwise(const Op& op, Shape x, Shape y) { return op.groups > 1 && op.groups == x.c && x.c == y.c; }

bool is_not_depthwise(const Op& op, Shape x, Shape y) { return !is_depthwise(op, x, y); }

bool has_few_pixels(const Op& op, Shape x, Shape y) {
    return op.groups == 1 && (y.area() <= kFewPixels || (x.c >= 4 * kLine && fits_dots(op, x, y)));
}

// Copies of every tap's inputs are worth their memory on small maps; without taps there is nothing to copy twice.
bool has_few_columns(const Op& op, Shape x, Shape y) {
    constexpr int64_t kMost = 1 << 24;  // floats of copies
    const int taps = op.kernel.h * op.kernel.w;
    return op.groups == 1 && y.area() > kFewPixels && (taps == 1 || y.area() <= 16 * 16) &&
           int64_t(x.c) * taps * y.area() <= kMost;
}

bool is_pointwise(const Op& op, Shape x, Shape y) {
    return op.groups == 1 && lies_as_output(op, x, y) && y.area() > kFewPixels;
}

// Whether kernels have the tiles F(m, taps per phase of the stride).
bool has_tiles(int m, const Op& op) {
    const int taps = (op.kernel.h + op.stride.h - 1) / op.stride.h;
    return op.groups == 1 && op.kernel.h == op.kernel.w && op.stride.h == op.stride.w && op.stride.h <= 2 &&
           op.kernel.h >= op.stride.h && op.dilation.h == 1 && op.dilation.w == 1 && taps >= 2 &&
           taps <= (m == 2 ? 3 : 4);
}

bool has_large_tiles(const Op& op, Shape, Shape y) { return has_tiles(4, op) && std::min(y.h, y.w) > 6; }

bool has_small_tiles(const Op& op, Shape, Shape y) {
    return has_tiles(2, op) && y.area() > kFewPixels && y.area() <= 28 * 28;
}

}  // namespace

const std::vector<ConvAlgorithm>& conv_algorithms() {
    static const std::vector<ConvAlgorithm> all{
        {"depthwise", is_depthwise, make_depthwise},
        {"dot", has_few_pixels, make_dot},
        {"wino4", has_large_tiles, make_winograd4},
        {"wino2", has_small_tiles, make_winograd2},
        {"gemm", is_not_depthwise, make_gemm},
        {"im2col", has_few_columns, make_im2col},
        {"filters", is_pointwise, make_filters},
        {"ref", always, make_reference},  // defines what the others must give
    };
    return all;
}

std::vector<std::string> fitting_algorithms(const Op& op, Shape x, Shape y) {
    std::vector<std::string> found;
    for (const ConvAlgorithm& algorithm : conv_algorithms())
        if (algorithm.fits(op, x, y)) found.emplace_back(algorithm.name);
    return found;
}

std::unique_ptr<AbstractConv> make_conv(const std::string& algorithm, const Kernels& kernels, const Op& op, Shape x,
                                        Shape y, Arena& arena) {
    for (const ConvAlgorithm& row : conv_algorithms())
        if (algorithm == row.name && row.fits(op, x, y)) return row.make(kernels, op, x, y, arena);
    throw std::runtime_error("conv '" + op.name + "' cannot run with algorithm '" + algorithm + "'");
}

}  // namespace cofire
