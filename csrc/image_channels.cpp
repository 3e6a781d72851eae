// Ops that take channel by channel: elementwise, moving, pooling.
#include <algorithm>
#include <cmath>

#include "conv_common.h"
#include "image.h"
#include "pooling.h"

namespace cofire {

void Image::affine(const Op& op, int c) {
    const int n = shape(op.dst).area();
    const bool live = live_[op.src[0]].on[c];
    const float *x = plane(op.src[0], c), scale = op.kind == Kind::affine ? op.weight[c] : 1;
    float* y = plane(op.dst, c);
    for (int i = 0; i < n; ++i) y[i] = live ? x[i] * scale : 0;
    prepared_.kernels.finish(y, n, 1, op.kind == Kind::affine ? op.bias[c] : 0, nullptr, op.act, op.slope, y, nullptr);
}

void Image::rescale(const Op& op, int c) {
    const int n = shape(op.dst).area();
    float* y = plane(op.dst, c);
    const float* x = live_[op.src[0]].on[c] ? plane(op.src[0], c) : y;
    if (x == y) std::fill_n(y, n, 0.0f);
    prepared_.kernels.finish(x, n, factors_[op.group][c], op.shift[c], nullptr, op.act, op.slope, y, nullptr);
}

void Image::combine(const Op& op, int c) {
    const int n = shape(op.dst).area();
    const bool one = shape(op.src[1]).area() == 1;
    const bool left = live_[op.src[0]].on[c], right = live_[op.src[1]].on[c];
    const float *a = plane(op.src[0], c), *b = plane(op.src[1], c);
    float* y = plane(op.dst, c);
    if (op.kind == Kind::mul)
        for (int i = 0; i < n; ++i) y[i] = left && right ? a[i] * b[one ? 0 : i] : 0;
    else
        for (int i = 0; i < n; ++i) y[i] = (left ? a[i] : 0) + (right ? b[one ? 0 : i] : 0);
    prepared_.kernels.finish(y, n, 1, 0, nullptr, op.act, op.slope, y, nullptr);
}

template <class T>
void Image::move(const Op& op, int c, T zero) {
    const Shape in = shape(op.src[0]), out = shape(op.dst);
    const T* x = plane_of<T>(op.src[0], op.channels[c]);
    T* y = plane_of<T>(op.dst, c);
    for (int oy = 0; oy < out.h; ++oy)
        for (int ox = 0; ox < out.w; ++ox, ++y) {
            const int iy = oy * op.stride.h + op.offset.h, ix = ox * op.stride.w + op.offset.w;
            *y = iy >= 0 && iy < in.h && ix >= 0 && ix < in.w ? x[int64_t(iy) * in.w + ix] : zero;
        }
}

template <class T>
void Image::copy_cat(const Op& op, const Member& member) {
    int64_t done = 0;  // a flatten is a concatenation of planes too
    for (int source : op.src) {
        const Shape in = shape(source);
        const Range mine = member.share(live_[source].count);
        for (int k = mine.begin; k < mine.end; ++k) {
            const int c = live_[source].list[k];
            std::copy_n(plane_of<T>(source, c), in.area(), plane_of<T>(op.dst, 0) + done + int64_t(c) * in.area());
        }
        done += in.size();
    }
}

void Image::pool(const Op& op, int c, float* line) {
    const Shape in = shape(op.src[0]), out = shape(op.dst);
    const float* x = plane(op.src[0], c);
    float* y = plane(op.dst, c);
    const bool global =
        out.area() == 1 && op.padding.top + op.padding.left + op.padding.bottom + op.padding.right == 0 &&
        (op.adaptive || (op.kernel.h == in.h && op.kernel.w == in.w && op.dilation.h * op.dilation.w == 1));
    if (global) {
        *y = op.maximum ? prepared_.kernels.largest(x, in.area())
                        : prepared_.kernels.sum(x, in.area()) / float(in.area());
        return;
    }
    if (op.maximum && !op.adaptive) return max_pool(op, x, y, line);
    const float start = op.maximum ? -INFINITY : 0;
    float value = start;
    walk_windows(
        op, in, out, [&](int64_t at) { value = op.maximum ? larger(value, x[at]) : value + x[at]; },
        [&](int pixel, int count) {
            y[pixel] = op.maximum ? value : value / float(count);
            value = start;
        });
}

// The rows' maximum first, then that of shifted lines, a vector at a time; only then every stride-th pixel is taken.
void Image::max_pool(const Op& op, const float* x, float* y, float* line) {
    const Shape in = shape(op.src[0]), out = shape(op.dst);
    const int padding = std::max({op.padding.top, op.padding.left, op.padding.bottom, op.padding.right});
    const bool middles = (out.h - 1) * op.stride.h - op.padding.top + 1 < in.h &&
                         (out.w - 1) * op.stride.w - op.padding.left + 1 < in.w;  // of all windows are in the map
    if (middles && op.stride.h == 2 && op.stride.w == 2 && op.dilation.h * op.dilation.w == 1 &&
        op.kernel.h == op.kernel.w && (op.kernel.h == 2 ? padding == 0 : op.kernel.h == 3 && padding <= 1))
        return prepared_.kernels.max_pool(x, in, op.kernel.h, op.padding.top, op.padding.left, out, y);
    const int reach = (op.kernel.w - 1) * op.dilation.w, length = (out.w - 1) * op.stride.w + 1;
    float* wide = line + up(length, kLine) + kSlack;  // columns -padding.left to the last that a window reads
    for (int oy = 0; oy < out.h; ++oy, y += out.w) {
        std::fill(wide, wide + length + reach, -INFINITY);
        const int inside = std::min(in.w, length + reach - op.padding.left);
        for (int ky = 0; ky < op.kernel.h; ++ky) {
            const int iy = oy * op.stride.h + ky * op.dilation.h - op.padding.top;
            if (iy >= 0 && iy < in.h) prepared_.kernels.maximum(x + int64_t(iy) * in.w, inside, wide + op.padding.left);
        }
        std::copy_n(wide, length, line);
        for (int kx = 1; kx < op.kernel.w; ++kx) prepared_.kernels.maximum(wide + kx * op.dilation.w, length, line);
        prepared_.kernels.take(line, op.stride.w, out.w, y);
    }
}

template void Image::move<float>(const Op&, int, float);
template void Image::move<uint8_t>(const Op&, int, uint8_t);
template void Image::copy_cat<float>(const Op&, const Member&);
template void Image::copy_cat<uint8_t>(const Op&, const Member&);

}  // namespace cofire
