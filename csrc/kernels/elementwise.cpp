// What happens to one plane after the sums: factor, bias, residual, activation; and reductions over a plane.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "clamp.h"
#include "functions.h"
#include "vec.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

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
// e^x to a unit in the last place or two, but 0 below e^-87 and no more than e^88: 2^k * e^r with |r| <= ln(2) / 2, e^r
// by its series.
inline vec exponential(vec x) {
    typedef int ints __attribute__((vector_size(4 * kLanes)));
    const vec clipped = min(max(x, splat(-87)), splat(88));
    const ints k = __builtin_convertvector(clipped * 1.44269504f + (clipped < 0 ? splat(-0.5f) : splat(0.5f)), ints);
    const vec whole = __builtin_convertvector(k, vec);
    const vec r = (clipped - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vec series = splat(1.0f / 5040);
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1;
    series = series * r + 1;
    const ints bits = (k + 127) << 23;
    const vec result = series * reinterpret_cast<const vec&>(bits);
    return x != x ? x : x < -87 ? vec{} : result;
}

struct Sigmoid {
    vec operator()(vec x) const { return 1 / (1 + exponential(-x)); }
};
struct Silu {
    vec operator()(vec x) const { return x * Sigmoid()(x); }
};

inline vec magnitude(vec x) { return x < 0 ? -x : x; }

// 1 - 2 / (e^2x + 1)
struct Tanh {
    vec operator()(vec x) const { return 1 - 2 / (1 + exponential(2 * x)); }
};
// erf by Abramowitz and Stegun 7.1.26: within 1.5e-7.
struct Gelu {
    vec operator()(vec x) const {
        const vec u = magnitude(x) * 0.70710678f, t = 1 / (1 + 0.3275911f * u);
        vec series = splat(1.061405429f);
        series = series * t - 1.453152027f;
        series = series * t + 1.421413741f;
        series = series * t - 0.284496736f;
        series = series * t + 0.254829592f;
        const vec tail = series * t * exponential(-u * u) * 0.5f;  // of the normal distribution
        return x * (x < 0 ? tail : 1 - tail);
    }
};
struct GeluTanh {
    vec operator()(vec x) const {
        const vec even = min(x * x, splat(1e4f));
        return x * Sigmoid()(x * (1.595769122f + 0.0713548163f * even));
    }
};
struct Elu {
    float slope;
    vec operator()(vec x) const { return x < 0 ? (exponential(x) - 1) * slope : x; }
};
struct Hardtanh {
    float bound;
    vec operator()(vec x) const { return min(max(x, splat(-bound)), splat(bound)); }
};
// tanh(ln(1 + n)) = (n n + 2 n) / (n n + 2 n + 2)
struct Mish {
    vec operator()(vec x) const {
        const vec n = exponential(min(x, splat(20))), product = n * (n + 2);
        return x * (product / (product + 2));
    }
};
// max(x, 0) + ln(1 + u), u = e^-|x|; ln(1 + u) = 2 artanh(u / (2 + u))
struct Softplus {
    vec operator()(vec x) const {
        const vec u = exponential(-magnitude(x)), s = u / (2 + u), square = s * s;
        vec series = splat(1.0f / 13);
        series = series * square + 1.0f / 11;
        series = series * square + 1.0f / 9;
        series = series * square + 1.0f / 7;
        series = series * square + 1.0f / 5;
        series = series * square + 1.0f / 3;
        series = series * square + 1;
        return max(x, vec{}) + 2 * s * series;
    }
};

// The last, incomplete vector goes through a local copy: what lies behind n may be another plane.
inline vec load_some(const float* p, int n) {
    float lanes[kLanes] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}

template <class Activation>
void run(const float* x, int n, float factor, float bias, const float* residual, Activation act, float* y,
         float* peak) {
    vec best = splat(kLowest);
    const auto step = [&](int i) {
        vec value = load(x + i) * factor + bias;
        if (residual) value += load(residual + i);
        value = act(value);
        store(y + i, value);
        best = either(value, best);
    };
    int i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        __builtin_prefetch(y + i + kSoon, 1);
        step(i);
        step(i + kLanes);
    }
    for (; i + kLanes <= n; i += kLanes) step(i);
    if (i < n) {
        vec value = load_some(x + i, n - i) * factor + bias;
        if (residual) value += load_some(residual + i, n - i);
        value = act(value);
        for (int lane = 0; lane < n - i; ++lane) {
            y[i + lane] = value[lane];
            if (value[lane] > best[lane] || value[lane] != value[lane]) best[lane] = value[lane];
        }
    }
    raise(peak, best);
}

}  // namespace

// Calls `go` with the activation as a function object, so that each gets a loop of its own.
template <class Go>
inline void with_activation(Act act, float slope, Go go) {
    switch (act) {
        case Act::none:
            return go(Linear{});
        case Act::relu:
            return go(Relu{});
        case Act::relu6:
            return go(Relu6{});
        case Act::leaky:
            return go(Leaky{slope});
        case Act::silu:
            return go(Silu{});
        case Act::hardswish:
            return go(Hardswish{});
        case Act::sigmoid:
            return go(Sigmoid{});
        case Act::hardsigmoid:
            return go(Hardsigmoid{});
        case Act::gelu:
            return go(Gelu{});
        case Act::gelu_tanh:
            return go(GeluTanh{});
        case Act::elu:
            return go(Elu{slope});
        case Act::tanh:
            return go(Tanh{});
        case Act::hardtanh:
            return go(Hardtanh{slope});
        case Act::mish:
            return go(Mish{});
        case Act::softplus:
            return go(Softplus{});
    }
}

