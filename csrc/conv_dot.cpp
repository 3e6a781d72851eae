// Convs on small maps, linear layers among them: a dot product along the weights for each pixel. The weights are what
// takes the time, so inputs that are off are zeros here and only filters are skipped.
#include <map>

#include "conv_common.h"

namespace cofire {
namespace {

constexpr int kGroup = 12;  // filters at a time: whole numbers of the rows that any kernel takes together

// Few pixels of any kernel, whose weights are read as they lie.
class Dot final : public AbstractConv {
   public:
    Dot(const Kernels& kernels, const Op& op, Shape x, Shape y)
        : kernels_(kernels),
          op_(op),
          x_(x),
          y_(y),
          taps_(op.kernel.h * op.kernel.w),
          nk_(x.c * taps_),
          pixels_(pixels_of(op, x, y)) {}

    Stretch weights() const override { return {op_.weight, int64_t(y_.c) * nk_}; }
    int64_t room(int) const override { return y_.area() * ldx() + up(x_.area() + 1, kLine) + kSlack; }

    int64_t run(const ConvCall& call, const Member& member) const override {
        float* columns = call.room;
        if (member.first()) gather(call, columns, call.room + y_.area() * ldx());
        member.meet();
        const Range mine = member.share(call.n_out);
        float sums[kGroup * kFewPixels];
        for (int f = mine.begin, size; f < mine.end; f += size) {
            size = std::min(kGroup, mine.end - f);
            const float *rows[kGroup], *ahead[kGroup];
            for (int r = 0; r < size; ++r) {
                rows[r] = op_.weight + int64_t(call.out[f + r]) * nk_;
                ahead[r] = op_.weight + int64_t(call.out[std::min(f + size + r, mine.end - 1)]) * nk_;
            }
            kernels_.dot(rows, size, nk_, columns, ldx(), y_.area(), sums, kFewPixels, ahead);
            for (int r = 0; r < size; ++r)
                finish(kernels_, op_, call, call.out[f + r], sums + r * kFewPixels, y_.area(), 0, y_.area());
        }
        return int64_t(mine.end - mine.begin) * call.n_in * taps_ * y_.area();
    }

   private:
    int64_t ldx() const { return odd_lines(nk_); }

    void gather(const ConvCall& call, float* columns, float* plane) const {
        std::fill(columns, columns + y_.area() * ldx(), 0.0f);
        for (int k = 0; k < call.n_in; ++k) {
            *std::copy_n(call.x + int64_t(call.in[k]) * x_.area(), x_.area(), plane) = 0;
            float* to = columns + int64_t(call.in[k]) * taps_;
            for (int tap = 0, i = 0; tap < taps_; ++tap)
                for (int pixel = 0; pixel < y_.area(); ++pixel, ++i) to[pixel * ldx() + tap] = plane[pixels_[i]];
        }
    }

    const Kernels& kernels_;
    const Op& op_;
    const Shape x_, y_;
    const int taps_, nk_;
    const std::vector<int> pixels_;
};

constexpr int kSmall = 16;  // pixels of the largest map for Dots
constexpr int kRows = 6;    // filters at a time
constexpr int kPixels = 4;  // and pixels, for each of which a sum stays in registers
constexpr int kBlock = 64;  // inputs whose weights for these filters stay in the nearest cache

// Pixels with the same taps inside the map.
struct Alike {
    std::vector<Tap> taps;
    std::vector<int> pixels;  // of the output,
    std::vector<int> first;   // and what the first tap of each reads
};

// Kernels of several taps on up to kSmall pixels. Inputs of a pixel lie side by side, and so do the weights of a tap:
// lines of taps that lie beside the map are left out, a third of all on the smallest. A block of inputs after the
// other; the sums wait for the next in memory, lane by lane.
class Dots final : public AbstractConv {
   public:
    Dots(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena)
        : kernels_(kernels),
          op_(op),
          x_(x),
          y_(y),
          taps_(op.kernel.h * op.kernel.w),
          inputs_(int(up(x.c, kLine))),
          pitch_(odd_lines(int64_t(taps_) * inputs_)),
          border_(y.w > 2 ? op.padding : Padding{0, 0, 0, 0}),
          wide_(x.w + border_.left + border_.right),
          pixels_(x.h * wide_),
          size_(y.c * pitch_ + kSlack),
          weights_(arena.take(size_)) {
        for (int o = 0; o < y.c; ++o)
            for (int i = 0; i < x.c; ++i)
                for (int tap = 0; tap < taps_; ++tap)
                    weights_[o * pitch_ + place(i, tap, taps_)] = op.weight[(int64_t(o) * x.c + i) * taps_ + tap];
        find_taps();
    }

