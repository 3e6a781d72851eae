// Convs on small maps, linear layers among them: dot products along the channels, pixel by pixel. Taps that lie beside
// the map are left out, which are half of all on the smallest maps. The weights are read as they lie, so that
// inputs that are off are zeros here, unless a filter has so many products that it is worth to pack its weights.
#include <cstring>
#include <map>

#include "conv8_common.h"

namespace cofire {
namespace {

constexpr int kRows8 = 6;      // filters at a time
constexpr int kTogether8 = 8;  // inputs of a pixel that are laid in one go
constexpr int kPacking8 = 6;   // products that take as long as to pack a cache line of weights

// Pixels with the same taps inside the map.
struct Alike {
    std::vector<Run8> runs;
    std::vector<int> pixels;       // of the output,
    std::vector<int> first;        // and what the first tap of each reads
    std::vector<int32_t> lacking;  // of each filter's sums: see Kernels8::dot_lacks
};

class Dot8 final : public AbstractConv8 {
   public:
    Dot8(const Kernels8& kernels, const Op& op, const Quantized& quantized, Shape x, Shape y, Arena& arena)
        : kernels_(kernels),
          op_(op),
          q_(quantized),
          x_(x),
          y_(y),
          taps_(op.kernel.h * op.kernel.w),
          row_(up(x.c, kLine8)),
          pitch_(odd_lines(taps_ * row_ / 4) * 4),
          // Paddings that are no zeros to the products must be there.
          border_(quantized.zero_in == 0 ? Padding{0, 0, 0, 0} : op.padding),
          high_(x.h + border_.top + border_.bottom),
          wide_(x.w + border_.left + border_.right),
          size_((y.c * pitch_ + kSlack8) / 4),
          memory_(arena.take(size_)),
          totals_(y.c) {
        for (int o = 0; o < y.c; ++o) {
            int8_t* to = reinterpret_cast<int8_t*>(memory_) + o * pitch_;
            const int8_t* from = q_.weight + int64_t(o) * x.c * taps_;
            for (int i = 0; i < x.c; ++i)
                for (int tap = 0; tap < taps_; ++tap, ++from) to[tap * row_ + i] = *from, totals_[o] += *from;
        }
        find_taps();
    }

    Stretch weights() const override { return {memory_, size_}; }
    int64_t room(int threads) const override { return inputs_room() + threads * own_room() + kSlack8; }

    int64_t run(const ConvCall8& call, const Member& member) const override {
        uint8_t* own = call.room + inputs_room() + member.thread * own_room();
        LiveInputs live(call.in, call.n_in, 0, x_.c, own);
        const int64_t row = up(call.n_in, kLine8);
        const int fewer = int((row_ - row) / kLine8);
        live.whole = kernels_.channels != 4 || fewer * products_ <= kPacking8 * taps_ * (row_ / kLine8);
        const Walk walk{live, live.whole ? row_ : row, call.room, own + LiveInputs::room(x_.c),
                        own + own_room() - planes_room()};
        lay_inputs(call, walk, member);
        member.meet();
        const Range mine = member.share(call.n_out);
        for (int f = mine.begin, size; f < mine.end; f += size) {
            size = group_size(mine.end - f, kRows8);
            call.upcoming->fetch_share((mine.end - f + size - 1) / size);
            multiply(call, walk, call.out + f, size, mine.end - f - size);
        }
        keep_residuals(kernels_, q_, call, y_, member);
        return int64_t(mine.end - mine.begin) * call.n_in * taps_ * y_.area();
    }

   private:
    struct Walk {
        const LiveInputs& live;
        const int64_t row;  // bytes of a pixel's inputs, and of a tap's weights
        uint8_t *inputs, *weights, *planes;
    };

