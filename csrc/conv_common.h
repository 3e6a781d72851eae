// What the conv algorithms share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "conv.h"
#include "floats.h"

namespace cofire {

std::unique_ptr<AbstractConv> make_winograd2(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena);
std::unique_ptr<AbstractConv> make_winograd4(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena);
std::unique_ptr<AbstractConv> make_gemm(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena);
std::unique_ptr<AbstractConv> make_im2col(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena);
std::unique_ptr<AbstractConv> make_filters(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena);
std::unique_ptr<AbstractConv> make_dot(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena);
std::unique_ptr<AbstractConv> make_depthwise(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena);

constexpr int kFewPixels = 4;  // the largest map that make_dot takes with any number of inputs

// Whether make_dot takes pixels' inputs side by side: they fill cache lines, and are little more with their paddings.
bool fits_dots(const Op& op, Shape x, Shape y);

inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// A row length for arrays that are walked side by side: an odd number of cache lines, so that rows do not fall on each
// other in the cache.
inline int64_t odd_lines(int64_t n) {
    const int64_t lines = (n + kLine - 1) / kLine;
    return (lines | 1) * kLine;
}

// n things in as few groups of at most `most` as possible, of nearly one size: 13 in sixes is 5 + 4 + 4, which keeps
// the multipliers busier than 6 + 6 + 1.
inline int group_size(int left, int most) {
    const int groups = (left + most - 1) / most;
    return (left + groups - 1) / groups;
}

// Cuts the lines of `length` out of lines of `pitch`, in place, front to back.
inline void close_gaps(float* lines, int count, int pitch, int length) {
    if (pitch == length) return;
    for (int line = 1; line < count; ++line)
        std::copy(lines + int64_t(line) * pitch, lines + int64_t(line) * pitch + length,
                  lines + int64_t(line) * length);
}

// True where input pixel i and output pixel i lie at the same place: 1 x 1, no stride, no padding.
inline bool lies_as_output(const Op& op, Shape x, Shape y) {
    return op.kernel.h * op.kernel.w == 1 && op.stride.h == 1 && op.stride.w == 1 && x.area() == y.area() &&
           op.padding.top == 0 && op.padding.left == 0;
}

// The sums of n pixels of filter o, from pixel `first` on, become outputs. A plane that is whole then is still near, so
// that adding it up costs little.
inline void finish(const Kernels& kernels, const Op& op, const ConvCall& call, int o, const float* sums, int area,
                   int first, int n) {
    const int64_t at = int64_t(o) * area + first;
    kernels.finish(sums, n, call.factor[o], call.bias[o], call.residual ? call.residual + at : nullptr, op.act,
                   op.slope, call.y + at, call.peak ? call.peak + o : nullptr);
    if (call.sum && n == area) call.sum[o] = kernels.sum(call.y + at, area);
}

// For maps too narrow for whole lines: where each tap of each output pixel lies in the plane, which is `x.area()`, the
// place of a zero, if it lies outside. (tap, pixel).
std::vector<int> pixels_of(const Op& op, Shape x, Shape y);

// A plane with its padding, split by the phases of the stride: with the taps of a kernel as offsets, an output line is
// contiguous in every tap, whatever the stride.
class Phases {
   public:
    Phases(const Op& op, Shape x, Shape y);

    int pitch() const { return wide_; }                     // floats from one output line to the next
    int64_t size() const { return size_; }                  // floats of one split plane
    const std::vector<int>& taps() const { return taps_; }  // offset of each tap, row by row
    void split(const Kernels& kernels, const float* plane, float* to) const;

   private:
    const Shape x_;
    const Pair stride_;
    const Padding padding_;
    int wide_, high_;
    int64_t size_;
    std::vector<int> taps_;
    std::vector<bool> read_;  // phases that some tap reads; the others are not split
};

}  // namespace cofire
