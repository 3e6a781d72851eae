#include "conv8.h"

#include <stdexcept>

#include "conv8_common.h"

namespace cofire {

namespace {

constexpr int kSmall8 = 16;  // pixels of the largest map that make_dot8 takes

bool always(const Op&, const Quantized&, Shape, Shape) { return true; }

bool is_depthwise(const Op& op, const Quantized&, Shape x, Shape y) {
    return op.groups > 1 && op.groups == x.c && x.c == y.c;
}

bool is_not_depthwise(const Op& op, const Quantized& q, Shape x, Shape y) { return !is_depthwise(op, q, x, y); }

// Inputs of a pixel fill cache lines, weights become no more than four times as large, and inputs with paddings little
// more.
bool is_small(const Op& op, const Quantized&, Shape x, Shape y) {
    const Padding& p = op.padding;
    const int64_t padded = (int64_t(x.h) + p.top + p.bottom) * (int64_t(x.w) + p.left + p.right);
    return op.groups == 1 && x.c >= kLine8 / 4 && y.area() <= kSmall8 && padded <= 4 * int64_t(x.area()) + kSmall8;
}

}  // namespace

const std::vector<ConvAlgorithm8>& conv8_algorithms() {
    static const std::vector<ConvAlgorithm8> all{
        {"depthwise", is_depthwise, make_depthwise8},
        {"dot", is_small, make_dot8},
        {"gemm", is_not_depthwise, make_gemm8},
        {"wino4", fits_winograd8, make_winograd8},
        {"ref", always, make_reference8},
    };
    return all;
}

std::unique_ptr<AbstractConv8> make_conv8(const std::string& algorithm, const Kernels8& kernels, const Op& op,
                                          const Quantized& quantized, Shape x, Shape y, Arena& arena) {
    for (const ConvAlgorithm8& row : conv8_algorithms())
        if ((algorithm.empty() || algorithm == row.name) && row.fits(op, quantized, x, y))
            return row.make(kernels, op, quantized, x, y, arena);
    throw std::runtime_error("conv '" + op.name + "' cannot run on bytes with algorithm '" + algorithm + "'");
}

}  // namespace cofire