    Stretch weights() const override { return {weights_, size_}; }
    int64_t room(int threads) const override { return inputs_room() + threads * sums_room() + kSlack; }

    int64_t run(const ConvCall& call, const Member& member) const override {
        lay_inputs(call, member.share(inputs_));
        member.meet();
        float* sums = call.room + inputs_room() + member.thread * sums_room();
        const Range mine = member.share(call.n_out);
        for (int f = mine.begin, size; f < mine.end; f += size) {
            size = group_size(mine.end - f, kRows);
            const float *rows[kRows], *next[kRows];
            for (int r = 0; r < size; ++r) {
                rows[r] = weights_ + call.out[f + r] * pitch_;
                next[r] = weights_ + call.out[std::min(f + size + r, mine.end - 1)] * pitch_;
            }
            for (int first = 0; first < inputs_; first += kBlock)
                multiply(call.room, rows, first + kBlock < inputs_ ? rows : next, size, first, sums);
            call.upcoming->fetch_share((mine.end - f + size - 1) / size);
            for (int r = 0; r < size; ++r) {
                float* pixels = sums + r * sums_pitch();
                kernels_.add_lanes(pixels, y_.area(), pixels);
                finish(kernels_, op_, call, call.out[f + r], pixels, y_.area(), 0, y_.area());
            }
        }
        return int64_t(mine.end - mine.begin) * call.n_in * taps_ * y_.area();
    }

   private:
    int64_t inputs_room() const { return int64_t(inputs_) * pixels_; }
    int64_t sums_pitch() const { return up(int64_t(y_.area()) * kernels_.lanes + kSlack, kLine); }
    int64_t sums_room() const { return kRows * sums_pitch(); }

    int length_of(int block) const { return std::min(kBlock, inputs_ - block); }  // from its first input on
    // Where a number of input i lies beside those of the other inputs of its block, for one of so many taps or pixels.
    int64_t place(int i, int one, int many) const {
        const int block = i / kBlock * kBlock;
        return int64_t(block) * many + int64_t(one) * length_of(block) + i - block;
    }

    // The taps [begin, end) of a line or column that read inside, from `start` on.
    static Range inside(int start, int dilation, int taps, int length) {
        const int begin = start < 0 ? std::min((-start + dilation - 1) / dilation, taps) : 0;
        const int end = start < length ? std::min((length - 1 - start) / dilation + 1, taps) : 0;
        return {begin, std::max(begin, end)};
    }

    void find_taps() {
        std::map<std::vector<int>, Alike> found;
        for (int pixel = 0; pixel < y_.area(); ++pixel) {
            const int top = pixel / y_.w * op_.stride.h - op_.padding.top;
            const int left = pixel % y_.w * op_.stride.w - op_.padding.left + border_.left;
            const Range down = inside(top, op_.dilation.h, op_.kernel.h, x_.h);
            const Range across = inside(left, op_.dilation.w, op_.kernel.w, wide_);
            Alike& alike = found[{down.begin, down.end, across.begin, across.end}];
            alike.pixels.push_back(pixel);
            alike.first.push_back((top + down.begin * op_.dilation.h) * wide_ + left + across.begin * op_.dilation.w);
            if (alike.pixels.size() > 1) continue;
            for (int ky = down.begin; ky < down.end; ++ky)
                for (int kx = across.begin; kx < across.end; ++kx)
                    alike.taps.push_back({ky * op_.kernel.w + kx, (ky - down.begin) * op_.dilation.h * wide_ +
                                                                      (kx - across.begin) * op_.dilation.w});
        }
        for (auto& [key, alike] : found) alike_.push_back(std::move(alike));
    }

