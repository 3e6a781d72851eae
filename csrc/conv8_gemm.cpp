// Convs as sums over (tap, word of channels). The live inputs are packed into words once per block of output lines,
// with a copy for each column of the kernel: so the pixels of a block follow each other without gaps in every tap,
// whatever the kernel, the stride and the dilation. The weights of the live inputs are packed alike, filter by filter.
#include "conv8_common.h"

namespace cofire {
namespace {

constexpr int kFewVectors8 = 4;           // of a small map
constexpr int kMostColumns8 = 4;          // pixels that may be left over for dot products
constexpr int kFewestWords8 = 64;         // of a filter's weights for which that is worth it
constexpr int64_t kInputs8 = 384 * 1024;  // bytes of packed inputs that a block has, or those of one line

class Gemm8 final : public AbstractConv8 {
   public:
    Gemm8(const Kernels8& kernels, const Op& op, const Quantized& quantized, Shape x, Shape y, Arena& arena)
        : kernels_(kernels),
          op_(op),
          q_(quantized),
          x_(x),
          y_(y),
          inputs_(x.c / op.groups),
          words_((inputs_ + kernels.channels - 1) / kernels.channels),
          taps_(op.kernel.h * op.kernel.w),
          copies_(op.kernel.w),
          plain_(lies_as_output(op, x, y)),
          width_(plain_ ? 1 : y.w),
          weights_(op, quantized, x, y, arena) {
        const int reach = (op.kernel.h - 1) * op.dilation.h, all = y.area() / width_;
        phases_.resize(std::min(op.stride.h, reach + 1));
        const int64_t line = int64_t(words_) * 4 * copies_ * int64_t(phases_.size()) * width_;
        lines_ = group_size(all, int(std::min<int64_t>(std::max<int64_t>(kInputs8 / line, 1), all)));
        lines_read_ = lines_ + reach / op.stride.h;
        pitch_ = odd_lines(int64_t(phases_.size()) * lines_read_ * width_ + kernels.lanes);
        for (int ky = 0; ky < op.kernel.h; ++ky)
            for (int kx = 0; kx < op.kernel.w; ++kx) {
                const int dy = ky * op.dilation.h, phase = dy % op.stride.h;
                phases_[phase] = true;
                at_.push_back(kx * pitch_ + (int64_t(phase) * lines_read_ + dy / op.stride.h) * width_);
            }
        pairs_ = kernels.pair && lines_ == all && y.area() <= kernels.lanes;
    }

    Stretch weights() const override { return weights_.all(); }
    int64_t room(int threads) const override { return packed_room() + threads * own_room() + kSlack8; }

    int64_t run(const ConvCall8& call, const Member& member) const override {
        int64_t macs = 0;
        for (int group = 0, i = 0, f = 0; group < op_.groups; ++group) {
            const int first = i;
            while (i < call.n_in && call.in[i] < (group + 1) * inputs_) ++i;
            const int active = f;
            while (f < call.n_out && call.out[f] < (group + 1) * (y_.c / op_.groups)) ++f;
            if (active < f) macs += multiply(call, group, {first, i}, {active, f}, member);
        }
        keep_residuals(kernels_, q_, call, y_, member);
        return macs;
    }

   private:
    int64_t word_pitch() const { return copies_ * pitch_; }  // to the next word of inputs
    int64_t packed_room() const { return up(int64_t(4) * (words_ + int(pairs_)) * word_pitch(), kLine8); }
    int64_t pair_room() const { return pairs_ ? 2 * up(4 * word_pitch(), kLine8) : 0; }
    int64_t row_room() const { return up(4 * int64_t(taps_) * words_, kLine8) + kSlack8; }
    int64_t zeros_room() const { return has_few_vectors() ? up(x_.area(), kLine8) + kSlack8 : 0; }
    int64_t own_room() const {
        return LiveInputs::room(inputs_) + (kernels_.tall_rows + kMostColumns8) * row_room() + pair_room() +
               zeros_room();
    }

