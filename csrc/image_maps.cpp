// Ops that make maps of other sizes and orders, and those over channels.
#include <algorithm>
#include <cmath>

#include "conv_common.h"
#include "format.h"
#include "image.h"

namespace cofire {

namespace {

constexpr int kAtOnce = 64;  // positions that are summed up side by side

// Of (x - mean)^2.
double square_sum(const float* x, int n, float mean) {
    constexpr int kSums = 16;
    float sums[kSums] = {};
    int i = 0;
    for (; i + kSums <= n; i += kSums)
        for (int lane = 0; lane < kSums; ++lane) sums[lane] += (x[i + lane] - mean) * (x[i + lane] - mean);
    double total = 0;
    for (; i < n; ++i) total += double(x[i] - mean) * (x[i] - mean);
    for (float sum : sums) total += sum;
    return total;
}

}  // namespace

// A line of the source's width first, then along it. A tap of weight zero reaches nothing.
void Image::resample(const Op& op, int c, float* line) {
    const Shape in = shape(op.src[0]), out = shape(op.dst);
    const int row_taps = int(op.rows.size()) / out.h, column_taps = int(op.columns.size()) / out.w;
    const float* x = plane(op.src[0], c);
    float* y = plane(op.dst, c);
    for (int oy = 0; oy < out.h; ++oy, y += out.w) {
        std::fill_n(line, in.w, 0.0f);
        for (int tap = 0; tap < row_taps; ++tap) {
            const float weight = op.weight[oy * row_taps + tap];
            const float* row = x + int64_t(op.rows[oy * row_taps + tap]) * in.w;
            if (weight != 0)
                for (int ix = 0; ix < in.w; ++ix) line[ix] += weight * row[ix];
        }
        for (int ox = 0; ox < out.w; ++ox) {
            float sum = 0;
            for (int tap = ox * column_taps; tap < (ox + 1) * column_taps; ++tap)
                if (op.bias[tap] != 0) sum += op.bias[tap] * line[op.columns[tap]];
            y[ox] = sum;
        }
    }
}

void Image::stride_along(const Op& op, int c) {
    const int area = shape(op.dst).area(), digits = int(op.sizes.size());
    const float* x = plane(op.src[0], 0) + op.begin;
    float* y = plane(op.dst, c);
    int digit[kMaxDigits] = {};
    int64_t rest = int64_t(c) * area, at = 0;
    for (int i = digits; i-- > 0; rest /= op.sizes[i]) {
        digit[i] = int(rest % op.sizes[i]);
        at += int64_t(digit[i]) * op.strides[i];
    }
    for (int e = 0; e < area; ++e) {
        y[e] = x[at];
        for (int i = digits; i-- > 0;) {
            at += op.strides[i];
            if (++digit[i] < op.sizes[i]) break;
            at -= int64_t(op.sizes[i]) * op.strides[i];
            digit[i] = 0;
        }
    }
}

// Channel c of the output is made of the source's channels c, c + C, c + 2 C, ...
void Image::reduce(const Op& op, int c) {
    const Shape in = shape(op.src[0]), out = shape(op.dst);
    const int area = out.area();
    float* y = plane(op.dst, c);
    std::copy_n(plane(op.src[0], c), area, y);
    for (int from = c + out.c; from < in.c; from += out.c) {
        const float* x = plane(op.src[0], from);
        if (op.reduction == Reduction::max)
            prepared_.kernels.maximum(x, area, y);
        else
            for (int i = 0; i < area; ++i) y[i] += x[i];
    }
    const float count = float(in.c / out.c);
    if (op.reduction == Reduction::avg)
        for (int i = 0; i < area; ++i) y[i] /= count;
}

void Image::softmax(const Op& op, const Member& member) {
    const Shape in = shape(op.src[0]);
    const int apart = in.c / op.ways, area = in.area();
    const Range mine = member.share(apart);
    for (int c = mine.begin; c < mine.end; ++c)
        for (int i = 0; i < area; ++i) {
            const int64_t step = int64_t(apart) * area;
            const float* x = plane(op.src[0], c) + i;
            float *y = plane(op.dst, c) + i, most = x[0];
            for (int way = 1; way < op.ways; ++way)
                if (x[way * step] > most || x[way * step] != x[way * step]) most = x[way * step];
            float sum = 0;
            for (int way = 0; way < op.ways; ++way) sum += y[way * step] = std::exp(x[way * step] - most);
            const float less = std::log(sum);
            for (int way = 0; way < op.ways; ++way)
                y[way * step] = op.log ? (x[way * step] - most) - less : y[way * step] / sum;
        }
}

void Image::normalise(const Op& op, const Member& member) {
    if (op.norm == Norm::group) {
        const Range mine = member.share(op.groups);
        for (int group = mine.begin; group < mine.end; ++group) normalise_group(op, group);
        return;
    }
    const int area = shape(op.dst).area();
    const Range mine = member.share((area + kAtOnce - 1) / kAtOnce);
    for (int part = mine.begin; part < mine.end; ++part)
        normalise_positions(op, part * kAtOnce, std::min(kAtOnce, area - part * kAtOnce));
}

void Image::normalise_group(const Op& op, int group) {
    const int channels = shape(op.dst).c / op.groups, area = shape(op.dst).area(), first = group * channels;
    double sum = 0, squares = 0;
    for (int c = first; c < first + channels; ++c) sum += prepared_.kernels.sum(plane(op.src[0], c), area);
    const double count = double(channels) * area, mean = sum / count;
    for (int c = first; c < first + channels; ++c) squares += square_sum(plane(op.src[0], c), area, float(mean));
    const float factor = float(1 / std::sqrt(squares / count + op.epsilon));
    for (int c = first; c < first + channels; ++c) {
        const float* x = plane(op.src[0], c);
        float *y = plane(op.dst, c), scale = factor * op.weight[c];
        for (int i = 0; i < area; ++i) y[i] = (x[i] - float(mean)) * scale + op.bias[c];
    }
}

void Image::normalise_positions(const Op& op, int begin, int count) {
    const int channels = shape(op.dst).c;
    float mean[kAtOnce] = {}, factor[kAtOnce] = {};
    if (op.norm == Norm::layer) {
        for (int c = 0; c < channels; ++c)
            for (int i = 0; i < count; ++i) mean[i] += plane(op.src[0], c)[begin + i];
        for (float& value : mean) value /= float(channels);
    }
    for (int c = 0; c < channels; ++c)
        for (int i = 0; i < count; ++i) {
            const float away = plane(op.src[0], c)[begin + i] - mean[i];
            factor[i] += away * away;
        }
    for (float& value : factor) {
        const float length = std::sqrt(value);
        value = op.norm == Norm::l2 ? 1 / (length < op.epsilon ? op.epsilon : length)
                                    : 1 / std::sqrt(value / float(channels) + op.epsilon);
    }
    for (int c = 0; c < channels; ++c)
        for (int i = 0; i < count; ++i)
            plane(op.dst, c)[begin + i] =
                (plane(op.src[0], c)[begin + i] - mean[i]) * factor[i] * op.weight[c] + op.bias[c];
}

// For each tap of a filter the sum over the channels, which is then put where the tap takes it.
void Image::deconv(int number, float* room, const Member& member) {
    const Op& op = prepared_.program.ops[number];
    const Shape in = shape(op.src[0]), out = shape(op.dst);
    const int filters = out.c / op.groups, channels = in.c / op.groups, taps = op.kernel.h * op.kernel.w;
    const int most = prepared_.kernels.rows;
    const int64_t pitch = up(in.area(), kLine) + kSlack;
    int* const from = reinterpret_cast<int*>(room + most * pitch);
    int* const place = from + up(in.c, kLine);
    const Channels &live = live_[op.src[0]], &on = live_[op.dst];
    const Range mine = member.share(on.count);
    for (int k = mine.begin; k < mine.end; ++k) {
        const int o = on.list[k], group = o / filters;
        int count = 0;
        for (int n = 0; n < live.count; ++n)
            if (live.list[n] / channels == group) {
                from[count] = live.list[n] * filters * taps;
                place[count++] = live.list[n] * in.area();
            }
        float* y = plane(op.dst, o);
        std::fill_n(y, out.area(), op.bias[o]);
        for (int tap = 0; tap < taps; tap += most) {
            const float* rows[kMaxRows];
            const int together = std::min(most, taps - tap);
            for (int r = 0; r < together; ++r) rows[r] = op.weight + int64_t(o % filters) * taps + tap + r;
            if (count == 0) break;
            prepared_.kernels.gemm(rows, together, from, place, count, plane(op.src[0], 0), in.area(), room, pitch,
                                   nullptr, false);
            for (int r = 0; r < together; ++r) {
                const int64_t dy = int64_t((tap + r) / op.kernel.w) * op.dilation.h - op.padding.top;
                const int64_t dx = int64_t((tap + r) % op.kernel.w) * op.dilation.w - op.padding.left;
                for (int iy = 0; iy < in.h; ++iy) {
                    const int64_t oy = int64_t(iy) * op.stride.h + dy;
                    if (oy < 0 || oy >= out.h) continue;
                    const float* sums = room + r * pitch + int64_t(iy) * in.w;
                    for (int ix = 0; ix < in.w; ++ix) {
                        const int64_t ox = int64_t(ix) * op.stride.w + dx;
                        if (ox >= 0 && ox < out.w) y[oy * out.w + ox] += sums[ix];
                    }
                }
            }
        }
        macs(number, member.thread) += int64_t(count) * taps * in.area();
    }
}

}  // namespace cofire