    // (block, pixel, input), zeros for those that are off.
    void lay_inputs(const ConvCall& call, Range mine) const {
        const int* live = std::lower_bound(call.in, call.in + call.n_in, mine.begin);
        for (int i = mine.begin; i < mine.end; ++i) {
            const bool on = live < call.in + call.n_in && *live == i;
            const float* pixel = call.x + int64_t(i) * x_.area();
            float* to = call.room + place(i, 0, pixels_);
            const int step = length_of(i / kBlock * kBlock);
            for (int y = 0; y < x_.h; ++y)
                for (int x = -border_.left; x < x_.w + border_.right; ++x, to += step)
                    *to = on && x >= 0 && x < x_.w ? *pixel++ : 0;
            live += on;
        }
    }

    // The products of the inputs from `first` on. The weights of the block that comes then are fetched meanwhile: those
    // of `next`.
    void multiply(const float* inputs, const float* const* rows, const float* const* next, int size, int first,
                  float* sums) const {
        const int length = length_of(first), then = first + kBlock < inputs_ ? first + kBlock : 0;
        const int64_t lines = int64_t(length_of(then)) * taps_ / kLine;
        const float* weights[kRows];
        for (int r = 0; r < size; ++r) weights[r] = rows[r] + int64_t(first) * taps_;
        int64_t fetched = 0;
        int done = 0;
        for (const Alike& alike : alike_)
            for (size_t begin = 0; begin < alike.pixels.size(); begin += kPixels) {
                const int count = int(std::min(alike.pixels.size() - begin, size_t(kPixels)));
                const float* x[kPixels];
                float* to[kPixels];
                for (int i = 0; i < count; ++i) {
                    x[i] = inputs + int64_t(first) * pixels_ + int64_t(alike.first[begin + i]) * length;
                    to[i] = sums + int64_t(alike.pixels[begin + i]) * kernels_.lanes;
                }
                done += count;
                for (; fetched < lines * done / y_.area(); ++fetched)
                    for (int r = 0; r < size; ++r) fetch_weights(next[r] + int64_t(then) * taps_ + fetched * kLine);
                kernels_.dots(weights, size, alike.taps.data(), int(alike.taps.size()), length, x, count, first > 0, to,
                              sums_pitch());
            }
    }

    const Kernels& kernels_;
    const Op& op_;
    const Shape x_, y_;
    const int taps_, inputs_;  // to whole lines
    const int64_t pitch_;      // floats of a filter's weights
    const Padding border_;     // on the left and on the right, so that pixels of a line have the same taps
    const int wide_, pixels_;  // of a map with its border
    const int64_t size_;       // floats of all weights
    float* const weights_;     // (filter, block, tap, input)
    std::vector<Alike> alike_;
};

}  // namespace

bool fits_dots(const Op& op, Shape x, Shape y) {
    const int64_t padded = int64_t(x.h) * (int64_t(x.w) + op.padding.left + op.padding.right);
    return x.c >= kLine && y.area() <= kSmall && padded <= 4 * int64_t(x.area()) + kSmall;
}

std::unique_ptr<AbstractConv> make_dot(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena) {
    const bool one_tap = op.kernel.h * op.kernel.w == 1;
    if (y.area() <= kFewPixels && (one_tap || !fits_dots(op, x, y))) return std::make_unique<Dot>(kernels, op, x, y);
    return std::make_unique<Dots>(kernels, op, x, y, arena);
}

}  // namespace cofire
