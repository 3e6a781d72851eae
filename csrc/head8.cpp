#include "head8.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "conv8_common.h"

namespace cofire {

namespace {

constexpr int kMost8 = 127;             // the largest number of each row
constexpr float kLargestScale = 1e30f;  // of bytes: what they stand for, times all numbers of a row, is finite

// What the row's numbers are multiplied by, or 0 where they are none.
float factor_of(const float* row, int inputs) {
    float most = 0;
    for (int i = 0; i < inputs; ++i) most = std::max(most, std::abs(row[i]));
    if (most == 0) return 1;
    const float factor = most / kMost8;
    if (!(factor >= std::numeric_limits<float>::min()) || !std::isfinite(factor)) return 0;
    for (int i = 0; i < inputs; ++i)
        if (!(std::abs(row[i]) <= most) || std::nearbyint(row[i] / factor) * factor != row[i]) return 0;
    return factor;
}

}  // namespace

Head8 head8_of(const Program& program, const Head& head, const Kernels8& kernels, Arena& arena) {
    const Form& form = program.forms[head.source];
    if (!form.u8() || form.scale > kLargestScale) return {};
    const int inputs = head.inputs(program.buffers[head.source]);
    Head8 found;
    found.pitch = up(inputs, kLine8);
    for (int r = 0; r < head.rows; ++r) {
        found.factor.push_back(factor_of(head.weight + int64_t(r) * inputs, inputs));
        if (found.factor.back() == 0) return {};
    }
    int8_t* to = reinterpret_cast<int8_t*>(arena.take(head.rows * found.pitch / 4));
    found.weight = to;
    for (int r = 0; r < head.rows; ++r, to += found.pitch) {
        const float* row = head.weight + int64_t(r) * inputs;
        for (int i = 0; i < inputs; ++i) to[i] = int8_t(std::nearbyint(row[i] / found.factor[r]));
        found.total.push_back(std::accumulate(to, to + inputs, 0));
        found.lacks.push_back(kernels.dot_lacks ? kernels.dot_lacks(to, inputs) : 0);
    }
    return found;
}

WholeInputs::WholeInputs(const float* x, int n, int64_t pitch, uint8_t* planes) {
    const auto [least, most] = std::minmax_element(x, x + n);
    constexpr double kMost = (1 << 8 * kNumberBytes) - 1;
    low = *least;
    step = (double(*most) - low) / kMost;
    const double inverse = step > 0 ? 1 / step : 0;
    std::fill_n(planes, kNumberBytes * pitch, uint8_t(0));
    for (int i = 0; i < n; ++i) {
        const uint32_t number = uint32_t(std::min((x[i] - low) * inverse + 0.5, kMost));
        for (int b = 0; b < kNumberBytes; ++b) planes[b * pitch + i] = uint8_t(number >> 8 * b);
    }
}

}  // namespace cofire
