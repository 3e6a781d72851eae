// Filters and maxima over small windows of one plane.
#include "clamp.h"
#include "functions.h"
#include "vec.h"

namespace cofire {
namespace COFIRE_ISA {

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
            best = either(value, best);
        }
        if (i < width) {
            const vec value = sum(int64_t(line) * pitch + i);
            best = either(lane_numbers() < float(width - i) ? value : best, best);
            if ((lines - line) * width - i >= kLanes)
                store(y + i, value);  // what is too much belongs to the plane's next lines, which come later
            else
                for (int lane = 0; lane < width - i; ++lane) y[i + lane] = value[lane];
        }
    }
    raise(peak, best);
}

}  // namespace

void depthwise(const float* x, int pitch, const int* at, const float* w, int taps, int lines, int width, float bias,
               Act act, float slope, float* y, float* peak) {
    const Clamp clamp(act);
    const auto go = taps == 9 ? lines_of<9> : taps == 25 ? lines_of<25> : lines_of<0>;
    go(x, pitch, at, w, taps, lines, width, bias, clamp, y, clamp.whole ? peak : nullptr);
    if (!clamp.whole) finish(y, lines * width, 1, 0, nullptr, act, slope, y, peak);
}

namespace {

// [before, x0, x1, ...]
inline vec shifted(vec x, vec before) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(x, before, 16, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14);
#elif defined(__AVX__)
    return __builtin_shufflevector(x, before, 8, 0, 1, 2, 3, 4, 5, 6);
#else
    return __builtin_shufflevector(x, before, 4, 0, 1, 2);
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

    Three(const float* line, int i, bool first) {
        if constexpr (Stride == 1) {
            const float* from = line + i;
            tap[0] = !Padded ? load(from) : first ? shifted(load(from), vec{}) : load(from - 1);
            tap[1] = load(from + !Padded);
            tap[2] = load(from + 1 + !Padded);
        } else {
            const float* from = line + 2 * i;
            const Halves here(from);
            tap[Padded] = here.even;
            tap[Padded + 1] = here.odd;
            if (Padded)
                tap[0] = shifted(here.odd, first ? vec{} : splat(from[-1]));
            else
                tap[2] = Halves(from + 2).even;
        }
    }
};

// A 3 x 3 filter on one plane.
struct Window {
    const float* x;
    Shape shape;
    int top_padding;
    const float* zeros;  // stand for the lines outside
    float bias;
    Clamp act;
    Shape out;
    float* y;
    const float* w;
};

// Outputs [i, i + kLanes) of every line, from the top down: what a line gives to the outputs of three (or, with a
// stride, two) lines is loaded once. First and Last: the strip lies at the map's left and right edge.
template <int Stride, bool Padded, bool First, bool Last>
vec strip(const Window& window, int i, vec best) {
    using Taps = Three<Stride, Padded>;
    vec weight[9];  // of our own, like all that the loop needs: what it writes could lie anywhere
    for (int t = 0; t < 9; ++t) weight[t] = splat(window.w[t]);
    const vec bias = splat(window.bias), low = splat(window.act.low), high = splat(window.act.high);
    const vec beyond = lane_numbers() - float((window.shape.w + Padded - 3) / Stride - i);  // above 0: no last tap
    const int width = window.out.w, outputs = window.out.h, height = window.shape.h, pitch = window.shape.w;
    const float *line = window.x, *zeros = window.zeros;
    int row = -window.top_padding;  // of the line that is read next
    const auto next_line = [&] {
        const float* from = row >= 0 && row < height ? line : zeros;
        if (row++ >= 0) line += pitch;
        return from;
    };
    const auto taps_of = [&](const float* from) __attribute__((always_inline)) {
        Taps taps(from, i, First);
        if constexpr (Last) taps.tap[2] = beyond > 0 ? vec{} : taps.tap[2];
        return taps;
    };
    const auto plus = [&](vec sum, int of, const Taps& taps) __attribute__((always_inline)) {
        for (int t = 0; t < 3; ++t) sum += weight[3 * of + t] * taps.tap[t];
        return sum;
    };
    const auto finished = [&](vec sum) __attribute__((always_inline)) {
        const vec value = min(max(sum, low), high);
        best = either(value, best);
        return value;
    };
    float *y = window.y + i, *const stop = window.y + window.out.area();
    const auto write = [&](vec value) {
        if (!Last || stop - y >= kLanes)
            store(y, value);
        else
            for (int lane = 0; lane < stop - y; ++lane) y[lane] = value[lane];
        y += width;
    };
    // Outputs that are stored whole, for what is too much belongs to the plane's next lines, which come later; of
    // these, the ones whose lines lie inside come first, without asking.
    const int room = int(stop - y) - kLanes, whole = !Last ? outputs : room < 0 ? 0 : room / width + 1;
    vec next = plus(bias, 0, taps_of(next_line()));
    int output = 0;
    if constexpr (Stride == 1) {
        const Taps second = taps_of(next_line());
        vec after = plus(bias, 0, second);
        next = plus(next, 1, second);
        const auto value = [&](const float* from) __attribute__((always_inline)) {
            const Taps taps = taps_of(from);
            const vec sum = plus(next, 2, taps);
            next = plus(after, 1, taps), after = plus(bias, 0, taps);
            return finished(sum);
        };
        for (; output < whole && row < height; ++output, ++row, line += pitch, y += width) store(y, value(line));
        for (; output < outputs; ++output) write(value(next_line()));
    } else {
        const auto value = [&](const float* middle, const float* below) __attribute__((always_inline)) {
            const vec half = plus(next, 1, taps_of(middle));
            const Taps taps = taps_of(below);
            next = plus(bias, 0, taps);
            return finished(plus(half, 2, taps));
        };
        for (; output < whole && row + 1 < height; ++output, row += 2, line += 2 * pitch, y += width)
            store(y, value(line, line + pitch));
        for (; output < outputs; ++output) {
            const float* middle = next_line();
            write(value(middle, next_line()));
        }
    }
    return Last && width < kLanes ? (lane_numbers() < float(width) ? best : splat(kLowest)) : best;
}

