// What the conv algorithms on bytes share.
#pragma once

#include "conv8.h"

namespace cofire {

std::unique_ptr<AbstractConv8> make_reference8(const Leaf8& leaf, const Op& op, const Quantized& quantized, Shape x,
                                               Shape y);

}  // namespace cofire
