// What happens to one plane after the sums: bias, residual, activation; and reductions over a plane.
#include "leaves.h"
#include "vec.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

constexpr float kLowest = -__builtin_inff();

struct Linear {
    vec operator()(vec x) const { return x; }
};
struct Relu {
    vec operator()(vec x) const { return max(x, vec{}); }
};
struct Relu6 {
    vec operator()(vec x) const { return min(max(x, vec{}), splat(6)); }
};
struct Leaky {
    float slope;
    vec operator()(vec x) const { return x < 0 ? x * slope : x; }
};
struct Hardsigmoid {
    vec operator()(vec x) const { return min(max(x + 3, vec{}), splat(6)) * (1.0f / 6); }
};
struct Hardswish {
    vec operator()(vec x) const { return x * min(max(x + 3, vec{}), splat(6)) * (1.0f / 6); }
};
struct Sigmoid {
    vec operator()(vec x) const {
        for (int i = 0; i < kLanes; ++i) x[i] = 1 / (1 + __builtin_expf(-x[i]));
        return x;
    }
};
struct Silu {
    vec operator()(vec x) const { return x * Sigmoid()(x); }
};

inline float top(vec x) {
    float best = x[0];
    for (int i = 1; i < kLanes; ++i) best = x[i] > best || x[i] != x[i] ? x[i] : best;
    return best;
}

// The last, incomplete vector goes through a local copy: what lies behind n may be another plane.
inline vec load_some(const float* p, int n) {
    float lanes[kLanes] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}

template <class Activation>
void run(const float* x, int n, float bias, const float* residual, Activation act, float* y, float* peak) {
    vec best = splat(kLowest);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        vec value = load(x + i) + bias;
        if (residual) value += load(residual + i);
        value = act(value);
        store(y + i, value);
        best = max(best, value);
    }
    if (i < n) {
        vec value = load_some(x + i, n - i) + bias;
        if (residual) value += load_some(residual + i, n - i);
        value = act(value);
        for (int lane = 0; lane < n - i; ++lane) {
            y[i + lane] = value[lane];
            if (value[lane] > best[lane]) best[lane] = value[lane];
        }
    }
    if (peak) {
        const float found = top(best);
        if (found > *peak) *peak = found;
    }
}

}  // namespace

void finish(const float* x, int n, float bias, const float* residual, Act act, float slope, float* y, float* peak) {
    switch (act) {
        case Act::none:
            return run(x, n, bias, residual, Linear{}, y, peak);
        case Act::relu:
            return run(x, n, bias, residual, Relu{}, y, peak);
        case Act::relu6:
            return run(x, n, bias, residual, Relu6{}, y, peak);
        case Act::leaky:
            return run(x, n, bias, residual, Leaky{slope}, y, peak);
        case Act::silu:
            return run(x, n, bias, residual, Silu{}, y, peak);
        case Act::hardswish:
            return run(x, n, bias, residual, Hardswish{}, y, peak);
        case Act::sigmoid:
            return run(x, n, bias, residual, Sigmoid{}, y, peak);
        case Act::hardsigmoid:
            return run(x, n, bias, residual, Hardsigmoid{}, y, peak);
    }
}

namespace {

template <int Count>
void dots(const float* w, int nk, const float* x, int64_t ldx, float* out) {
    constexpr int kChains = Count > 2 ? 2 : 4;  // enough independent sums to hide the latency of an FMA
    vec sums[Count][kChains] = {};
    int k = 0;
    for (; k + kChains * kLanes <= nk; k += kChains * kLanes)
        for (int s = 0; s < kChains; ++s) {
            const vec weights = load(w + k + s * kLanes);
            for (int i = 0; i < Count; ++i) sums[i][s] += weights * load(x + i * ldx + k + s * kLanes);
        }
    for (int i = 0; i < Count; ++i) {
        vec total = sums[i][0];
        for (int s = 1; s < kChains; ++s) total += sums[i][s];
        float value = 0;
        for (int lane = 0; lane < kLanes; ++lane) value += total[lane];
        for (int rest = k; rest < nk; ++rest) value += w[rest] * x[i * ldx + rest];
        out[i] = value;
    }
}

}  // namespace

void dot(const float* w, int nk, const float* x, int64_t ldx, int count, float* out) {
    for (; count >= 4; count -= 4, x += 4 * ldx, out += 4) dots<4>(w, nk, x, ldx, out);
    for (; count >= 1; --count, x += ldx, ++out) dots<1>(w, nk, x, ldx, out);
}

// Unlike max, keeps the NaN of either.
static inline vec either(vec x, vec y) { return x != x ? x : max(y, x); }

void maximum(const float* x, int n, float* y) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(y + i, either(load(x + i), load(y + i)));
    for (; i < n; ++i) y[i] = x[i] > y[i] || x[i] != x[i] ? x[i] : y[i];
}

float largest(const float* x, int n) {
    vec best[2] = {splat(kLowest), splat(kLowest)};
    int i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        best[0] = either(load(x + i), best[0]);
        best[1] = either(load(x + i + kLanes), best[1]);
    }
    float value = top(either(best[0], best[1]));
    for (; i < n; ++i) value = x[i] > value || x[i] != x[i] ? x[i] : value;
    return value;
}

float sum(const float* x, int n) {
    vec sums[2] = {};
    int i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        sums[0] += load(x + i);
        sums[1] += load(x + i + kLanes);
    }
    const vec total = sums[0] + sums[1];
    float value = 0;
    for (int lane = 0; lane < kLanes; ++lane) value += total[lane];
    for (; i < n; ++i) value += x[i];
    return value;
}

}  // namespace COFIRE_ISA
}  // namespace cofire
