// What an image does on bytes: convs, and every other op that takes or gives them, channel by channel.
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "conv_common.h"
#include "image.h"
#include "pooling.h"

namespace cofire {

namespace {

// What Kernels8::max_pool takes.
bool is_usual(const Op& op) {
    const Padding& p = op.padding;
    return op.kernel.h == op.kernel.w && (op.kernel.w == 2 || op.kernel.w == 3) && op.stride.h == 2 &&
           op.stride.w == 2 && op.dilation.h == 1 && op.dilation.w == 1 &&
           std::max({p.top, p.left, p.bottom, p.right}) <= 1;
}

}  // namespace

Quantized quantized_of(const Program& program, const Op& op) {
    const Form &in = program.forms[op.src[0]], &out = program.forms[op.dst];
    Quantized found{op.weight8, op.bias8, op.multiplier};
    found.zero_in = in.zero, found.zero_out = out.zero, found.low = op.low, found.high = op.high;
    found.to_float = !out.u8();
    if (op.residual) found.zero_residual = program.forms[op.src[1]].zero;
    found.residual_multiplier = op.residual_multiplier;
    return found;
}

void Image::conv8(int number, const Member& member) {
    const Op& op = prepared_.program.ops[number];
    const Channels& in = live_[op.src[0]];
    const bool gated = op.group >= 0;
    ConvCall8 call{};
    call.x = plane8(op.src[0], 0);
    call.in = in.list.data(), call.n_in = in.count;
    call.out = gated ? masks_[op.group].list.data() : all_.data();
    call.n_out = gated ? masks_[op.group].count : shape(op.dst).c;
    if (form(op.dst).u8())
        call.y = plane8(op.dst, 0);
    else
        call.y_float = plane(op.dst, 0);
    call.residual = op.residual ? plane8(op.src[1], 0) : nullptr;
    call.residual_on = op.residual ? live_[op.src[1]].on.data() : nullptr;
    call.room = reinterpret_cast<uint8_t*>(room_);
    Upcoming upcoming = member.threads == 1 ? after(number) : Upcoming();
    call.upcoming = &upcoming;
    if (call.n_out > 0 || op.residual) macs(number, member.thread) = prepared_.convs8[number]->run(call, member);
    member.meet();
    if (member.first()) set_conv_live(op);
}

void Image::quantize(const Op& op, int c) {
    const Form& to = form(op.dst);
    const float* x = plane(op.src[0], c);
    prepared_.kernels8.quantize(x, shape(op.dst).area(), 1 / to.scale, to.zero, plane8(op.dst, c));
}

void Image::dequantize(const Op& op, int c) {
    const Form& from = form(op.src[0]);
    const uint8_t* q = plane8(op.src[0], c);
    float* y = plane(op.dst, c);
    const int n = shape(op.dst).area();
    for (int i = 0; i < n; ++i) y[i] = float(q[i] - from.zero) * from.scale;
}

void Image::pool8(const Op& op, int c, float* line) {
    const Shape in = shape(op.src[0]), out = shape(op.dst);
    const uint8_t* x = plane8(op.src[0], c);
    if (op.maximum) {
        uint8_t *y = plane8(op.dst, c), most = 0;
        if (!op.adaptive) return max_pool8(op, x, y, reinterpret_cast<uint8_t*>(line));
        walk_windows(
            op, in, out, [&](int64_t at) { most = std::max(most, x[at]); },
            [&](int pixel, int) { y[pixel] = std::exchange(most, uint8_t(0)); });
        return;
    }
    if (op.adaptive && out.area() == 1) {
        *plane(op.dst, c) = mean8(op.src[0], c, false);
        return;
    }
    float* y = plane(op.dst, c);
    const Form& from = form(op.src[0]);
    int64_t sum = 0;
    walk_windows(
        op, in, out, [&](int64_t at) { sum += x[at] - from.zero; },
        [&](int pixel, int count) { y[pixel] = float(std::exchange(sum, 0)) / float(count) * from.scale; });
}

// The rows' maximum first, then that of shifted lines; only then every
// stride-th pixel is taken.
void Image::max_pool8(const Op& op, const uint8_t* x, uint8_t* y, uint8_t* line) {
    const Shape in = shape(op.src[0]), out = shape(op.dst);
    if (is_usual(op)) {
        const Pool8Map map{in.h, in.w, op.kernel.w, op.padding.top, op.padding.left, out.h, out.w};
        return prepared_.kernels8.max_pool(x, map, line, y);
    }
    const int reach = (op.kernel.w - 1) * op.dilation.w, length = (out.w - 1) * op.stride.w + 1;
    uint8_t* wide = line + length;  // columns -padding.left to the last that a window reads
    const auto raise = [](const uint8_t* from, int n, uint8_t* to) {
        for (int i = 0; i < n; ++i) to[i] = std::max(to[i], from[i]);
    };
    for (int oy = 0; oy < out.h; ++oy, y += out.w) {
        std::fill(wide, wide + length + reach, uint8_t(0));
        const int inside = std::min(in.w, length + reach - op.padding.left);
        for (int ky = 0; ky < op.kernel.h; ++ky) {
            const int iy = oy * op.stride.h + ky * op.dilation.h - op.padding.top;
            if (iy >= 0 && iy < in.h) raise(x + int64_t(iy) * in.w, inside, wide + op.padding.left);
        }
        std::copy_n(wide, length, line);
        for (int kx = 1; kx < op.kernel.w; ++kx) raise(wide + kx * op.dilation.w, length, line);
        for (int ox = 0; ox < out.w; ++ox) y[ox] = line[int64_t(ox) * op.stride.w];
    }
}

// Its maximum, q - zero, as a number.
float Image::largest8(int buffer, int c) {
    const uint8_t most = prepared_.kernels8.largest(plane8(buffer, c), shape(buffer).area());
    return float(most - form(buffer).zero) * form(buffer).scale;
}

// The mean of q - zero, or of its magnitudes, as a number.
float Image::mean8(int buffer, int c, bool magnitudes) {
    const uint8_t* q = plane8(buffer, c);
    const int n = shape(buffer).area(), zero = form(buffer).zero;
    int64_t sum = 0;
    if (!magnitudes) sum = prepared_.kernels8.sum(q, n) - int64_t(n) * zero;
    for (int i = 0; i < n && magnitudes; ++i) sum += std::abs(q[i] - zero);
    return float(sum) / float(n) * form(buffer).scale;
}

}  // namespace cofire
