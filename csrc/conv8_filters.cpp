// Filters in vectors and pixels broadcast, for maps whose pixels fill vectors badly: no lane is idle, and a tap that
// lies beside the map costs nothing. A block of filters has a cache line of weights for each input and tap; those of
// live inputs and active filters are brought together for all pixels at once.
#include "conv8_common.h"

namespace cofire {
namespace {

constexpr int kStaged8 = 256;  // inputs whose weights are brought together at a time

class Filters8 final : public AbstractConv8 {
   public:
    Filters8(const Kernels8& kernels, const Op& op, const Quantized& quantized, Shape x, Shape y, Arena& arena)
        : kernels_(kernels),
          q_(quantized),
          x_(x),
          y_(y),
          taps_(op.kernel.h * op.kernel.w),
          blocks_((y.c + kFilters8 - 1) / kFilters8),
          words_((x.c + kernels.channels - 1) / kernels.channels),
          pitch_(up(x.area(), kLine) + kLine),
          line_(up(y.area(), 4)),
          size_(int64_t(blocks_) * taps_ * x.c * kFilters8 / 4),
          memory_(arena.take(size_)) {
        int8_t* to = reinterpret_cast<int8_t*>(memory_);
        for (int o = 0; o < y.c; ++o)
            for (int i = 0; i < x.c; ++i)
                for (int tap = 0; tap < taps_; ++tap)
                    to[line(o / kFilters8, tap, i) - to + o % kFilters8] =
                        q_.weight[(int64_t(o) * x.c + i) * taps_ + tap];
        for (int ky = 0; ky < op.kernel.h; ++ky)
            for (int kx = 0; kx < op.kernel.w; ++kx) {
                pixels_.emplace_back();
                for (int pixel = 0; pixel < y.area(); ++pixel) {
                    const int row = pixel / y.w * op.stride.h - op.padding.top + ky * op.dilation.h;
                    const int column = pixel % y.w * op.stride.w - op.padding.left + kx * op.dilation.w;
                    if (row >= 0 && row < x.h && column >= 0 && column < x.w)
                        pixels_.back().push_back({row * x.w + column, pixel});
                }
            }
    }

    Stretch weights() const override { return {memory_, size_}; }
    int64_t room(int threads) const override { return inputs_room() + threads * own_room() + kSlack8; }

    int64_t run(const ConvCall8& call, const Member& member) const override {
        uint32_t* inputs = reinterpret_cast<uint32_t*>(call.room);
        pack(call, inputs, member);
        member.meet();
        const bool by_block = blocks_ >= member.threads;  // else members share the pixels
        const Range mine = by_block ? member.share(blocks_) : Range{0, blocks_};
        const Range pixels = by_block ? Range{0, y_.area()} : member.share(y_.area());
        const int *out = std::lower_bound(call.out, call.out + call.n_out, mine.begin * kFilters8), *first = out;
        const int* const end = std::lower_bound(out, call.out + call.n_out, mine.end * kFilters8);
        for (const int* next; out < end; out = next) {
            next = std::lower_bound(out, end, (*out / kFilters8 + 1) * kFilters8);
            multiply(call, inputs, out, int(next - out), next < end ? *next / kFilters8 : blocks_, pixels,
                     call.room + inputs_room() + member.thread * own_room());
            call.upcoming->fetch_share(mine.end - *out / kFilters8);
        }
        keep_residuals(kernels_, q_, call, y_, member);
        return int64_t(end - first) * call.n_in * taps_ * (pixels.end - pixels.begin);
    }

   private:
    int64_t inputs_room() const { return up(4 * words_ * pitch_, kLine8); }
    int64_t sums_room() const { return 4 * kFilters8 * line_ + kSlack8; }
    int64_t staged_room() const { return 4 * int64_t(kFilters8) * kStaged8 / kernels_.channels; }
    int64_t own_room() const { return staged_room() + 2 * sums_room(); }

    const int8_t* line(int block, int tap, int input) const {
        return reinterpret_cast<const int8_t*>(memory_) + ((int64_t(block) * taps_ + tap) * x_.c + input) * kFilters8;
    }

