// What happens to one plane after the sums: bias, residual, activation; and reductions over a plane.
#include "clamp.h"
#include "leaves.h"
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
// e^x to a unit in the last place or two: 2^k * e^r with |r| <= ln(2) / 2, e^r by its series.
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
    return x == x ? result : x;
}

struct Sigmoid {
    vec operator()(vec x) const { return 1 / (1 + exponential(-x)); }
};
struct Silu {
    vec operator()(vec x) const { return x * Sigmoid()(x); }
};

inline vec lane_numbers() {
    vec numbers;
    for (int i = 0; i < kLanes; ++i) numbers[i] = float(i);
    return numbers;
}

// The last, incomplete vector goes through a local copy: what lies behind n may be another plane.
inline vec load_some(const float* p, int n) {
    float lanes[kLanes] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}

constexpr int kSoon = 64;  // floats: where an output will be written

template <class Activation>
void run(const float* x, int n, float bias, const float* residual, Activation act, float* y, float* peak) {
    vec best = splat(kLowest);
    const auto step = [&](int i) {
        vec value = load(x + i) + bias;
        if (residual) value += load(residual + i);
        value = act(value);
        store(y + i, value);
        best = max(best, value);
    };
    int i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        __builtin_prefetch(y + i + kSoon, 1);
        step(i);
        step(i + kLanes);
    }
    for (; i + kLanes <= n; i += kLanes) step(i);
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
    }
}

void finish(const float* x, int n, float bias, const float* residual, Act act, float slope, float* y, float* peak) {
    with_activation(act, slope, [&](auto activation) { run(x, n, bias, residual, activation, y, peak); });
}

namespace {

// Taps is 9 or 25, whose loops are unrolled, or 0 for any number.
template <int Taps>
void lines_of(const float* x, int pitch, const int* at, const float* w, int taps, int lines, int width, float bias,
              Clamp act, float* y, float* peak) {
    constexpr int kMost = Taps ? Taps : 1;
    const float* from[kMost];
    vec weight[kMost];
    for (int t = 0; t < Taps; ++t) from[t] = x + at[t], weight[t] = splat(w[t]);
    const auto sum = [&](int64_t i) {
        vec total = splat(bias);
        if constexpr (Taps != 0) {
#pragma GCC unroll 32
            for (int t = 0; t < Taps; ++t) total += weight[t] * load(from[t] + i);
        } else {
            for (int t = 0; t < taps; ++t) total += splat(w[t]) * load(x + at[t] + i);
        }
        return act(total);
    };
    vec best = splat(kLowest);
    for (int line = 0; line < lines; ++line, y += width) {
        int i = 0;
        for (; i + kLanes <= width; i += kLanes) {
            const vec value = sum(int64_t(line) * pitch + i);
            store(y + i, value);
            best = max(best, value);
        }
        if (i < width) {
            const vec value = sum(int64_t(line) * pitch + i);
            best = max(best, lane_numbers() < float(width - i) ? value : best);
            if ((lines - line) * width - i >= kLanes)
                store(y + i, value);  // what is too much belongs to the plane's next lines, which come later
            else
                for (int lane = 0; lane < width - i; ++lane) y[i + lane] = value[lane];
        }
    }
    if (peak) {
        const float found = top(best);
        if (found > *peak) *peak = found;
    }
}

}  // namespace

void depthwise(const float* x, int pitch, const int* at, const float* w, int taps, int lines, int width, float bias,
               Act act, float slope, float* y, float* peak) {
    const Clamp clamp(act);
    const auto go = taps == 9 ? lines_of<9> : taps == 25 ? lines_of<25> : lines_of<0>;
    go(x, pitch, at, w, taps, lines, width, bias, clamp, y, clamp.whole ? peak : nullptr);
    if (!clamp.whole) finish(y, lines * width, 0, nullptr, act, slope, y, peak);
}

namespace {

// [0, x0, x1, ...]
inline vec shifted(vec x) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(x, vec{}, 16, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14);
#elif defined(__AVX__)
    return __builtin_shufflevector(x, vec{}, 8, 0, 1, 2, 3, 4, 5, 6);
#else
    return __builtin_shufflevector(x, vec{}, 4, 0, 1, 2);
#endif
}

// Every second float from `from` on: the even ones and the odd ones.
struct Halves {
    vec even, odd;

    explicit Halves(const float* from) {
        const float *low[kQuads], *high[kQuads];
        for (int q = 0; q < kQuads; ++q) low[q] = from + 8 * q, high[q] = low[q] + 4;
        const vec a = load_quads(low), b = load_quads(high);
        even = pick<0, 2, 4, 6>(a, b), odd = pick<1, 3, 5, 7>(a, b);
    }
};

// What the three taps of one line read for the outputs from i on. Left of the line there are zeros (if it is padded);
// what lies right of it is for the caller to blank out in the last tap: no other reaches that far.
template <int Stride, bool Padded>
struct Three {
    vec tap[3];

    Three(const float* line, int i) {
        if constexpr (Stride == 1) {
            const float* from = line + i;
            tap[0] = !Padded ? load(from) : i == 0 ? shifted(load(from)) : load(from - 1);
            tap[1] = load(from + !Padded);
            tap[2] = load(from + 1 + !Padded);
        } else {
            const float* from = line + 2 * i;
            const Halves here(from);
            tap[Padded] = here.even;
            tap[Padded + 1] = here.odd;
            if (Padded)
                tap[0] = i == 0 ? shifted(here.odd) : Halves(from - 2).odd;
            else
                tap[2] = Halves(from + 2).even;
        }
    }
};