    int64_t inputs_room() const { return int64_t(high_) * wide_ * row_; }
    int64_t weights_room() const { return taps_ * row_ + 2 * kSlack8; }  // of one filter
    int64_t sums_room() const { return up(4 * y_.area(), kLine8) + kSlack8; }
    int64_t planes_room() const { return 2 * up(x_.area(), kLine8); }
    int64_t own_room() const {
        return LiveInputs::room(x_.c) + kRows8 * (weights_room() + sums_room()) + planes_room();
    }
    bool has_border() const { return wide_ > x_.w || high_ > x_.h; }

    // The taps [begin, end) of a line or column that read inside, from `start` on.
    static Range inside(int start, int dilation, int taps, int length) {
        const int begin = start < 0 ? std::min((-start + dilation - 1) / dilation, taps) : 0;
        const int end = start < length ? std::min((length - 1 - start) / dilation + 1, taps) : 0;
        return {begin, std::max(begin, end)};
    }

    void find_taps() {
        std::map<std::vector<int>, Alike> found;
        for (int pixel = 0; pixel < y_.area(); ++pixel) {
            const int top = pixel / y_.w * op_.stride.h - op_.padding.top + border_.top;
            const int left = pixel % y_.w * op_.stride.w - op_.padding.left + border_.left;
            const Range down = inside(top, op_.dilation.h, op_.kernel.h, high_);
            const Range across = inside(left, op_.dilation.w, op_.kernel.w, wide_);
            products_ += int64_t(down.end - down.begin) * (across.end - across.begin);
            Alike& alike = found[{down.begin, down.end, across.begin, across.end}];
            alike.pixels.push_back(pixel);
            alike.first.push_back((top + down.begin * op_.dilation.h) * wide_ + left + across.begin * op_.dilation.w);
            if (alike.pixels.size() > 1 || across.begin == across.end) continue;
            for (int ky = down.begin; ky < down.end; ++ky) {
                const int line = (ky - down.begin) * op_.dilation.h * wide_;
                const int step = op_.dilation.w == 1 ? across.end - across.begin : 1;  // taps that are neighbours
                for (int kx = across.begin; kx < across.end; kx += step)
                    alike.runs.push_back({ky * op_.kernel.w + kx, line + (kx - across.begin) * op_.dilation.w, step});
            }
        }
        for (auto& [key, alike] : found) {
            alike.lacking.resize(y_.c);
            for (int o = 0; kernels_.dot_lacks && o < y_.c; ++o)
                for (const Run8& run : alike.runs)
                    alike.lacking[o] += kernels_.dot_lacks(
                        reinterpret_cast<const int8_t*>(memory_) + o * pitch_ + run.tap * row_, int(run.taps * row_));
            alike_.push_back(std::move(alike));
        }
    }

    // The inputs of each pixel side by side, those that are live or all, and zeros behind them.
    void lay_inputs(const ConvCall8& call, const Walk& walk, const Member& member) const {
        const int channels = walk.live.whole ? x_.c : walk.live.count;
        uint8_t *dead = walk.planes, *none = dead + up(x_.area(), kLine8);
        std::fill_n(dead, x_.area(), uint8_t(q_.zero_in));
        std::fill_n(none, x_.area(), uint8_t(0));
        const Range mine = member.share(int(walk.row / kTogether8));
        for (int part = mine.begin; part < mine.end; ++part) {
            const uint8_t* planes[kTogether8];
            uint8_t* to = walk.inputs + kTogether8 * part;
            for (int c = 0; c < kTogether8; ++c) {
                const int k = kTogether8 * part + c, i = k >= channels ? -1 : walk.live.whole ? k : walk.live.list[k];
                planes[c] = i < 0 ? none : walk.live.has(i) ? call.x + int64_t(i) * x_.area() : dead;
                for (int pixel = 0; has_border() && pixel < high_ * wide_; ++pixel)
                    to[pixel * walk.row + c] = i < 0 ? uint8_t(0) : uint8_t(q_.zero_in);
            }
            to += (int64_t(border_.top) * wide_ + border_.left) * walk.row;
            for (int y = 0, pixel = 0; y < x_.h; ++y, to += (wide_ - x_.w) * walk.row)
                for (int x = 0; x < x_.w; ++x, ++pixel, to += walk.row) {
                    uint8_t bytes[kTogether8];
                    for (int c = 0; c < kTogether8; ++c) bytes[c] = planes[c][pixel];
                    std::memcpy(to, bytes, kTogether8);
                }
        }
    }

