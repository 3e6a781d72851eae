#include "plan.h"

#include <algorithm>

#include "conv_common.h"

namespace cofire {

namespace {

struct Interval {
    int first, last;  // ops between which a buffer holds something
};

std::vector<Interval> lifetimes(const Program& program) {
    std::vector<Interval> found(program.buffers.size(), {int(program.ops.size()), -1});
    const auto touch = [&](int buffer, int op) {
        found[buffer] = {std::min(found[buffer].first, op), std::max(found[buffer].last, op)};
    };
    touch(program.input, -1);
    for (int i = 0; i < int(program.ops.size()); ++i) {
        touch(program.ops[i].dst, i);
        for (int source : program.ops[i].src) touch(source, i);
        if (program.ops[i].decides) touch(program.ops[i].head.source, i);
    }
    touch(program.output, int(program.ops.size()));
    return found;
}

// After this op. Before it, a buffer that it writes in place may have been otherwise.
bool stays_nonnegative(const Op& op, const std::vector<char>& nonnegative) {
    if (op.act == Act::relu || op.act == Act::relu6 || op.act == Act::sigmoid || op.act == Act::hardsigmoid)
        return true;
    if (op.kind == Kind::conv || op.kind == Kind::affine || op.kind == Kind::rescale) return false;
    return std::all_of(op.src.begin(), op.src.end(), [&](int source) { return bool(nonnegative[source]); });
}

}  // namespace

Plan::Plan(const Program& program)
    : offsets(program.buffers.size(), 0), peaked(program.buffers.size(), 0), summed(program.buffers.size(), 0) {
    const std::vector<Interval> life = lifetimes(program);
    // First fit, largest buffers first: simple, and within a few per cent of the best for chains of layers.
    std::vector<int> order;
    for (int b = 0; b < int(program.buffers.size()); ++b)
        if (life[b].last >= life[b].first) order.push_back(b);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return program.buffers[a].size() > program.buffers[b].size(); });
    std::vector<int> placed;
    const auto size = [&](int b) { return up(program.buffers[b].size(), kLine) + kSlack; };
    for (int b : order) {
        std::vector<int> rivals;
        for (int other : placed)
            if (life[other].first <= life[b].last && life[b].first <= life[other].last) rivals.push_back(other);
        std::sort(rivals.begin(), rivals.end(), [&](int a, int c) { return offsets[a] < offsets[c]; });
        int64_t at = 0;
        for (int other : rivals) {
            if (at + size(b) <= offsets[other]) break;
            at = std::max(at, offsets[other] + size(other));
        }
        offsets[b] = at;
        arena = std::max(arena, at + size(b));
        placed.push_back(b);
    }
    std::vector<char> by_convs(program.buffers.size(), 1), nonnegative(program.buffers.size(), 0);
    by_convs[program.input] = 0;
    for (const Op& op : program.ops) {
        if (op.kind != Kind::conv) by_convs[op.dst] = 0;
        const bool no_op = op.act == Act::none || (op.act == Act::relu && op.residual && nonnegative[op.src[1]]);
        untouched.push_back(op.residual && op.dst == op.src[1] && no_op);
        plain.push_back(op.decides && nonnegative[op.head.source]);
        nonnegative[op.dst] = stays_nonnegative(op, nonnegative);
    }
    for (size_t i = 0; i < program.ops.size(); ++i) {
        const Head& head = program.ops[i].head;
        if (!program.ops[i].decides || !by_convs[head.source]) continue;
        if (head.pooling == Pooling::max || head.pooling == Pooling::both) peaked[head.source] = 1;
        if (head.pooling == Pooling::avg || head.pooling == Pooling::both || (head.pooling == Pooling::abs && plain[i]))
            summed[head.source] = 1;
    }
}

}  // namespace cofire
