// Do the windows of a conv or a pool fit?
#pragma once

#include <array>

#include "program.h"
#include "reading.h"

namespace cofire {

// One axis of a conv or a pool.
struct Axis {
    const char* name;  // of the output's size
    int64_t size, out, kernel, stride, dilation, before, after;

    // Room for the first tap of a window that lies inside the padded map, minus one; negative if none fits.
    int64_t room() const { return size + before + after - dilation * (kernel - 1) - 1; }
};

std::array<Axis, 2> axes(const Op& op, const Shape& src, const Shape& dst);
void check_conv_axis(const Axis& axis, const Where& where);
// Of a transposed conv, whose padding is taken off the output.
void check_deconv_axis(const Axis& axis, const Where& where);
void check_pool_axis(const Axis& axis, const Where& where);

// Engines may write the padded map out, so it is limited like any other; and so is a window, padding and gaps included.
void check_padded(const std::array<Axis, 2>& axes, int channels, const Where& where);

// A stride between one output and none, or a dilation between one tap and none, means nothing and may be huge: 1 then.
void drop_unused(Op* op, const Shape& dst);

}  // namespace cofire
