#include "conv8.h"

#include <stdexcept>

#include "conv8_common.h"

namespace cofire {

namespace {

constexpr int kSmall8 = 16;       // pixels of the largest map that make_dot8 takes
constexpr int kFewPixels8 = 256;  // and make_filters8

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

// Filters fill most of their lines, and what lies beside the map is zero.
bool fills_lines(const Op& op, const Quantized& q, Shape x, Shape y) {
    return op.groups == 1 && q.zero_in == 0 && 4 * y.c >= 3 * up(y.c, kFilters8) && y.area() <= kFewPixels8 &&
           x.area() <= 4 * kFewPixels8;
}

}  // namespace

const std::vector<ConvAlgorithm8>& conv8_algorithms() {
    static const std::vector<ConvAlgorithm8> all{
        {"depthwise", is_depthwise, make_depthwise8}, {"dot", is_small, make_dot8},
        {"filters", fills_lines, make_filters8},      {"gemm", is_not_depthwise, make_gemm8},
        {"wino4", fits_winograd8, make_winograd8},    {"ref", always, make_reference8},
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
