// Convs: what they are called with, and what of their output is live.
#include <algorithm>
#include <cmath>

#include "conv_common.h"
#include "image.h"
#include "pooling.h"

namespace cofire {

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
        const bool conv = ops[next].kind == Kind::conv;
        if (!conv && ops[next].kind != Kind::conv8) continue;
        upcoming.add(conv ? prepared_.convs[next]->weights() : prepared_.convs8[next]->weights());
        if (ops[next].decides) upcoming.add(head_weights(int(next)));
        break;
    }
    return upcoming;
}

Stretch Image::head_weights(int number) const {
    const Head& head = prepared_.program.ops[number].head;
    if (!prepared_.heads8.empty() && prepared_.heads8[number].weight) {
        const Head8& bytes = prepared_.heads8[number];
        return {reinterpret_cast<const float*>(bytes.weight), head.rows * bytes.pitch / 4};
    }
    return {head.weight, int64_t(head.rows) * head.inputs(shape(head.source))};
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
        prepared_.kernels.finish(plane(op.src[1], c), shape(op.dst).area(), 1, 0, nullptr, op.act, op.slope, y, peak);
        if (prepared_.plan.summed[op.dst]) sums(op.dst)[c] = prepared_.kernels.sum(y, shape(op.dst).area());
    }
    member.meet();
}

}  // namespace cofire