void finish(const float* x, int n, float factor, float bias, const float* residual, Act act, float slope, float* y,
            float* peak) {
    with_activation(act, slope, [&](auto activation) { run(x, n, factor, bias, residual, activation, y, peak); });
}

void take(const float* from, int step, int n, float* to) {
    int i = 0;
    if (step == 1) {
        for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
        if (i < n && n >= kLanes) return store(to + n - kLanes, load(from + n - kLanes));
    } else if (step == 2) {
        for (; i + 4 <= n; i += 4)
            store4(to + i, __builtin_shufflevector(load4(from + 2 * i), load4(from + 2 * i + 4), 0, 2, 4, 6));
    }
    for (; i < n; ++i) to[i] = from[int64_t(i) * step];
}

void softmax(float* x, int n) {
    const float most = largest(x, n);
    vec sums = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const vec value = exponential(load(x + i) - most);
        store(x + i, value);
        sums += value;
    }
    float total = 0;
    if (i < n) {
        const vec value = exponential(load_some(x + i, n - i) - most);
        for (int lane = 0; lane < n - i; ++lane) total += x[i + lane] = value[lane];
    }
    for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
    for (i = 0; i < n; ++i) x[i] /= total;
}

namespace {

constexpr int kFar = 1024;                   // floats ahead, or a row: the CPU's own prefetcher stops at every page
constexpr int kDeep = kLanes == 16 ? 3 : 4;  // rows of four columns each at a time, as timing them said

// The order of a sum depends on the number of columns alone: results do not change with the rows it is computed beside.
// Heads have one column, and long sums in two halves, which are more exact.
template <int Rows, int Columns>
void dots(const float* const* w, int nk, const float* x, int64_t ldx, float* out, int64_t ldo,
          const float* const* ahead) {
    constexpr int kHalves = Columns == 1 ? 2 : 1;
    const int far = nk < kFar ? nk : kFar;
    vec sums[Rows][Columns][kHalves] = {};
    int k = 0;
    for (; k + 2 * kLanes <= nk; k += 2 * kLanes) {
        for (int r = 0; r < Rows; ++r)
            for (int line = 0; line < 2 * kLanes; line += kLine)
                fetch_weights((k + far < nk ? w[r] + k + far : ahead[r] + (k + far - nk)) + line);
        for (int half = 0; half < 2; ++half) {
            const int at = k + half * kLanes;
            vec weights[Rows];
            for (int r = 0; r < Rows; ++r) weights[r] = load(w[r] + at);
            for (int i = 0; i < Columns; ++i) {
                const vec pixels = load(x + i * ldx + at);
                for (int r = 0; r < Rows; ++r) sums[r][i][half % kHalves] += weights[r] * pixels;
            }
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int i = 0; i < Columns; ++i) {
            const vec total = kHalves == 2 ? sums[r][i][0] + sums[r][i][kHalves - 1] : sums[r][i][0];
            float value = 0;
            for (int lane = 0; lane < kLanes; ++lane) value += total[lane];
            for (int rest = k; rest < nk; ++rest) value += w[r][rest] * x[i * ldx + rest];
            out[r * ldo + i] = value;
        }
}

}  // namespace

void dot(const float* const* w, int rows, int nk, const float* x, int64_t ldx, int count, float* out, int64_t ldo,
         const float* const* ahead) {
    int i = 0;
    for (; i + 4 <= count; i += 4) {
        int r = 0;
        for (; r + kDeep <= rows; r += kDeep)
            dots<kDeep, 4>(w + r, nk, x + i * ldx, ldx, out + r * ldo + i, ldo, ahead + r);
        for (; r < rows; ++r) dots<1, 4>(w + r, nk, x + i * ldx, ldx, out + r * ldo + i, ldo, ahead + r);
    }
    for (; i < count; ++i) {
        int r = 0;
        for (; r + 6 <= rows; r += 6) dots<6, 1>(w + r, nk, x + i * ldx, ldx, out + r * ldo + i, ldo, ahead + r);
        for (; r + 3 <= rows; r += 3) dots<3, 1>(w + r, nk, x + i * ldx, ldx, out + r * ldo + i, ldo, ahead + r);
        for (; r < rows; ++r) dots<1, 1>(w + r, nk, x + i * ldx, ldx, out + r * ldo + i, ldo, ahead + r);
    }
}

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

// Zero times a number is zero, but for those that are not finite.
bool finite(const float* x, int n) {
    vec zeros = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) zeros += 0 * load(x + i);
    float zero = 0;
    for (; i < n; ++i) zero += 0 * x[i];
    for (int lane = 0; lane < kLanes; ++lane) zero += zeros[lane];
    return zero == 0;
}

namespace {

struct Magnitude {
    vec operator()(vec x) const { return x < 0 ? -x : x; }
    float operator()(float x) const { return x < 0 ? -x : x; }
};
struct Itself {
    vec operator()(vec x) const { return x; }
    float operator()(float x) const { return x; }
};

template <class Of>
float sum_of(const float* x, int n, Of of) {
    vec sums[2] = {};
    int i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        sums[0] += of(load(x + i));
        sums[1] += of(load(x + i + kLanes));
    }
    const vec total = sums[0] + sums[1];
    float value = 0;
    for (int lane = 0; lane < kLanes; ++lane) value += total[lane];
    for (; i < n; ++i) value += of(x[i]);
    return value;
}

}  // namespace

float sum(const float* x, int n) { return sum_of(x, n, Itself{}); }
float sum_of_magnitudes(const float* x, int n) { return sum_of(x, n, Magnitude{}); }

}  // namespace COFIRE_ISA
}  // namespace cofire
