// Which filters of a group an image needs: pool, multiply, choose.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "image.h"

namespace cofire {

namespace {

// Rows of a head that are read at a time: those that lie far apart are streams of their own, which memory serves faster
// than neighbours.
constexpr int kStreams = 6;

}  // namespace

void Image::decide(int number, const Call& call, int index, const Member& member) {
    const Op& op = prepared_.program.ops[number];
    const int filters = int(masks_[op.group].on.size());
    const uint8_t* forced = call.forced ? call.forced[op.group] : nullptr;
    float* logits = call.logits ? call.logits[op.group] : nullptr;
    if (!forced || call.heads || logits) evaluate(number, member);
    if (member.first()) {
        if (forced)
            std::transform(forced + int64_t(index) * filters, forced + int64_t(index + 1) * filters,
                           masks_[op.group].on.begin(), [](uint8_t on) { return on != 0; });
        else
            choose(op, call.threshold);
        masks_[op.group].list_on();
        if (op.head.scale) set_factors(op, !forced || call.heads);
        if (call.masks && call.masks[op.group])
            std::copy_n(masks_[op.group].on.data(), filters, call.masks[op.group] + int64_t(index) * filters);
        if (logits) std::copy_n(logits_, filters, logits + int64_t(index) * filters);
    }
    member.meet();
}

// A logit for each filter: where a row is zeros alone, its bias.
void Image::evaluate(int number, const Member& member) {
    const Op& op = prepared_.program.ops[number];
    const Head& head = op.head;
    const std::vector<int>& rows = prepared_.head_rows[number];
    const int filters = int(masks_[op.group].on.size());
    if (!rows.empty()) pool_source(number, member);
    if (member.first()) std::fill_n(logits_, head.rows, 0.0f);
    member.meet();
    if (!rows.empty()) multiply_rows(number, member);
    member.meet();
    if (member.first()) {
        for (int f = 0; f < head.rows && head.bias; ++f) logits_[f] += head.bias[f];
        if (head.rows < filters) std::fill_n(logits_ + 1, filters - 1, logits_[0]);
    }
}

void Image::multiply_rows(int number, const Member& member) {
    const Head& head = prepared_.program.ops[number].head;
    const std::vector<int>& rows = prepared_.head_rows[number];
    const int inputs = head.inputs(shape(head.source));
    // Each member makes the softmax for itself: cheaper than to wait for it.
    float* input = softmax_ + member.thread * wide_;
    std::copy_n(pooled_, inputs, input);
    if (head.softmax) prepared_.kernels.softmax(input, inputs);
    const Head8* bytes = prepared_.heads8.empty() ? nullptr : &prepared_.heads8[number];
    if (bytes && bytes->weight) return multiply_bytes(*bytes, rows, input, inputs, member);
    const Range mine = member.share(int(rows.size()));
    const int apart = (mine.end - mine.begin + kStreams - 1) / kStreams;
    for (int f = mine.begin; f < mine.begin + apart; ++f) {
        const int size = std::min(kStreams, (mine.end - f + apart - 1) / apart);
        const float *weights[kStreams], *ahead[kStreams];
        for (int s = 0; s < size; ++s) {
            weights[s] = head.weight + int64_t(rows[f + s * apart]) * inputs;
            ahead[s] = head.weight + int64_t(rows[std::min(f + s * apart + 1, int(rows.size()) - 1)]) * inputs;
        }
        float found[kStreams];
        prepared_.kernels.dot(weights, size, inputs, input, 0, 1, found, 1, ahead);
        for (int s = 0; s < size; ++s) logits_[rows[f + s * apart]] = found[s];
    }
}

// Sums of whole numbers, which are exact, whatever their order.
void Image::multiply_bytes(const Head8& head, const std::vector<int>& rows, const float* input, int inputs,
                           const Member& member) {
    uint8_t* numbers = numbers_ + member.thread * wide_ * int64_t(sizeof(float));
    const WholeInputs whole(input, inputs, head.pitch, numbers);
    const uint8_t* planes[kNumberBytes];
    for (int b = 0; b < kNumberBytes; ++b) planes[b] = numbers + b * head.pitch;
    const Run8 run{0, 0, 1};
    const Range mine = member.share(int(rows.size()));
    const int apart = (mine.end - mine.begin + kStreams - 1) / kStreams;
    for (int f = mine.begin; f < mine.begin + apart; ++f) {
        const int size = std::min(kStreams, (mine.end - f + apart - 1) / apart);
        const int8_t* weights[kStreams];
        for (int s = 0; s < size; ++s) weights[s] = head.weight + rows[f + s * apart] * head.pitch;
        int32_t sums[kStreams * kNumberBytes + 3];
        prepared_.kernels8.dot(weights, size, &run, 1, head.pitch, planes, kNumberBytes, sums);
        for (int s = 0; s < size; ++s) {
            const int r = rows[f + s * apart];
            double sum = 0;
            for (int b = kNumberBytes - 1; b >= 0; --b)
                sum = sum * 256 + double(sums[s * kNumberBytes + b]) + head.lacks[r];
            logits_[r] = float((sum * whole.step + whole.low * head.total[r]) * head.factor[r]);
        }
    }
}

// The head's input; channels that are not live enter as 0.
void Image::pool_source(int number, const Member& member) {
    const Head& head = prepared_.program.ops[number].head;
    const Plan& plan = prepared_.plan;
    const Kernels& kernels = prepared_.kernels;
    const int source = head.source, area = shape(source).area(), channels = shape(source).c;
    const bool u8 = form(source).u8();
    const auto maximum = [&](int c) {
        if (u8) return largest8(source, c);
        return plan.peaked[source] ? peaks(source, 0)[c] : kernels.largest(plane(source, c), area);
    };
    const auto mean = [&](int c) {
        if (u8) return mean8(source, c, false);
        const float known = plan.summed[source] ? sums(source)[c] : NAN;
        return (std::isnan(known) ? kernels.sum(plane(source, c), area) : known) / float(area);
    };
    const Range mine = member.share(channels);
    for (int c = mine.begin; c < mine.end; ++c) {
        const bool live = live_[source].on[c];
        if (head.pooling == Pooling::max)
            pooled_[c] = live ? maximum(c) : 0;
        else if (head.pooling == Pooling::avg || (head.pooling == Pooling::abs && plan.plain[number]))
            pooled_[c] = live ? mean(c) : 0;
        else if (head.pooling == Pooling::abs)
            pooled_[c] = !live ? 0
                         : u8  ? mean8(source, c, true)
                               : kernels.sum_of_magnitudes(plane(source, c), area) / float(area);
        else
            pooled_[c] = live ? maximum(c) : 0, pooled_[channels + c] = live ? mean(c) : 0;
    }
}

// Which filters are on, by their logits. Equal ones come in their order, NaN after all others.
void Image::choose(const Op& op, float threshold) {
    Channels& mask = masks_[op.group];
    const int filters = int(mask.on.size());
    if (op.head.top == 0) {
        for (int f = 0; f < filters; ++f) mask.on[f] = logits_[f] > threshold;
        return;
    }
    const auto before = [&](int f, int g) {
        if (logits_[f] != logits_[g] && !(std::isnan(logits_[f]) && std::isnan(logits_[g])))
            return logits_[f] > logits_[g] || std::isnan(logits_[g]);
        return f < g;
    };
    std::iota(mask.list.begin(), mask.list.end(), 0);
    std::nth_element(mask.list.begin(), mask.list.begin() + op.head.top - 1, mask.list.end(), before);
    std::fill(mask.on.begin(), mask.on.end(), uint8_t(0));
    for (int k = 0; k < op.head.top; ++k) mask.on[mask.list[k]] = 1;
}

// What the head says, or 1: a mask that is forced comes without a factor.
void Image::set_factors(const Op& op, bool from_head) {
    std::vector<float>& factors = factors_[op.group];
    for (size_t f = 0; f < factors.size(); ++f) factors[f] = !from_head ? 1 : logits_[f] < 0 ? 0 : logits_[f];
}

}  // namespace cofire