template <int Stride, bool Padded>
void windows_of(const float* x, Shape shape, int top_padding, const float* zeros, const float* w, Shape out, float bias,
                Clamp act, float* y, float* peak) {
    vec weight[9], best = splat(kLowest);
    for (int t = 0; t < 9; ++t) weight[t] = splat(w[t]);
    for (int line = 0; line < out.h; ++line, y += out.w) {
        const float* lines[3];
        for (int k = 0; k < 3; ++k) {
            const int row = line * Stride - top_padding + k;
            lines[k] = row >= 0 && row < shape.h ? x + int64_t(row) * shape.w : zeros;
        }
        const auto sum = [&](int i, auto blank) {
            vec part[3] = {splat(bias)};  // one sum would wait for itself nine times
#pragma GCC unroll 3
            for (int k = 0; k < 3; ++k) {
                const Three<Stride, Padded> three(lines[k], i);
                part[k] += weight[3 * k] * three.tap[0];
                part[k] += weight[3 * k + 1] * three.tap[1];
                part[k] += weight[3 * k + 2] * blank(three.tap[2]);
            }
            return act(part[0] + part[1] + part[2]);
        };
        int i = 0;
        for (; i + kLanes < out.w; i += kLanes) {
            __builtin_prefetch(y + i + kSoon, 1);
            const vec value = sum(i, [](vec x) { return x; });
            store(y + i, value);
            best = max(best, value);
        }
        const float inside = float((shape.w + Padded - 3) / Stride - i);  // the last output whose last tap is inside
        const vec value = sum(i, [&](vec x) { return lane_numbers() > inside ? vec{} : x; });
        best = max(best, lane_numbers() < float(out.w - i) ? value : best);
        if ((out.h - line) * out.w - i >= kLanes)
            store(y + i, value);  // what is too much belongs to the plane's next lines, which come later
        else
            for (int lane = 0; lane < out.w - i; ++lane) y[i + lane] = value[lane];
    }
    if (peak) {
        const float found = top(best);
        if (found > *peak) *peak = found;
    }
}

}  // namespace

namespace {

// The largest of each window; what lies outside counts as the window's middle, which never does.
template <int Kernel, bool Padded>
void largest_of(const float* x, Shape shape, int top_padding, Shape out, float* y) {
    const auto line_of = [&](int row, int i, float inside) {
        const float* line = x + int64_t(row) * shape.w;
        if constexpr (Kernel == 2) {
            const Halves halves(line + 2 * i);
            return either(halves.even, halves.odd);
        } else {
            const Three<2, Padded> three(line, i);
            const vec first = Padded && i == 0 ? (lane_numbers() < 1 ? three.tap[1] : three.tap[0]) : three.tap[0];
            return either(first, either(three.tap[1], lane_numbers() > inside ? three.tap[1] : three.tap[2]));
        }
    };
    for (int line = 0; line < out.h; ++line, y += out.w)
        for (int i = 0; i < out.w; i += kLanes) {
            const float inside = float((shape.w + Padded - 3) / 2 - i);  // the last output whose last tap is inside
            const int first = 2 * line - top_padding;
            vec value = line_of(first + Kernel / 2, i, inside);
            for (int row = first; row < first + Kernel; ++row)
                if (row != first + Kernel / 2 && row >= 0 && row < shape.h)
                    value = either(value, line_of(row, i, inside));
            if ((out.h - line) * out.w - i >= kLanes)
                store(y + i, value);  // what is too much belongs to the plane's next lines, which come later
            else
                for (int lane = 0; lane < out.w - i; ++lane) y[i + lane] = value[lane];
        }
}

}  // namespace

void max_pool(const float* x, Shape shape, int kernel, int top_padding, int left_padding, Shape out, float* y) {
    const auto go = kernel == 2 ? largest_of<2, false> : left_padding ? largest_of<3, true> : largest_of<3, false>;
    go(x, shape, top_padding, out, y);
}

void depthwise3(const float* x, Shape shape, int stride, int top_padding, int left_padding, const float* zeros,
                const float* w, Shape out, float bias, Act act, float slope, float* y, float* peak) {
    const Clamp clamp(act);
    const auto go = stride == 1 ? (left_padding ? windows_of<1, true> : windows_of<1, false>)
                                : (left_padding ? windows_of<2, true> : windows_of<2, false>);
    go(x, shape, top_padding, zeros, w, out, bias, clamp, y, clamp.whole ? peak : nullptr);
    if (!clamp.whole) finish(y, out.area(), 0, nullptr, act, slope, y, peak);
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

constexpr int kFar = 512;  // floats: weights come from far away, and the CPU's own prefetcher stops at every page

// The order of a sum depends on the number of columns alone: results do not change with the rows it is computed beside.
// Heads have one column, and long sums in two halves, which are more exact.
template <int Rows, int Columns>
void dots(const float* const* w, int nk, const float* x, int64_t ldx, float* out, int64_t ldo,
          const float* const* ahead) {
    constexpr int kHalves = Columns == 1 ? 2 : 1;
    vec sums[Rows][Columns][kHalves] = {};
    int k = 0;
    for (; k + 2 * kLanes <= nk; k += 2 * kLanes) {
        for (int r = 0; r < Rows; ++r) __builtin_prefetch(k + kFar < nk ? w[r] + k + kFar : ahead[r] + (k + kFar - nk));
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
        for (; r + 3 <= rows; r += 3) dots<3, 4>(w + r, nk, x + i * ldx, ldx, out + r * ldo + i, ldo, ahead + r);
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
