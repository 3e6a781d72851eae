#include "image.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>

#include "conv_common.h"

namespace cofire {

namespace {

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
    double floats = double(plan.floats) + double(room(1)) + 5.0 * widest(program), lists = 0;
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
    if (op.kind == Kind::deconv) return kernels.rows * (up(in.area(), kLine) + kSlack) + 2 * up(in.c, kLine);
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
      arena_(prepared.plan.floats + prepared.room(threads) + (4 + 3 * threads) * wide_),
      buffers_(arena_.take(prepared.plan.floats + kSlack)),
      room_(arena_.take(prepared.room(threads))),
      pooled_(arena_.take(wide_)),
      softmax_(arena_.take(threads * wide_)),
      numbers_(reinterpret_cast<uint8_t*>(arena_.take(threads * wide_))),
      logits_(arena_.take(wide_)),
      biases_(arena_.take(threads * wide_)),
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
