// 1x1 convs with filters in vectors and pixels broadcast, straight from the inputs: maps whose pixels fill no whole
// number of vectors waste nothing. Weights of active filters are brought together in whole vectors, a few at a time,
// while the first of the pixels that share them are multiplied.
#include <cmath>

#include "conv_common.h"

namespace cofire {

namespace {

constexpr int kStrips = 2;               // strips of filters, a vector wide, that are multiplied together
constexpr int64_t kInputs = 160 * 1024;  // floats of input that a block of pixels reads

class Filters final : public AbstractConv {
   public:
    Filters(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena)
        : kernels_(kernels),
          op_(op),
          x_(x),
          y_(y),
          lanes_(kernels.lanes),
          group_(kStrips * lanes_),
          pitch_(odd_lines(int64_t(x.c) * lanes_)),
          size_(up(y.c, lanes_) / lanes_ * pitch_ + kSlack),
          weights_(arena.take(size_)) {
        for (int o = 0; o < y.c; ++o)
            for (int i = 0; i < x.c; ++i)
                weights_[o / lanes_ * pitch_ + i * lanes_ + o % lanes_] = op.weight[int64_t(o) * x.c + i];
    }

    Stretch weights() const override { return {weights_, size_}; }
    int64_t room(int threads) const override { return threads * own_room() + kSlack; }

    int64_t run(const ConvCall& call, const Member& member) const override {
        const int blocks = int(int64_t(call.n_in) * y_.area() / kInputs) + 1;
        const int groups = (call.n_out + group_ - 1) / group_;
        const bool by_block = blocks >= 2 * member.threads;  // few blocks: members share the filters instead
        const Range mine = by_block ? member.share(blocks) : Range{0, blocks};
        const Range part = by_block ? Range{0, groups} : member.share(groups);
        int64_t macs = 0;
        for (int block = mine.begin; block < mine.end; ++block)
            macs += multiply(call, {part.begin * group_, std::min(part.end * group_, call.n_out)},
                             Member{block, blocks, nullptr}.share(y_.area()), call.room + member.thread * own_room());
        return macs;
    }

   private:
    int64_t lines_pitch() const { return odd_lines(y_.area()); }
    int64_t own_room() const { return kStrips * pitch_ + group_ * lines_pitch(); }

    // The filters [begin, end) of the active ones.
    int64_t multiply(const ConvCall& call, Range filters, Range pixels, float* room) const {
        for (int f = filters.begin; f < filters.end; f += group_) {
            multiply_group(call, {f, std::min(f + group_, filters.end)}, filters.end, pixels, room);
            call.upcoming->fetch_share((filters.end - f + group_ - 1) / group_);
        }
        return int64_t(filters.end - filters.begin) * call.n_in * (pixels.end - pixels.begin);
    }

    Strips strips_of(const ConvCall& call, Range filters, int end, float* picked) const {
        Strips strips{weights_, pitch_, (filters.end - filters.begin + lanes_ - 1) / lanes_, call.in, call.n_in};
        if (call.n_out < y_.c)
            strips.filters = call.out + filters.begin, strips.listed = filters.end - filters.begin, strips.to = picked;
        else
            strips.w += filters.begin / lanes_ * pitch_;
        if (filters.end < end) {
            const int first = call.out[filters.end - 1] / lanes_ + 1;
            strips.ahead = weights_ + first * pitch_;
            strips.ahead_size = (call.out[std::min(filters.end + group_, end) - 1] / lanes_ + 1 - first) * pitch_;
        }
        return strips;
    }

    void multiply_group(const ConvCall& call, Range filters, int end, Range pixels, float* room) const {
        const bool at_once = !call.residual && only_clamps(op_.act);
        float factor[kStrips * kLine], bias[kStrips * kLine], best[kStrips * kLine];
        float *y[kStrips * kLine], *lines = room + kStrips * pitch_;
        for (int r = 0; r < group_; ++r) {
            const bool ends = at_once && filters.begin + r < filters.end;
            const int o = ends ? call.out[filters.begin + r] : 0;
            factor[r] = ends ? call.factor[o] : 1;
            bias[r] = ends ? call.bias[o] : 0;
            best[r] = -INFINITY;
            y[r] = ends ? call.y + int64_t(o) * y_.area() : lines + r * lines_pitch();
        }
        kernels_.filters(strips_of(call, filters, end, room), {call.x, x_.area(), pixels.begin, pixels.end},
                         {at_once ? op_.act : Act::none, factor, bias, y, best});
        const int n = pixels.end - pixels.begin;
        for (int f = filters.begin; f < filters.end; ++f) {
            const int o = call.out[f], r = f - filters.begin;
            if (!at_once) {
                finish(kernels_, op_, call, o, y[r] + pixels.begin, y_.area(), pixels.begin, n);
                continue;
            }
            if (call.peak && (best[r] > call.peak[o] || std::isnan(best[r]))) call.peak[o] = best[r];
            if (call.sum && n == y_.area()) call.sum[o] = kernels_.sum(y[r], n);
        }
    }

    const Kernels& kernels_;
    const Op& op_;
    const Shape x_, y_;
    const int lanes_, group_;  // filters of a strip, of those that are multiplied together
    const int64_t pitch_;      // floats of a strip
    const int64_t size_;       // of all weights
    float* const weights_;     // (strip, input, filter of the strip)
};

}  // namespace

std::unique_ptr<AbstractConv> make_filters(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena) {
    return std::make_unique<Filters>(kernels, op, x, y, arena);
}

}  // namespace cofire
