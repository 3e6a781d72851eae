#include "head8.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/kernels.h"

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

Head8 head8_of(const Program& program, const Head& head, Arena& arena) {
    const Form& form = program.forms[head.source];
    if (!form.u8() || form.scale > kLargestScale) return {};
    const int inputs = head.inputs(program.buffers[head.source]);
    Head8 found;
    for (int r = 0; r < head.rows; ++r) {
        found.factor.push_back(factor_of(head.weight + int64_t(r) * inputs, inputs));
        if (found.factor.back() == 0) return {};
    }
    const int64_t size = int64_t(head.rows) * inputs;
    int8_t* to = reinterpret_cast<int8_t*>(arena.take(size / 4 + kSlack));
    for (int64_t k = 0; k < size; ++k) to[k] = int8_t(std::nearbyint(head.weight[k] / found.factor[k / inputs]));
    found.weight = to;
    return found;
}

}  // namespace cofire
