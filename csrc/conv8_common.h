// What the conv algorithms on bytes share.
#pragma once

#include <algorithm>

#include "conv8.h"
#include "conv_common.h"

namespace cofire {

using Make8 = std::unique_ptr<AbstractConv8>(const Kernels8& kernels, const Op& op, const Quantized& quantized, Shape x,
                                             Shape y, Arena& arena);
Make8 make_depthwise8, make_dot8, make_filters8, make_gemm8, make_reference8, make_winograd8;

// Whether sums are small enough too.
bool fits_winograd8(const Op& op, const Quantized& quantized, Shape x, Shape y);

constexpr int kLine8 = 64;  // bytes of a cache line

alignas(kLine8) constexpr uint32_t kNothing[kLine8 / 4] = {};  // a word that is missing, for a vector of pixels

// Filters that Kernels8::gemm takes best at a time for n pixels.
inline int best_rows8(const Kernels8& kernels, int n) { return n > kernels.lanes ? kernels.rows : kernels.tall_rows; }

// An ending without filters.
inline Ending8 ending_of(const Quantized& q) {
    Ending8 ending{};
    ending.zero_out = q.zero_out, ending.low = q.low, ending.high = q.high;
    ending.zero_residual = q.zero_residual, ending.residual_multiplier = q.residual_multiplier;
    return ending;
}

// Filter o, from pixel `first` on, becomes row r of an ending. Its sums begin with `start`.
inline void end_filter(Ending8& ending, int r, const Quantized& q, const ConvCall8& call, int o, int area, int first,
                       int32_t start) {
    const int64_t at = int64_t(o) * area + first;
    const bool adds = call.residual && (!call.residual_on || call.residual_on[o]);
    ending.start[r] = start, ending.multiplier[r] = q.multiplier[o];
    ending.residual[r] = adds ? call.residual + at : nullptr;
    ending.y[r] = q.to_float ? nullptr : call.y + at;
    ending.y_float[r] = q.to_float ? call.y_float + at : nullptr;
    ending.peak[r] = call.peak ? call.peak + o : nullptr;
    ending.sum[r] = call.sum ? call.sum + o : nullptr;
}

// What sums begin with where inputs are multiplied as they are, which adds weight * zero_in too much for each.
inline int32_t start_of(const Quantized& q, int o, int32_t total_weight) {
    return int32_t(uint32_t(q.bias[o]) - uint32_t(total_weight) * uint32_t(q.zero_in));
}

// Filters that are off keep their residual, if that is live.
inline void keep_residuals(const Kernels8& kernels, const Quantized& q, const ConvCall8& call, Shape y,
                           const Member& member) {
    if (!call.residual) return;
    const Range mine = member.share(y.c);
    Ending8 ending = ending_of(q);
    const int* active = std::lower_bound(call.out, call.out + call.n_out, mine.begin);
    for (int o = mine.begin; o < mine.end; ++o) {
        if (active < call.out + call.n_out && *active == o) {
            ++active;
        } else if (!call.residual_on || call.residual_on[o]) {
            end_filter(ending, 0, q, call, o, y.area(), 0, 0);
            kernels.finish(nullptr, y.area(), ending, 0);
        }
    }
}

// The live inputs of a group as a list and as bits, counted from the group's first.
struct LiveInputs {
    int count;
    bool whole = false;  // dead ones are walked too, as zeros
    int* list;
    uint64_t* bits;

    // In memory of room(inputs) bytes.
    LiveInputs(const int* in, int n, int first, int inputs, uint8_t* room)
        : count(n), list(reinterpret_cast<int*>(room + bits_room(inputs))), bits(reinterpret_cast<uint64_t*>(room)) {
        std::fill_n(bits, bits_room(inputs) / 8, 0);
        for (int k = 0; k < n; ++k) {
            list[k] = in[k] - first;
            bits[list[k] / 64] |= uint64_t(1) << list[k] % 64;
        }
    }

    bool has(int i) const { return bits[i / 64] >> i % 64 & 1; }

    static int64_t bits_room(int inputs) { return up((inputs + 7) / 8, kLine8); }
    static int64_t room(int inputs) { return bits_room(inputs) + up(4 * int64_t(inputs), kLine8); }
};

// The weights of each filter, those of a tap side by side.
class Weights8 {
   public:
    Weights8(const Op& op, const Quantized& quantized, Shape x, Shape y, Arena& arena)
        : q_(quantized),
          inputs_(x.c / op.groups),
          taps_(op.kernel.h * op.kernel.w),
          row_(int(up(inputs_, 4))),
          pitch_(odd_lines((int64_t(taps_) * row_ + 3) / 4) * 4),
          size_((y.c * pitch_ + kSlack8) / 4),
          memory_(arena.take(size_)),
          totals_(y.c) {
        int8_t* to = reinterpret_cast<int8_t*>(memory_);
        for (int o = 0; o < y.c; ++o, to += pitch_)
            for (int i = 0; i < inputs_; ++i)
                for (int tap = 0; tap < taps_; ++tap) {
                    const int8_t weight = q_.weight[(int64_t(o) * inputs_ + i) * taps_ + tap];
                    to[int64_t(tap) * row_ + i] = weight;
                    totals_[o] += weight;
                }
    }

    // Words of a filter's weights for live inputs: as they are, if these are whole, or in `room`. What its sums begin
    // with goes into *start.
    const uint32_t* packed(const Kernels8& kernels, int o, const LiveInputs& live, uint8_t* room,
                           int32_t* start) const {
        const int8_t* rows = row(o);
        uint32_t* to = reinterpret_cast<uint32_t*>(room);
        int32_t total = live.whole ? totals_[o] : 0;
        for (int tap = 0; tap < taps_ && !live.whole; ++tap) {
            total += kernels.gather(rows + int64_t(tap) * row_, live.list, live.count, live.bits, inputs_,
                                    q_.zero_in != 0, to);
            to += (live.count + kernels.channels - 1) / kernels.channels;
        }
        *start = start_of(q_, o, total);
        return reinterpret_cast<const uint32_t*>(live.whole ? reinterpret_cast<const uint8_t*>(rows) : room);
    }

    // The rows of out[f .. f + size), or of the last before `end`.
    Ahead8 ahead(const int* out, int f, int end, int size) const {
        Ahead8 ahead{{}, row_};
        for (int r = 0; r < size; ++r) ahead.rows[r] = row(out[std::min(f + r, end - 1)]);
        return ahead;
    }

    const int8_t* row(int o) const { return reinterpret_cast<const int8_t*>(memory_) + o * pitch_; }
    Stretch all() const { return {memory_, size_}; }
    int tap_pitch() const { return row_; }  // bytes
    int64_t row_pitch() const { return pitch_; }

   private:
    const Quantized q_;
    const int inputs_, taps_;
    const int row_;        // bytes of a tap's weights
    const int64_t pitch_;  // bytes of a filter's
    const int64_t size_;   // floats of all
    float* const memory_;
    std::vector<int32_t> totals_;  // of each filter's weights
};

}  // namespace cofire
