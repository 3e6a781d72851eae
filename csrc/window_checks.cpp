#include "window_checks.h"

#include "format.h"

namespace cofire {

namespace {

int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

}  // namespace

std::array<Axis, 2> axes(const Op& op, const Shape& src, const Shape& dst) {
    return {Axis{"height", src.h, dst.h, op.kernel.h, op.stride.h, op.dilation.h, op.padding.top, op.padding.bottom},
            Axis{"width", src.w, dst.w, op.kernel.w, op.stride.w, op.dilation.w, op.padding.left, op.padding.right}};
}

void check_conv_axis(const Axis& axis, const Where& where) {
    if (axis.room() < 0) where.fail("the kernel must fit into the padded " + std::string(axis.name));
    const int64_t out = axis.room() / axis.stride + 1;
    if (axis.out != out)
        where.fail("output " + std::string(axis.name) + " must be " + std::to_string(out) + ", got " +
                   std::to_string(axis.out));
}

void check_deconv_axis(const Axis& axis, const Where& where) {
    const int64_t fewest =
        (axis.size - 1) * axis.stride + axis.dilation * (axis.kernel - 1) + 1 - axis.before - axis.after;
    const int64_t most = fewest + std::max(axis.stride, axis.dilation) - 1;
    if (axis.out < fewest || axis.out > most)
        where.fail("output " + std::string(axis.name) + " must be " + std::to_string(fewest) + " to " +
                   std::to_string(most) + ", got " + std::to_string(axis.out));
}

void check_pool_axis(const Axis& axis, const Where& where) {
    const int64_t fewest = floor_div(axis.room(), axis.stride) + 1;
    const int64_t most = -floor_div(-axis.room(), axis.stride) + 1;  // ceil mode
    if (axis.out != fewest && axis.out != most)
        where.fail("output " + std::string(axis.name) + " must be " + std::to_string(fewest) + " or " +
                   std::to_string(most) + ", got " + std::to_string(axis.out));
    // No window without an element: neither a maximum nor a mean of nothing exists. Windows that begin before the map
    // are looked at one by one; of those that begin behind its start the last begins farthest behind.
    auto start = [&](int64_t i) { return i * axis.stride - axis.before; };
    bool empty = start(axis.out - 1) >= axis.size;
    for (int64_t i = 0; i < axis.out && start(i) < 0; ++i) {
        const int64_t tap = (-start(i) + axis.dilation - 1) / axis.dilation;  // the first that is not before the map
        empty |= tap >= axis.kernel || start(i) + tap * axis.dilation >= axis.size;
    }
    if (empty) where.fail("each window must contain an element of the map, along the " + std::string(axis.name));
}

void check_padded(const std::array<Axis, 2>& axes, int channels, const Where& where) {
    std::array<int64_t, 2> padded{}, window{};
    for (size_t i = 0; i < 2; ++i) {
        padded[i] = axes[i].size + axes[i].before + axes[i].after;
        window[i] = axes[i].dilation * (axes[i].kernel - 1) + 1;
    }
    if (padded[0] * padded[1] > kMaxBuffer / channels)
        where.fail("the padded map must have at most " + std::to_string(kMaxBuffer) + " elements, got " +
                   list(std::vector<int64_t>{channels, padded[0], padded[1]}));
    if (window[0] * window[1] > kMaxBuffer)
        where.fail("a window must span at most " + std::to_string(kMaxBuffer) + " elements, got " +
                   list(std::vector<int64_t>{window[0], window[1]}));
}

void drop_unused(Op* op, const Shape& dst) {
    if (dst.h == 1) op->stride.h = 1;
    if (dst.w == 1) op->stride.w = 1;
    if (op->kernel.h == 1) op->dilation.h = 1;
    if (op->kernel.w == 1) op->dilation.w = 1;
}

}  // namespace cofire