template <int Stride, bool Padded>
vec in_strips(const Window& window) {
    const int width = window.out.w;
    if (width <= kLanes) return strip<Stride, Padded, true, true>(window, 0, splat(kLowest));
    vec best = strip<Stride, Padded, true, false>(window, 0, splat(kLowest));
    for (int i = kLanes; i + kLanes < width; i += kLanes) best = strip<Stride, Padded, false, false>(window, i, best);
    return strip<Stride, Padded, false, true>(window, width - kLanes, best);
}

template <int Stride, bool Padded>
vec line_by_line(const Window& window) {
    const Shape shape = window.shape, out = window.out;
    const Clamp act = window.act;
    vec weight[9], best = splat(kLowest);
    for (int t = 0; t < 9; ++t) weight[t] = splat(window.w[t]);
    float* y = window.y;
    for (int line = 0; line < out.h; ++line, y += out.w) {
        const float* lines[3];
        for (int k = 0; k < 3; ++k) {
            const int row = line * Stride - window.top_padding + k;
            lines[k] = row >= 0 && row < shape.h ? window.x + int64_t(row) * shape.w : window.zeros;
        }
        const auto sum = [&](int i, bool first, auto blank) __attribute__((always_inline)) {
            vec part[3] = {splat(window.bias)};  // one sum would wait for itself nine times
#pragma GCC unroll 3
            for (int k = 0; k < 3; ++k) {
                const Three<Stride, Padded> three(lines[k], i, first);
                part[k] += weight[3 * k] * three.tap[0];
                part[k] += weight[3 * k + 1] * three.tap[1];
                part[k] += weight[3 * k + 2] * blank(three.tap[2]);
            }
            return act(part[0] + part[1] + part[2]);
        };
        const auto write = [&](int i, vec value) __attribute__((always_inline)) {
            __builtin_prefetch(y + i + kSoon, 1);
            store(y + i, value);
            best = either(value, best);
        };
        const auto whole = [](vec x) { return x; };
        write(0, sum(0, true, whole));
        int i = kLanes;
        for (; i + kLanes < out.w; i += kLanes) write(i, sum(i, false, whole));
        const float inside = float((shape.w + Padded - 3) / Stride - i);  // the last output whose last tap is inside
        const vec value = sum(i, false, [&](vec x) { return lane_numbers() > inside ? vec{} : x; });
        best = either(lane_numbers() < float(out.w - i) ? value : best, best);
        if ((out.h - line) * out.w - i >= kLanes)
            store(y + i, value);  // what is too much belongs to the plane's next lines, which come later
        else
            for (int lane = 0; lane < out.w - i; ++lane) y[i + lane] = value[lane];
    }
    return best;
}

constexpr int kWide = 32;  // floats: strips of wider maps would wait for memory

template <int Stride, bool Padded>
void windows_of(const Window& window, float* peak) {
    const auto go = window.out.w > kWide ? line_by_line<Stride, Padded> : in_strips<Stride, Padded>;
    raise(peak, go(window));
}

// The largest of each window; what lies outside counts as the window's middle, which never does.
template <int Kernel, bool Padded>
void largest_of(const float* x, Shape shape, int top_padding, Shape out, float* y) {
    const auto line_of = [&](int row, int i, float inside) {
        const float* line = x + int64_t(row) * shape.w;
        if constexpr (Kernel == 2) {
            const Halves halves(line + 2 * i);
            return either(halves.even, halves.odd);
        } else {
            const Three<2, Padded> three(line, i, i == 0);
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
    go({x, shape, top_padding, zeros, bias, clamp, out, y, w}, clamp.whole ? peak : nullptr);
    if (!clamp.whole) finish(y, out.area(), 1, 0, nullptr, act, slope, y, peak);
}

}  // namespace COFIRE_ISA
}  // namespace cofire
