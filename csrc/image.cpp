#include "image.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>

#include "conv_common.h"
#include "pooling.h"

namespace cofire {

namespace {

// Or a NaN.
float larger(float a, float b) { return a != a || a >= b ? a : b; }

// What is not live in a buffer may hold anything; these walk over all of it.
bool reads_as_zeros(Kind kind) {
    return kind == Kind::strided || kind == Kind::reduce || kind == Kind::softmax || kind == Kind::norm;
}

int widest(const Program& program) {
    int most = 1;
    for (const Shape& shape : program.buffers) most = std::max(most, shape.c);
    return most;
}

}  // namespace

int64_t Prepared::room(int threads) const {
    int64_t most = 0;
    for (const auto& conv : convs)
        if (conv) most = std::max(most, conv->room(threads));
    for (const auto& conv : convs8)
        if (conv) most = std::max(most, up(conv->room(threads), sizeof(float)) / int64_t(sizeof(float)));
    for (const Op& op : program.ops) most = std::max(most, threads * op_room(op));
    return most + kSlack;
}

double Prepared::bytes() const {
    double floats = double(plan.arena) + double(room(1)) + 5.0 * widest(program), lists = 0;
    for (size_t b = 0; b < program.buffers.size(); ++b) {
        lists += program.buffers[b].c;
        floats += plan.peaked[b] ? program.buffers[b].c : 0;
    }
    for (const Group& group : program.groups) lists += group.filters;
    return sizeof(float) * floats + (sizeof(int) + 1) * lists;
}

int64_t Prepared::op_room(const Op& op) const {
    const Shape& in = program.buffers[op.src[0]];
    if (op.kind == Kind::resample) return up(in.w, kLine) + kSlack;
    if (op.kind == Kind::deconv) return leaf.rows * (up(in.area(), kLine) + kSlack) + 2 * up(in.c, kLine);
    if (op.kind != Kind::pool) return 0;
    const int64_t length = int64_t(program.buffers[op.dst].w) * op.stride.w + int64_t(op.kernel.w) * op.dilation.w;
    return 2 * (up(length + program.buffers[op.src[0]].w, kLine) + kSlack);
}

void Channels::set_all() {
    std::fill(on.begin(), on.end(), uint8_t(1));
    std::iota(list.begin(), list.end(), 0);
    count = int(list.size());
}

void Channels::list_on() {
    count = 0;
    for (int c = 0; c < int(on.size()); ++c) {
        list[count] = c;
        count += on[c];
    }
}

Image::Image(const Prepared& prepared, int threads)
    : prepared_(prepared),
      wide_(up(2 * widest(prepared.program), kLine) + kSlack),
      arena_(shelf_.take(prepared.plan.arena + kSlack)),
      room_(shelf_.take(prepared.room(threads))),
      pooled_(shelf_.take(wide_)),
      softmax_(shelf_.take(threads * wide_)),
      logits_(shelf_.take(wide_)),
      biases_(shelf_.take(threads * wide_)),
      macs_(2 * threads * kLine) {
    const Program& program = prepared.program;
    const int most = widest(program);
    all_.resize(most);
    std::iota(all_.begin(), all_.end(), 0);
    ones_.assign(most, 1.0f);
    int64_t peaks = 0, sums = 0;
    for (size_t b = 0; b < program.buffers.size(); ++b) {
        live_.emplace_back(program.buffers[b].c);
        peak_offsets_.push_back(peaks);
        if (prepared.plan.peaked[b]) peaks += int64_t(threads) * program.buffers[b].c;
        sum_offsets_.push_back(sums);
        if (prepared.plan.summed[b]) sums += program.buffers[b].c;
    }
    peaks_.assign(peaks, -INFINITY);
    sums_.assign(sums, NAN);
    for (const Group& group : program.groups) masks_.emplace_back(group.filters);
    factors_.resize(program.groups.size());
    for (const Op& op : program.ops)
        if (op.decides && op.head.scale) factors_[op.group].assign(masks_[op.group].on.size(), 1.0f);
}

void Image::run(const Call& call, int index, const Member& member) {
    const Program& program = prepared_.program;
    const Shape in = shape(program.input);
    const Range mine = member.share(in.c);
    std::copy_n(call.input + index * in.size() + int64_t(mine.begin) * in.area(),
                int64_t(mine.end - mine.begin) * in.area(), plane(program.input, mine.begin));
    if (member.first()) live_[program.input].set_all();
    member.meet();
    for (int number = 0; number < int(program.ops.size()); ++number) {
        const bool timed = call.seconds && member.first();
        const auto begin = timed ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
        step(number, call, index, member);
        if (timed)
            call.seconds[number] += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
    give_output(call, index, member);
    member.meet();
}

void Image::step(int number, const Call& call, int index, const Member& member) {
    const Op& op = prepared_.program.ops[number];
    if (op.decides) decide(number, call, index, member);
    macs(number, member.thread) = 0;
    if (op.kind == Kind::conv) {
        conv(number, member);
    } else if (op.kind == Kind::conv8) {
        conv8(number, member);
    } else {
        if (member.first()) set_live(op);
        member.meet();
        const Channels& live = live_[op.dst];
        const Range mine = member.share(live.count);
        float* line = room_ + member.thread * prepared_.op_room(op);
        if (reads_as_zeros(op.kind)) clear_dead(op.src[0], all_.data(), member.share(shape(op.src[0]).c), member);
        const bool u8 = form(op.src[0]).u8();
        if (op.kind == Kind::cat || op.kind == Kind::flatten)
            u8 ? copy_cat<uint8_t>(op, member) : copy_cat<float>(op, member);
        else if (op.kind == Kind::softmax)
            softmax(op, member);
        else if (op.kind == Kind::norm)
            normalise(op, member);
        else if (op.kind == Kind::deconv)
            deconv(number, line, member);
        else
            for (int k = mine.begin; k < mine.end; ++k) {
                const int c = live.list[k];
                if (op.kind == Kind::affine || op.kind == Kind::act) affine(op, c);
                if (op.kind == Kind::rescale) rescale(op, c);
                if (op.kind == Kind::add || op.kind == Kind::mul) combine(op, c);
                if (op.kind == Kind::move && u8) move<uint8_t>(op, c, uint8_t(form(op.src[0]).zero));
                if (op.kind == Kind::move && !u8) move<float>(op, c, 0);
                if (op.kind == Kind::pool) u8 ? pool8(op, c, line) : pool(op, c, line);
                if (op.kind == Kind::quantize) quantize(op, c);
                if (op.kind == Kind::dequantize) dequantize(op, c);
                if (op.kind == Kind::resample) resample(op, c, line);
                if (op.kind == Kind::strided) stride_along(op, c);
                if (op.kind == Kind::reduce) reduce(op, c);
            }
    }
    member.meet();
    if (member.first() && call.macs) {
        int64_t& total = call.macs[index * prepared_.program.ops.size() + number];
        total = 0;
        for (int thread = 0; thread < member.threads; ++thread) total += macs(number, thread);
    }
}

// Two ops take turns: while the first member still adds up one op's counts, others may be in the next.
int64_t& Image::macs(int number, int thread) { return macs_[(2 * thread + number % 2) * kLine]; }

// ---- convs

void Image::conv(int number, const Member& member) {
    const Op& op = prepared_.program.ops[number];
    const Channels& in = live_[op.src[0]];
    const Shape out = shape(op.dst);
    const bool gated = op.group >= 0, peaked = prepared_.plan.peaked[op.dst], summed = prepared_.plan.summed[op.dst];
    ConvCall call{};
    call.x = plane(op.src[0], 0);
    call.in = in.list.data(), call.n_in = in.count;
    call.out = gated ? masks_[op.group].list.data() : all_.data();
    call.n_out = gated ? masks_[op.group].count : out.c;
    call.factor = op.shift ? factors_[op.group].data() : ones_.data();
    call.bias = op.shift ? rescaled_bias(op, call, member) : op.bias;
    call.y = plane(op.dst, 0);
    call.residual = op.residual ? plane(op.src[1], 0) : nullptr;
    call.peak = peaked ? peaks(op.dst, member.thread) : nullptr;
    call.sum = summed ? sums(op.dst) : nullptr;
    call.room = room_;
    Upcoming upcoming = member.threads == 1 ? after(number) : Upcoming();
    call.upcoming = &upcoming;
    if (op.residual) clear_dead(op.src[1], call.out, member.share(call.n_out), member);
    if (peaked)
        for (int f = 0; f < call.n_out; ++f) call.peak[call.out[f]] = -INFINITY;
    if (summed && member.first())
        for (int f = 0; f < call.n_out; ++f) call.sum[call.out[f]] = NAN;
    if (call.n_out > 0) {  // else there is nothing to do, not even to the inputs
        if (summed) member.meet();
        macs(number, member.thread) = prepared_.convs[number]->run(call, member);
        member.meet();
        if (peaked && member.threads > 1) merge_peaks(op.dst, member);
    }
    if (op.residual && gated) keep_residual(number, member);
    if (member.first()) set_conv_live(op);
}

void Image::set_conv_live(const Op& op) {
    Channels& live = live_[op.dst];
    if (op.group < 0) return live.set_all();
    const Channels& mask = masks_[op.group];
    if (op.residual)
        for (size_t c = 0; c < live.on.size(); ++c) live.on[c] = mask.on[c] | live_[op.src[1]].on[c];
    else
        live.on = mask.on;
    live.list_on();
}

// factor * (sum + bias) + shift = factor * sum + what is given here
const float* Image::rescaled_bias(const Op& op, const ConvCall& call, const Member& member) {
    float* biases = biases_ + member.thread * wide_;
    for (int f = 0; f < call.n_out; ++f) {
        const int o = call.out[f];
        biases[o] = call.factor[o] * op.bias[o] + op.shift[o];
    }
    return biases;
}

Upcoming Image::after(int number) const {
    const std::vector<Op>& ops = prepared_.program.ops;
    Upcoming upcoming;
    for (size_t next = number + 1; next < ops.size(); ++next) {
        if (ops[next].kind != Kind::conv) continue;
        upcoming.add(prepared_.convs[next]->weights());
        if (ops[next].decides)
            upcoming.add({ops[next].head.weight,
                          int64_t(ops[next].head.rows) * ops[next].head.inputs(shape(ops[next].head.source))});
        break;
    }
    return upcoming;
}

// Convs add a residual's planes as they lie; what is not live there may hold anything.
void Image::clear_dead(int buffer, const int* channels, Range mine, const Member& member) {
    for (int k = mine.begin; k < mine.end; ++k)
        if (!live_[buffer].on[channels[k]]) std::fill_n(plane(buffer, channels[k]), shape(buffer).area(), 0.0f);
    member.meet();
}

void Image::merge_peaks(int buffer, const Member& member) {
    const Range mine = member.share(shape(buffer).c);
    for (int c = mine.begin; c < mine.end; ++c)
        for (int thread = 1; thread < member.threads; ++thread) {
            peaks(buffer, 0)[c] = larger(peaks(buffer, 0)[c], peaks(buffer, thread)[c]);
            peaks(buffer, thread)[c] = -INFINITY;
        }
    member.meet();
}

// A filter that is off leaves the residual, activated.
void Image::keep_residual(int number, const Member& member) {
    const Op& op = prepared_.program.ops[number];
    if (prepared_.plan.untouched[number]) return;
    const Channels &mask = masks_[op.group], &residual = live_[op.src[1]];
    const Range mine = member.share(residual.count);
    for (int k = mine.begin; k < mine.end; ++k) {
        const int c = residual.list[k];
        if (mask.on[c]) continue;
        float* peak = prepared_.plan.peaked[op.dst] ? peaks(op.dst, 0) + c : nullptr;
        if (peak) *peak = -INFINITY;
        float* y = plane(op.dst, c);
        prepared_.leaf.finish(plane(op.src[1], c), shape(op.dst).area(), 1, 0, nullptr, op.act, op.slope, y, peak);
        if (prepared_.plan.summed[op.dst]) sums(op.dst)[c] = prepared_.leaf.sum(y, shape(op.dst).area());
    }
    member.meet();
}

// ---- all other ops, channel by channel

void Image::set_live(const Op& op) {
    Channels& live = live_[op.dst];
    const auto source = [&](size_t i) -> const std::vector<uint8_t>& { return live_[op.src[i]].on; };
    const int channels = shape(op.dst).c;
    switch (op.kind) {
        case Kind::cat: {
            auto to = live.on.begin();
            for (size_t i = 0; i < op.src.size(); ++i) to = std::copy(source(i).begin(), source(i).end(), to);
            break;
        }
        case Kind::move:
            for (int c = 0; c < channels; ++c) live.on[c] = op.channels[c] >= 0 && source(0)[op.channels[c]];
            break;
        case Kind::strided:
            for (int c = 0; c < channels; ++c) live.on[c] = op.channels[c] < 0 || source(0)[op.channels[c]];
            break;
        case Kind::reduce:
        case Kind::softmax:
        case Kind::norm:
        case Kind::deconv:
            std::fill(live.on.begin(), live.on.end(), uint8_t(1));
            break;
        case Kind::flatten:
            for (int c = 0; c < channels; ++c) live.on[c] = source(0)[c / shape(op.src[0]).area()];
            break;
        case Kind::add:
            for (int c = 0; c < channels; ++c) live.on[c] = source(0)[c] | source(1)[c];
            break;
        case Kind::mul:
            for (int c = 0; c < channels; ++c) live.on[c] = source(0)[c] & source(1)[c];
            break;
        default:
            live.on = source(0);
    }
    if (op.lift || !keeps_zero(op.act)) std::fill(live.on.begin(), live.on.end(), uint8_t(1));
    if (op.group >= 0)
        for (int c = 0; c < channels; ++c) live.on[c] &= masks_[op.group].on[c];
    live.list_on();
}

void Image::affine(const Op& op, int c) {
    const int n = shape(op.dst).area();
    const bool live = live_[op.src[0]].on[c];
    const float *x = plane(op.src[0], c), scale = op.kind == Kind::affine ? op.weight[c] : 1;
    float* y = plane(op.dst, c);
    for (int i = 0; i < n; ++i) y[i] = live ? x[i] * scale : 0;
    prepared_.leaf.finish(y, n, 1, op.kind == Kind::affine ? op.bias[c] : 0, nullptr, op.act, op.slope, y, nullptr);
}

void Image::rescale(const Op& op, int c) {
    const int n = shape(op.dst).area();
    float* y = plane(op.dst, c);
    const float* x = live_[op.src[0]].on[c] ? plane(op.src[0], c) : y;
    if (x == y) std::fill_n(y, n, 0.0f);
    prepared_.leaf.finish(x, n, factors_[op.group][c], op.shift[c], nullptr, op.act, op.slope, y, nullptr);
}

void Image::combine(const Op& op, int c) {
    const int n = shape(op.dst).area();
    const bool one = shape(op.src[1]).area() == 1;
    const bool left = live_[op.src[0]].on[c], right = live_[op.src[1]].on[c];
    const float *a = plane(op.src[0], c), *b = plane(op.src[1], c);
    float* y = plane(op.dst, c);
    if (op.kind == Kind::mul)
        for (int i = 0; i < n; ++i) y[i] = left && right ? a[i] * b[one ? 0 : i] : 0;
    else
        for (int i = 0; i < n; ++i) y[i] = (left ? a[i] : 0) + (right ? b[one ? 0 : i] : 0);
    prepared_.leaf.finish(y, n, 1, 0, nullptr, op.act, op.slope, y, nullptr);
}

template <class T>
void Image::move(const Op& op, int c, T zero) {
    const Shape in = shape(op.src[0]), out = shape(op.dst);
    const T* x = plane_of<T>(op.src[0], op.channels[c]);
    T* y = plane_of<T>(op.dst, c);
    for (int oy = 0; oy < out.h; ++oy)
        for (int ox = 0; ox < out.w; ++ox, ++y) {
            const int iy = oy * op.stride.h + op.offset.h, ix = ox * op.stride.w + op.offset.w;
            *y = iy >= 0 && iy < in.h && ix >= 0 && ix < in.w ? x[int64_t(iy) * in.w + ix] : zero;
        }
}

template <class T>
void Image::copy_cat(const Op& op, const Member& member) {
    int64_t done = 0;  // a flatten is a concatenation of planes too
    for (int source : op.src) {
        const Shape in = shape(source);
        const Range mine = member.share(live_[source].count);
        for (int k = mine.begin; k < mine.end; ++k) {
            const int c = live_[source].list[k];
            std::copy_n(plane_of<T>(source, c), in.area(), plane_of<T>(op.dst, 0) + done + int64_t(c) * in.area());
        }
        done += in.size();
    }
}

void Image::pool(const Op& op, int c, float* line) {
    const Shape in = shape(op.src[0]), out = shape(op.dst);
    const float* x = plane(op.src[0], c);
    float* y = plane(op.dst, c);
    const bool global =
        out.area() == 1 && op.padding.top + op.padding.left + op.padding.bottom + op.padding.right == 0 &&
        (op.adaptive || (op.kernel.h == in.h && op.kernel.w == in.w && op.dilation.h * op.dilation.w == 1));
    if (global) {
        *y = op.maximum ? prepared_.leaf.largest(x, in.area()) : prepared_.leaf.sum(x, in.area()) / float(in.area());
        return;
    }
    if (op.maximum && !op.adaptive) return max_pool(op, x, y, line);
    const float start = op.maximum ? -INFINITY : 0;
    float value = start;
    walk_windows(
        op, in, out, [&](int64_t at) { value = op.maximum ? larger(value, x[at]) : value + x[at]; },
        [&](int pixel, int count) {
            y[pixel] = op.maximum ? value : value / float(count);
            value = start;
        });
}

// The rows' maximum first, then that of shifted lines, a vector at a time; only then every stride-th pixel is taken.
void Image::max_pool(const Op& op, const float* x, float* y, float* line) {
    const Shape in = shape(op.src[0]), out = shape(op.dst);
    const int padding = std::max({op.padding.top, op.padding.left, op.padding.bottom, op.padding.right});
    const bool middles = (out.h - 1) * op.stride.h - op.padding.top + 1 < in.h &&
                         (out.w - 1) * op.stride.w - op.padding.left + 1 < in.w;  // of all windows are in the map
    if (middles && op.stride.h == 2 && op.stride.w == 2 && op.dilation.h * op.dilation.w == 1 &&
        op.kernel.h == op.kernel.w && (op.kernel.h == 2 ? padding == 0 : op.kernel.h == 3 && padding <= 1))
        return prepared_.leaf.max_pool(x, in, op.kernel.h, op.padding.top, op.padding.left, out, y);
    const int reach = (op.kernel.w - 1) * op.dilation.w, length = (out.w - 1) * op.stride.w + 1;
    float* wide = line + up(length, kLine) + kSlack;  // columns -padding.left to the last that a window reads
    for (int oy = 0; oy < out.h; ++oy, y += out.w) {
        std::fill(wide, wide + length + reach, -INFINITY);
        const int inside = std::min(in.w, length + reach - op.padding.left);
        for (int ky = 0; ky < op.kernel.h; ++ky) {
            const int iy = oy * op.stride.h + ky * op.dilation.h - op.padding.top;
            if (iy >= 0 && iy < in.h) prepared_.leaf.maximum(x + int64_t(iy) * in.w, inside, wide + op.padding.left);
        }
        std::copy_n(wide, length, line);
        for (int kx = 1; kx < op.kernel.w; ++kx) prepared_.leaf.maximum(wide + kx * op.dilation.w, length, line);
        prepared_.leaf.take(line, op.stride.w, out.w, y);
    }
}

void Image::give_output(const Call& call, int index, const Member& member) {
    float* to = call.output;
    give_buffer(prepared_.program.output, to + index * shape(prepared_.program.output).size(), member);
    to += call.batch * shape(prepared_.program.output).size();
    for (const Output& more : prepared_.program.more_outputs) {
        give_buffer(more.buffer, to + index * shape(more.buffer).size(), member);
        to += call.batch * shape(more.buffer).size();
    }
}

void Image::give_buffer(int buffer, float* to, const Member& member) {
    const Shape out = shape(buffer);
    const Range mine = member.share(out.c);
    to += int64_t(mine.begin) * out.area();
    for (int c = mine.begin; c < mine.end; ++c, to += out.area()) {
        if (live_[buffer].on[c])
            std::copy_n(plane(buffer, c), out.area(), to);
        else
            std::fill(to, to + out.area(), 0.0f);
    }
}

}  // namespace cofire