    // Words of the live inputs, plane by plane.
    void pack(const ConvCall8& call, uint32_t* to, const Member& member) const {
        const Range mine = member.share((call.n_in + kernels_.channels - 1) / kernels_.channels);
        for (int word = mine.begin; word < mine.end; ++word) {
            const uint8_t* planes[4];
            for (int c = 0; c < kernels_.channels; ++c) {  // those past the end meet weights of zero
                const int k = std::min(word * kernels_.channels + c, call.n_in - 1);
                planes[c] = call.x + int64_t(call.in[k]) * x_.area();
            }
            kernels_.interleave(planes, 1, x_.area(), to + word * pitch_);
        }
    }

    // Active filters of one block, for some pixels; `then` is the block that comes next, if there is one.
    void multiply(const ConvCall8& call, const uint32_t* inputs, const int* filters, int count, int then, Range pixels,
                  uint8_t* room) const {
        uint32_t* staged = reinterpret_cast<uint32_t*>(room);
        int32_t* sums = reinterpret_cast<int32_t*>(room + staged_room());
        int32_t* lines = reinterpret_cast<int32_t*>(room + staged_room() + sums_room());
        const int vectors = (count + kernels_.lanes - 1) / kernels_.lanes, block = filters[0] / kFilters8;
        uint8_t places[kFilters8] = {};
        for (int f = 0; f < count; ++f) places[f] = uint8_t(filters[f] % kFilters8);
        std::fill_n(sums, kFilters8 * line_, 0);
        for (int tap = 0; tap < taps_; ++tap)
            for (int begin = 0; begin < call.n_in; begin += kStaged8) {
                const int end = std::min(begin + kStaged8, call.n_in);
                const auto [first, last] = inside(tap, pixels);
                if (first == last) continue;
                kernels_.filter_words(line(block, tap, 0), call.in + begin, end - begin, places, vectors, staged);
                kernels_.filters(staged, vectors, (end - begin + kernels_.channels - 1) / kernels_.channels,
                                 inputs + begin / kernels_.channels * pitch_, pitch_, first, int(last - first), sums,
                                 after(call, block, tap, end, then));
            }
        kernels_.filter_lines(sums, count, y_.area(), line_, lines);
        Ending8 ending = ending_of(q_);
        for (int f = 0; f < count; ++f) {
            end_filter(ending, 0, q_, call, filters[f], y_.area(), pixels.begin, q_.bias[filters[f]]);
            kernels_.finish(lines + f * line_ + pixels.begin, pixels.end - pixels.begin, ending, 0);
        }
    }

    // Those of `pixels` whose tap lies inside the map.
    std::pair<const Pixel8*, const Pixel8*> inside(int tap, Range pixels) const {
        const std::vector<Pixel8>& all = pixels_[tap];
        const auto find = [&](int pixel) {
            return std::lower_bound(all.data(), all.data() + all.size(), pixel,
                                    [](const Pixel8& one, int to) { return one.to < to; });
        };
        return {find(pixels.begin), find(pixels.end)};
    }

    // The weights that follow those of a block's tap up to live input number `end`.
    Stretch8 after(const ConvCall8& call, int block, int tap, int end, int then) const {
        if (end == call.n_in) {
            end = 0;
            if (++tap == taps_) tap = 0, block = then;
        }
        if (block == blocks_) return {};
        const int last = call.in[std::min(end + kStaged8, call.n_in) - 1];
        const int8_t* from = line(block, tap, call.in[end]);
        return {from, line(block, tap, last) + kFilters8 - from};
    }

    const Kernels8& kernels_;
    const Quantized q_;
    const Shape x_, y_;
    const int taps_, blocks_;
    const int words_;                          // of an input pixel
    const int64_t pitch_, line_;               // words of an input plane, sums of a filter
    const int64_t size_;                       // floats of all weights
    float* const memory_;                      // (block, tap, input, filter of the block)
    std::vector<std::vector<Pixel8>> pixels_;  // of each tap, those it reads inside the map
};

}  // namespace

std::unique_ptr<AbstractConv8> make_filters8(const Kernels8& kernels, const Op& op, const Quantized& quantized, Shape x,
                                             Shape y, Arena& arena) {
    return std::make_unique<Filters8>(kernels, op, quantized, x, y, arena);
}

}  // namespace cofire
