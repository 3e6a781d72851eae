// The windows of a pool, one by one.
#pragma once

#include "program.h"

namespace cofire {

// Or a NaN.
inline float larger(float a, float b) { return a != a || a >= b ? a : b; }

// For each output pixel in turn: inside(place) for every element of the map
// that its window has, then done(pixel, count), with the number of elements
// that a mean divides by.
template <class Inside, class Done>
void walk_windows(const Op& op, Shape in, Shape out, Inside inside, Done done) {
    struct Span {
        int begin, end;
    };
    const auto window = [&](int o, int n, int m, int kernel, int stride, int before) {
        const int begin = op.adaptive ? int(int64_t(o) * n / m) : o * stride - before;
        return Span{begin, op.adaptive ? int((int64_t(o + 1) * n + m - 1) / m) : begin + kernel};
    };
    const int reach_h = (op.kernel.h - 1) * op.dilation.h + 1, reach_w = (op.kernel.w - 1) * op.dilation.w + 1;
    for (int oy = 0; oy < out.h; ++oy)
        for (int ox = 0; ox < out.w; ++ox) {
            const Span rows = window(oy, in.h, out.h, reach_h, op.stride.h, op.padding.top);
            const Span columns = window(ox, in.w, out.w, reach_w, op.stride.w, op.padding.left);
            int count = 0;
            for (int iy = rows.begin; iy < rows.end; iy += op.dilation.h)
                for (int ix = columns.begin; ix < columns.end; ix += op.dilation.w) {
                    const bool within = iy >= 0 && iy < in.h && ix >= 0 && ix < in.w;
                    const bool padded = iy >= -op.padding.top && iy < in.h + op.padding.bottom &&
                                        ix >= -op.padding.left && ix < in.w + op.padding.right;
                    count += within || (op.include_pad && padded);
                    if (within) inside(int64_t(iy) * in.w + ix);
                }
            done(oy * out.w + ox, count);
        }
}

}  // namespace cofire
