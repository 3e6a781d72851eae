#include "conv8.h"

#include <stdexcept>

#include "conv8_common.h"

namespace cofire {

namespace {

bool always(const Op&, Shape, Shape) { return true; }

}  // namespace

const std::vector<ConvAlgorithm8>& conv8_algorithms() {
    static const std::vector<ConvAlgorithm8> all{
        {"ref", always, make_reference8},
    };
    return all;
}

std::unique_ptr<AbstractConv8> make_conv8(const std::string& algorithm, const Leaf8& leaf, const Op& op,
                                          const Quantized& quantized, Shape x, Shape y) {
    for (const ConvAlgorithm8& row : conv8_algorithms())
        if ((algorithm.empty() || algorithm == row.name) && row.fits(op, x, y))
            return row.make(leaf, op, quantized, x, y);
    throw std::runtime_error("conv '" + op.name + "' cannot run on bytes with algorithm '" + algorithm + "'");
}

}  // namespace cofire