    bool has_few_vectors() const { return y_.area() <= kFewVectors8 * kernels_.lanes; }

    // Whether to leave the weights as they are: packing those of the live inputs takes longer than to multiply a few
    // zeros on small maps.
    bool walks_whole(int live) const {
        const int vectors = (y_.area() + kernels_.lanes - 1) / kernels_.lanes;
        return kernels_.channels == 4 &&
               (live == inputs_ || (has_few_vectors() && 5 * (inputs_ - live) * vectors < 2 * inputs_));
    }

    int64_t multiply(const ConvCall8& call, int group, Range in, Range out, const Member& member) const {
        uint32_t* packed = reinterpret_cast<uint32_t*>(call.room);
        uint8_t* own = call.room + packed_room() + member.thread * own_room();
        LiveInputs live(call.in + in.begin, in.end - in.begin, group * inputs_, inputs_, own);
        live.whole = walks_whole(live.count);
        const int words = live.whole ? words_ : (live.count + kernels_.channels - 1) / kernels_.channels;
        uint8_t *rows_room = own + LiveInputs::room(inputs_), *zeros = own + own_room() - zeros_room();
        std::fill_n(zeros, zeros_room(), uint8_t(q_.zero_in));
        const uint8_t* x = call.x + int64_t(group) * inputs_ * x_.area();
        Ending8 ending = ending_of(q_);
        const Range mine = member.share(out.end - out.begin), packs = member.share(words);
        for (int line = 0; line < y_.area() / width_; line += lines_) {
            const int lines = std::min(lines_, y_.area() / width_ - line);
            if (line > 0) member.meet();  // nobody reads the last block any more
            for (int word = packs.begin; word < packs.end && !pairs_; ++word)
                pack(x, zeros, live, word, line, lines, packed + word * word_pitch());
            if (pairs_) pack_pairs(x, zeros, live, words, packed, zeros - pair_room(), member);
            member.meet();
            Walk8 walk{packed, at_.data(), taps_, words, word_pitch(), pairs_};
            fill_columns(walk, lines * width_,
                         reinterpret_cast<uint32_t*>(rows_room + kernels_.tall_rows * row_room()));
            for (int f = mine.begin, size; f < mine.end; f += size) {
                size = group_size(mine.end - f, best_rows8(kernels_, lines * width_));
                const int* filters = call.out + out.begin + f;
                const uint32_t* rows[kMaxRows8];
                for (int r = 0; r < size; ++r) {
                    int32_t start = 0;
                    rows[r] = weights_.packed(kernels_, filters[r], live, rows_room + r * row_room(), &start);
                    end_filter(ending, r, q_, call, filters[r], y_.area(), line * width_, start);
                }
                const Ahead8 ahead = weights_.ahead(call.out + out.begin, f + size, mine.end, size);
                call.upcoming->fetch_share((mine.end - f + size - 1) / size);
                kernels_.gemm(rows, size, walk, lines * width_, ending, f + size < mine.end ? &ahead : nullptr);
            }
        }
        member.meet();
        return int64_t(mine.end - mine.begin) * live.count * taps_ * y_.area();
    }

