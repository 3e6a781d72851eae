// Ops with windows: convs, transposed convs, poolings.
#include <algorithm>
#include <cstdlib>

#include "loader.h"
#include "window_checks.h"

namespace cofire {

void Loader::conv(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    const auto [kernel, stride, pads, dilation, groups, residual, act, slope] =
        fields(attrs, where, "attrs", "kernel", "stride", "padding", "dilation", "groups", "residual", "act", "slope");
    read_window(op, {kernel, stride, pads, dilation, groups, residual}, where);
    read_act(op, act, slope, where);
    if (version_ < 2 || weights.size() != 3) count(weights.size(), 2, "weights", where);
    if (op->residual && !keeps_zero(op->act)) wrong(act, where, "act after a residual", "zero at zero");
    const int filters = shape(op->dst).c;
    op->weight = tensor(weights[0], where, weight_shape(*op));
    op->bias = tensor(weights[1], where, {filters});
    if (weights.size() == 3) op->shift = tensor(weights[2], where, {filters});
}

void Loader::conv8(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    const auto [kernel, stride, pads, dilation, groups, residual, low, high, residual_multiplier] =
        fields(attrs, where, "attrs", "kernel", "stride", "padding", "dilation", "groups", "residual", "low", "high",
               "residual_multiplier");
    read_window(op, {kernel, stride, pads, dilation, groups, residual}, where);
    const bool to_float = !form(op->dst).u8();
    op->high = int(integer(high, where, "high", to_float ? 255 : 0, 255));
    op->low = int(integer(low, where, "low", 0, to_float ? 0 : op->high));
    op->residual_multiplier = real(residual_multiplier, where, "residual_multiplier");
    if (op->residual)
        multiplier(residual_multiplier, where, "residual_multiplier");
    else if (op->residual_multiplier != 0)
        wrong(residual_multiplier, where, "residual_multiplier", "0 without a residual");
    count(weights.size(), 3, "weights", where);
    const int filters = shape(op->dst).c;
    op->weight8 = tensor<int8_t>(weights[0], where, weight_shape(*op));
    op->bias8 = tensor<int32_t>(weights[1], where, {filters});
    op->multiplier = tensor(weights[2], where, {filters});
    check_sums(*op, where);
}

void Loader::deconv(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    const auto [kernel, stride, pads, dilation, groups] =
        fields(attrs, where, "attrs", "kernel", "stride", "padding", "dilation", "groups");
    op->kernel = pair(kernel, where, "kernel");
    op->stride = pair(stride, where, "stride");
    op->padding = padding(pads, where);
    op->dilation = pair(dilation, where, "dilation");
    op->groups = int(integer(groups, where, "groups", 1, kMaxSide));
    count(weights.size(), 2, "weights", where);
    const Shape &src = one_source(*op, where), &dst = shape(op->dst);
    check_groups(*op, src, dst, where);
    for (const Axis& axis : axes(*op, src, dst)) check_deconv_axis(axis, where);
    if (double(src.c) * dst.c / op->groups * op->kernel.h * op->kernel.w > double(kMaxBuffer))
        where.fail("a transposed conv must have at most " + std::to_string(kMaxBuffer) + " weights");
    op->weight = tensor(weights[0], where, {src.c, dst.c / op->groups, op->kernel.h, op->kernel.w});
    op->bias = tensor(weights[1], where, {dst.c});
}

void Loader::pool(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    static constexpr std::string_view kOps[] = {"avg", "max"};
    const auto [what, kernel, stride, pads, dilation, include_pad, adaptive] =
        fields(attrs, where, "attrs", "op", "kernel", "stride", "padding", "dilation", "include_pad", "adaptive");
    op->maximum = choice(what, where, "op", kOps) == 1;
    op->kernel = pair(kernel, where, "kernel");
    op->stride = pair(stride, where, "stride");
    op->padding = padding(pads, where);
    op->dilation = pair(dilation, where, "dilation");
    op->include_pad = boolean(include_pad, where, "include_pad");
    op->adaptive = boolean(adaptive, where, "adaptive");
    count(op->src.size(), 1, "src", where);
    count(weights.size(), 0, "weights", where);
    const Shape &src = shape(op->src[0]), &dst = shape(op->dst);
    if (src.c != dst.c)
        where.fail("output must have " + std::to_string(src.c) + " channels, got " + std::to_string(dst.c));
    for (const Axis& axis : axes(*op, src, dst)) {
        if (!op->adaptive)
            check_pool_axis(axis, where);
        else if (axis.kernel != 1 || axis.stride != 1 || axis.dilation != 1 || axis.before != 0 || axis.after != 0)
            where.fail(
                "an adaptive pool must have kernel, stride and dilation 1 "
                "and padding 0");
    }
    check_padded(axes(*op, src, dst), src.c, where);
    drop_unused(op, dst);
}

// kernel, stride, padding, dilation, groups, residual
void Loader::read_window(Op* op, const std::array<JsonValue, 6>& values, const Where& where) {
    const auto& [kernel, stride, pads, dilation, groups, residual] = values;
    op->kernel = pair(kernel, where, "kernel");
    op->stride = pair(stride, where, "stride");
    op->padding = padding(pads, where);
    op->dilation = pair(dilation, where, "dilation");
    op->groups = int(integer(groups, where, "groups", 1, kMaxSide));
    op->residual = boolean(residual, where, "residual");
    count(op->src.size(), op->residual ? 2 : 1, "src", where);
    const Shape &src = shape(op->src[0]), &dst = shape(op->dst);
    check_groups(*op, src, dst, where);
    for (const Axis& axis : axes(*op, src, dst)) check_conv_axis(axis, where);
    check_padded(axes(*op, src, dst), src.c, where);
    drop_unused(op, dst);
    if (op->residual) same_shape(shape(op->src[1]), dst, "the residual's shape", where);
}

std::vector<int64_t> Loader::weight_shape(const Op& op) const {
    return {shape(op.dst).c, shape(op.src[0]).c / op.groups, op.kernel.h, op.kernel.w};
}

// No sum may leave int32, whatever the bytes are.
void Loader::check_sums(const Op& op, const Where& where) const {
    const int64_t filters = shape(op.dst).c, zero = form(op.src[0]).zero, most = std::max(zero, 255 - zero);
    const int64_t each = int64_t(shape(op.src[0]).c / op.groups) * op.kernel.h * op.kernel.w;
    for (int64_t o = 0; o < filters; ++o) {
        int64_t sum = 0;
        for (int64_t i = 0; i < each; ++i) sum += std::abs(int64_t(op.weight8[o * each + i]));
        const float factor = op.multiplier[o];
        if (sum * most + std::abs(int64_t(op.bias8[o])) > INT32_MAX)
            where.fail("sums of filter " + std::to_string(o) + " must stay within int32");
        if (factor < kLeastScale || factor > kMostScale)
            where.fail("multipliers must be from 2^-64 to 2^64, got " + std::to_string(factor));
    }
}

void Loader::check_groups(const Op& op, const Shape& src, const Shape& dst, const Where& where) const {
    if (src.c % op.groups != 0 || dst.c % op.groups != 0)
        where.fail("groups must divide the channels " + std::to_string(src.c) + " and " + std::to_string(dst.c) +
                   ", got " + std::to_string(op.groups));
}

}  // namespace cofire
