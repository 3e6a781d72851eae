#include "map_checks.h"

#include <algorithm>

#include "format.h"

namespace cofire {

namespace {

// The lowest and the highest place that digits from `first` on reach, beside where they begin.
std::pair<int64_t, int64_t> reach(const Op& op, size_t first) {
    int64_t low = 0, high = 0;
    for (size_t i = first; i < op.sizes.size(); ++i) {
        const int64_t far = int64_t(op.sizes[i] - 1) * op.strides[i];
        low += std::min<int64_t>(far, 0);
        high += std::max<int64_t>(far, 0);
    }
    return {low, high};
}

// How many of the digits choose the channel.
size_t outer_digits(const Op& op, int channels, const Where& where) {
    int64_t product = 1;
    for (size_t i = 0; i <= op.sizes.size(); ++i) {
        if (product == channels) return i;
        if (i < op.sizes.size()) product *= op.sizes[i];
        if (product > kMaxBuffer) break;
    }
    where.fail("the first of sizes must make up the channels, " + std::to_string(channels));
}

void same(const Shape& dst, const Shape& must, const Where& where) {
    if (!(dst == must)) where.fail("the output's shape must be " + list(must) + ", got " + list(dst));
}

}  // namespace

void read_strided(Op* op, JsonValue attrs, const Shape& src, const Shape& dst, const Where& where) {
    const auto [sizes, strides, begin] = fields(attrs, where, "attrs", "sizes", "strides", "begin");
    op->sizes = integers(sizes, where, "sizes", 1, kMaxBuffer);
    if (op->sizes.size() > kMaxDigits) wrong(sizes, where, "sizes", "a list of at most " + std::to_string(kMaxDigits));
    op->strides = integers(strides, where, "strides", -kMaxBuffer, kMaxBuffer, op->sizes.size());
    op->begin = int(integer(begin, where, "begin", 0, src.size() - 1));
    int64_t total = 1;
    for (int size : op->sizes) total = total > kMaxBuffer ? total : total * size;
    if (total != dst.size()) wrong(sizes, where, "sizes", "factors of the output's " + std::to_string(dst.size()));
    const auto [low, high] = reach(*op, 0);
    if (op->begin + low < 0 || op->begin + high >= src.size()) where.fail("strides must stay inside the source");
    const size_t outer = outer_digits(*op, dst.c, where);
    const auto [inner_low, inner_high] = reach(*op, outer);
    std::vector<int> digit(outer, 0);
    int64_t at = op->begin;
    for (int c = 0; c < dst.c; ++c) {
        const int64_t first = (at + inner_low) / src.area(), last = (at + inner_high) / src.area();
        op->channels.push_back(first == last ? int(first) : -1);
        for (size_t i = outer; i-- > 0;) {
            at += op->strides[i];
            if (++digit[i] < op->sizes[i]) break;
            at -= int64_t(op->sizes[i]) * op->strides[i];
            digit[i] = 0;
        }
    }
}

void read_reduce(Op* op, JsonValue attrs, const Shape& src, const Shape& dst, const Where& where) {
    static constexpr std::string_view kOps[] = {"sum", "avg", "max"};
    const auto [what] = fields(attrs, where, "attrs", "op");
    op->reduction = Reduction(choice(what, where, "op", kOps));
    same(dst, {dst.c, src.h, src.w}, where);
    if (src.c % dst.c != 0)
        where.fail("output channels must divide " + std::to_string(src.c) + ", got " + std::to_string(dst.c));
}

void read_softmax(Op* op, JsonValue attrs, const Shape& src, const Shape& dst, const Where& where) {
    const auto [ways, log] = fields(attrs, where, "attrs", "ways", "log");
    op->ways = int(integer(ways, where, "ways", 1, kMaxSide));
    op->log = boolean(log, where, "log");
    same(dst, src, where);
    if (src.c % op->ways != 0) wrong(ways, where, "ways", "a divisor of the channels, " + std::to_string(src.c));
}

void read_norm(Op* op, JsonValue attrs, const Shape& src, const Shape& dst, const Where& where) {
    static constexpr std::string_view kNorms[] = {"group", "layer", "rms", "l2"};
    const auto [what, groups, epsilon] = fields(attrs, where, "attrs", "over", "groups", "epsilon");
    op->norm = Norm(choice(what, where, "over", kNorms));
    op->groups = int(integer(groups, where, "groups", 1, kMaxSide));
    op->epsilon = real(epsilon, where, "epsilon");
    same(dst, src, where);
    if (src.c % op->groups != 0 || (op->norm != Norm::group && op->groups != 1))
        wrong(groups, where, "groups", "a divisor of the channels, or 1 where over is not group,");
    if (!(op->epsilon >= 1e-30f)) wrong(epsilon, where, "epsilon", "1e-30 or more");
}

}  // namespace cofire