    // Word `word` of the live inputs, for the taps of output lines [line, line + lines).
    void pack(const uint8_t* x, const uint8_t* zeros, const LiveInputs& live, int word, int line, int lines,
              uint32_t* to) const {
        const uint8_t *planes[4], *at[4];
        for (int c = 0; c < kernels_.channels; ++c) {  // those past the end meet weights of zero
            const int k = std::min(word * kernels_.channels + c, (live.whole ? inputs_ : live.count) - 1);
            const int i = live.whole ? k : live.list[k];
            planes[c] = live.has(i) ? x + int64_t(i) * x_.area() : zeros;
        }
        if (plain_) {
            for (int c = 0; c < kernels_.channels; ++c) at[c] = planes[c] + line;
            return kernels_.interleave(at, 1, lines, to);
        }
        const uint32_t zero = uint32_t(q_.zero_in) * (kernels_.channels == 4 ? 0x01010101u : 0x00010001u);
        for (int kx = 0; kx < copies_; ++kx) {
            // pixels [begin, end) of an output line lie inside the plane
            const int shift = op_.padding.left - kx * op_.dilation.w, stride = op_.stride.w;
            const int begin = std::min(shift > 0 ? (shift + stride - 1) / stride : 0, y_.w);
            const int end = std::max(x_.w + shift > 0 ? std::min((x_.w + shift - 1) / stride + 1, y_.w) : 0, begin);
            for (int phase = 0; phase < int(phases_.size()); ++phase) {
                if (!phases_[phase]) continue;
                uint32_t* row = to + kx * pitch_ + int64_t(phase) * lines_read_ * width_;
                for (int l = 0; l < lines + lines_read_ - lines_; ++l, row += width_) {
                    const int y = (line + l) * op_.stride.h + phase - op_.padding.top;
                    const bool inside = y >= 0 && y < x_.h && begin < end;
                    if (!inside) {
                        std::fill_n(row, width_, zero);
                        continue;
                    }
                    for (int c = 0; c < kernels_.channels; ++c)
                        at[c] = planes[c] + int64_t(y) * x_.w + int64_t(begin) * stride - shift;
                    kernels_.interleave(at, stride, end - begin, row + begin);
                    std::fill(row, row + begin, zero);
                    std::fill(row + end, row + width_, zero);
                }
            }
        }
    }

    // All words of a map of one vector, two by two; `room` for two of them.
    void pack_pairs(const uint8_t* x, const uint8_t* zeros, const LiveInputs& live, int words, uint32_t* packed,
                    uint8_t* room, const Member& member) const {
        uint32_t *one = reinterpret_cast<uint32_t*>(room), *other = one + pair_room() / 8;
        const int lines = y_.area() / width_, n = int(word_pitch());
        const Range mine = member.share((words + 1) / 2);
        for (int pair = mine.begin; pair < mine.end; ++pair) {
            pack(x, zeros, live, 2 * pair, 0, lines, one);
            if (2 * pair + 1 < words)
                pack(x, zeros, live, 2 * pair + 1, 0, lines, other);
            else
                std::fill_n(other, n, 0u);
            kernels_.pair(one, other, n, packed + 2 * pair * word_pitch());
        }
    }

    // Of n pixels the last few as columns, if there are few enough over.
    void fill_columns(Walk8& walk, int n, uint32_t* to) const {
        const int over = n % kernels_.lanes, words = walk.taps * walk.words;
        if (over > std::min(kMostColumns8, kernels_.lanes / 4) || n < kernels_.lanes || words < kFewestWords8) return;
        walk.columns = to, walk.column_count = over, walk.column_pitch = up(words, kLine);
        for (int i = n - over; i < n; ++i, to += walk.column_pitch) {
            uint32_t* next = to;
            for (int tap = 0; tap < walk.taps; ++tap)
                for (int k = 0; k < walk.words; ++k) *next++ = walk.x[walk.at[tap] + k * walk.pitch + i];
            std::fill(next, to + walk.column_pitch, 0u);
        }
    }

    const Kernels8& kernels_;
    const Op& op_;
    const Quantized q_;
    const Shape x_, y_;
    const int inputs_, words_;  // of a group
    const int taps_, copies_;
    const bool plain_;  // inputs lie as outputs do: pixels are lines then
    const int width_;
    const Weights8 weights_;
    std::vector<bool> phases_;  // of the stride: whether some tap reads it
    int lines_, lines_read_;    // output lines of a block, and lines that it reads of each phase
    int64_t pitch_;             // words of a copy
    bool pairs_;                // whether the map fills no more than a vector, see Kernels8::pair
    std::vector<int64_t> at_;   // where each tap lies
};

}  // namespace

std::unique_ptr<AbstractConv8> make_gemm8(const Kernels8& kernels, const Op& op, const Quantized& quantized, Shape x,
                                          Shape y, Arena& arena) {
    return std::make_unique<Gemm8>(kernels, op, quantized, x, y, arena);
}

}  // namespace cofire