    void multiply(const ConvCall8& call, const Walk& walk, const int* filters, int size, int more) const {
        const int8_t* memory = reinterpret_cast<const int8_t*>(memory_);
        const int8_t* rows[kRows8];
        int32_t starts[kRows8];
        for (int r = 0; r < size; ++r) {
            const int8_t* row = memory + filters[r] * pitch_;
            rows[r] = walk.live.whole ? row : pack(walk, row, walk.weights + r * weights_room(), &starts[r]);
            if (walk.live.whole) starts[r] = totals_[filters[r]];
        }
        int32_t* sums = reinterpret_cast<int32_t*>(walk.weights + kRows8 * weights_room());
        const int64_t pitch = sums_room() / 4, lines = pitch_ / kLine8;
        int64_t fetched = 0;  // lines of each filter that comes then
        int done = 0;
        for (const Alike& alike : alike_)
            for (size_t begin = 0; begin < alike.pixels.size(); begin += kDotPixels8) {
                const int count = int(std::min(alike.pixels.size() - begin, size_t(kDotPixels8)));
                const uint8_t* x[kDotPixels8];
                for (int i = 0; i < count; ++i) x[i] = walk.inputs + alike.first[begin + i] * walk.row;
                done += count;
                for (; fetched < lines * done / y_.area(); ++fetched)
                    for (int r = 0; r < std::min(size, more); ++r)
                        fetch_weights(memory + filters[size + r] * pitch_ + fetched * kLine8);
                int32_t found[kRows8 * kDotPixels8 + 3];
                kernels_.dot(rows, size, alike.runs.data(), int(alike.runs.size()), walk.row, x, count, found);
                for (int r = 0; r < size; ++r)
                    for (int i = 0; i < count; ++i)
                        sums[r * pitch + alike.pixels[begin + i]] =
                            int32_t(uint32_t(found[r * count + i]) + uint32_t(alike.lacking[filters[r]]));
            }
        Ending8 ending = ending_of(q_);
        for (int r = 0; r < size; ++r) {
            end_filter(ending, 0, q_, call, filters[r], y_.area(), 0, start_of(q_, filters[r], starts[r]));
            kernels_.finish(sums + r * pitch, y_.area(), ending, 0);
        }
    }

    // A filter's weights for live inputs. Whatever lies behind them in a row meets inputs of zero.
    const int8_t* pack(const Walk& walk, const int8_t* row, uint8_t* to, int32_t* total) const {
        *total = 0;
        for (int tap = 0; tap < taps_; ++tap)
            *total += kernels_.gather(row + tap * row_, walk.live.list, walk.live.count, walk.live.bits, x_.c,
                                      q_.zero_in != 0, reinterpret_cast<uint32_t*>(to + tap * walk.row));
        return reinterpret_cast<const int8_t*>(to);
    }

    const Kernels8& kernels_;
    const Op& op_;
    const Quantized q_;
    const Shape x_, y_;
    const int taps_;
    const int64_t row_;    // bytes of a tap's weights
    const int64_t pitch_;  // bytes of a filter's
    const Padding border_;
    const int high_, wide_;  // of a map with its border
    const int64_t size_;     // floats of all weights
    float* const memory_;
    std::vector<int32_t> totals_;  // of each filter's weights
    std::vector<Alike> alike_;
    int64_t products_ = 0;  // taps of all pixels
};

}  // namespace

std::unique_ptr<AbstractConv8> make_dot8(const Kernels8& kernels, const Op& op, const Quantized& quantized, Shape x,
                                         Shape y, Arena& arena) {
    return std::make_unique<Dot8>(kernels, op, quantized, x, y, arena);
}

}  // namespace cofire
