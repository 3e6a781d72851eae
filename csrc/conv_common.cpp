// Planes split by the phases of a stride, and where the taps of each pixel lie.
#include "conv_common.h"

namespace cofire {

Phases::Phases(const Op& op, Shape x, Shape y) : x_(x), stride_(op.stride), padding_(op.padding) {
    const int reach_h = (op.kernel.h - 1) * op.dilation.h, reach_w = (op.kernel.w - 1) * op.dilation.w;
    high_ = y.h + reach_h / stride_.h;  // lines of a phase that some tap of some output reads
    wide_ = y.w + reach_w / stride_.w;
    const int64_t phase = int64_t(high_) * wide_;
    size_ = phase * stride_.h * stride_.w;
    read_.resize(stride_.h * stride_.w);
    for (int ky = 0; ky < op.kernel.h; ++ky)
        for (int kx = 0; kx < op.kernel.w; ++kx) {
            const int dy = ky * op.dilation.h, dx = kx * op.dilation.w;
            const int number = dy % stride_.h * stride_.w + dx % stride_.w;
            taps_.push_back(int(number * phase + dy / stride_.h * wide_ + dx / stride_.w));
            read_[number] = true;
        }
}

void Phases::split(const Kernels& kernels, const float* plane, float* to) const {
    for (int py = 0; py < stride_.h; ++py)
        for (int px = 0; px < stride_.w; ++px) {
            if (!read_[py * stride_.w + px]) {
                to += int64_t(high_) * wide_;
                continue;
            }
            // columns [begin, end) of the phase lie inside the plane
            const int begin = std::min(std::max((padding_.left - px + stride_.w - 1) / stride_.w, 0), wide_);
            const int inside = (x_.w + padding_.left - px + stride_.w - 1) / stride_.w;
            const int end = std::min(std::max(inside, begin), wide_);
            for (int line = 0; line < high_; ++line, to += wide_) {
                const int y = line * stride_.h + py - padding_.top;
                const bool outside = y < 0 || y >= x_.h;
                for (int i = 0; i < (outside ? wide_ : begin); ++i) to[i] = 0;
                if (outside) continue;
                kernels.take(plane + int64_t(y) * x_.w + int64_t(begin) * stride_.w + px - padding_.left, stride_.w,
                             end - begin, to + begin);
                for (int i = end; i < wide_; ++i) to[i] = 0;
            }
        }
}

std::vector<int> pixels_of(const Op& op, Shape x, Shape y) {
    std::vector<int> found;
    for (int ky = 0; ky < op.kernel.h; ++ky)
        for (int kx = 0; kx < op.kernel.w; ++kx)
            for (int oy = 0; oy < y.h; ++oy)
                for (int ox = 0; ox < y.w; ++ox) {
                    const int iy = oy * op.stride.h + ky * op.dilation.h - op.padding.top;
                    const int ix = ox * op.stride.w + kx * op.dilation.w - op.padding.left;
                    const bool inside = iy >= 0 && iy < x.h && ix >= 0 && ix < x.w;
                    found.push_back(inside ? iy * x.w + ix : x.area());
                }
    return found;
}

}  // namespace cofire
