// Depthwise convs on bytes where shuffles stay within 16 bytes: line by line of a strip, two taps in a word.
#include "ending8.h"
#include "functions8.h"
#include "vec8.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace cofire {
namespace COFIRE_ISA {

namespace {

// Words of a strip's taps in one line of the kernel, from word `first` on.
template <int Words>
class Taps {
   public:
    Taps(const uint8_t* plane, const LinesMap8& map, int strip, int first)
        : plane_(plane + map.strips[strip].at),
          half_(map.strips[strip].half),
          width_(map.width),
          height_(map.height),
          zero_(splat(uint32_t(map.zero_in) * 0x00010001u)) {
#pragma GCC unroll 2
        for (int word = 0; word < Words; ++word) {
            const int64_t at = (int64_t(strip) * map.words + first + word) * 4 * kLanes;
            order_[word] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(map.order + at));
            paddings_[word] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(map.paddings + at));
        }
    }

    // Inside: the line is known to lie inside the plane.
    template <bool Inside>
    void read(int line, words* to) const {
        if (!Inside && (line < 0 || line >= height_)) {
#pragma GCC unroll 2
            for (int word = 0; word < Words; ++word) to[word] = zero_;
            return;
        }
        const uint8_t* from = plane_ + int64_t(line) * width_;
        const auto sixteen = [](const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
        const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen(from)), sixteen(from + half_), 1);
#pragma GCC unroll 2
        for (int word = 0; word < Words; ++word)
            to[word] = words(_mm256_or_si256(_mm256_shuffle_epi8(bytes, order_[word]), paddings_[word]));
    }

    bool inside(int first, int last) const { return first >= 0 && last < height_; }

   private:
    const uint8_t* plane_;
    const int64_t half_;
    const int width_, height_;
    const words zero_;
    __m256i order_[Words], paddings_[Words];
};

// 3 x 3 taps of a strip; Rolls: each line of the plane serves the next two lines too.
template <bool Rolls>
class Strip3 {
   public:
    Strip3(const uint8_t* plane, const uint32_t* w, const LinesMap8& map, int strip, int32_t start)
        : taps_(plane, map, strip, 0),
          start_(splat(start)),
          stride_(map.stride),
          dilation_(map.dilation),
          next_(-map.top) {
#pragma GCC unroll 6
        for (int i = 0; i < 6; ++i) weights_[i] = splat(w[i]);
        if (Rolls) taps_.template read<false>(next_, one_), taps_.template read<false>(next_ + 1, two_);
    }

    // The sums of the next lines.
    template <int Lines>
    void add_up(ints* sums) {
        if (taps_.inside(next_, next_ + (Lines - 1) * stride_ + 2 * dilation_))
            add_up<Lines, true>(sums);
        else
            add_up<Lines, false>(sums);
    }

   private:
    template <int Lines, bool Inside>
    void add_up(ints* sums) {
#pragma GCC unroll 4
        for (int l = 0; l < Lines; ++l, next_ += stride_) {
            if (!Rolls) taps_.template read<Inside>(next_, one_), taps_.template read<Inside>(next_ + dilation_, two_);
            words three[2];
            taps_.template read<Inside>(next_ + 2 * dilation_, three);
            ints sum = start_, other = {};
            sum = multiplied_pairs(sum, one_[0], weights_[0]), other = multiplied_pairs(other, one_[1], weights_[1]);
            sum = multiplied_pairs(sum, two_[0], weights_[2]), other = multiplied_pairs(other, two_[1], weights_[3]);
            sum = multiplied_pairs(sum, three[0], weights_[4]), other = multiplied_pairs(other, three[1], weights_[5]);
            sums[l] = wrapped(sum, other);
#pragma GCC unroll 2
            for (int word = 0; word < 2; ++word) one_[word] = two_[word], two_[word] = three[word];
        }
    }

    const Taps<2> taps_;
    const ints start_;
    const int stride_, dilation_;
    int next_;
    words weights_[6], one_[2], two_[2];
};

template <bool Rolls>
void lines3(const uint8_t* plane, const uint32_t* w, const LinesMap8& map, const Ending8& ending) {
    const Rounding rounding(ending);
    const Filter filter(ending, 0);
    const int pitch = map.pitch;
    Kept kept;
    for (int s = 0; s < map.strip_count; ++s) {
        Strip3<Rolls> strip(plane, w, map, s, ending.start[0]);
        const int width = map.strips[s].width;
        int i = map.strips[s].first, left = map.lines;
        ints sums[4];
        for (; left >= 4; left -= 4, i += 4 * pitch) {
            strip.template add_up<4>(sums);
            finish_lines<4>(sums, i, pitch, width, rounding, filter, kept);
        }
        if (left & 2) {
            strip.template add_up<2>(sums);
            finish_lines<2>(sums, i, pitch, width, rounding, filter, kept);
            i += 2 * pitch;
        }
        if (left & 1) {
            strip.template add_up<1>(sums);
            finish_lines<1>(sums, i, pitch, width, rounding, filter, kept);
        }
    }
    kept.end(ending, 0);
}

}  // namespace

void depthwise_lines(const uint8_t* plane, const uint32_t* w, const LinesMap8& map, const Ending8& ending) {
    if (map.kernel_lines == 3 && map.words == 2)
        return (map.stride == 1 && map.dilation == 1 ? lines3<true> : lines3<false>)(plane, w, map, ending);
    const Rounding rounding(ending);
    const Filter filter(ending, 0);
    Kept kept;
    for (int s = 0; s < map.strip_count; ++s)
        for (int line = 0; line < map.lines; ++line) {
            ints sum = splat(ending.start[0]);
            const uint32_t* weight = w;
            for (int ky = 0; ky < map.kernel_lines; ++ky)
                for (int word = 0; word < map.words; ++word, ++weight) {
                    words found;
                    Taps<1>(plane, map, s, word).read<false>(line * map.stride + ky * map.dilation - map.top, &found);
                    sum = multiplied_pairs(sum, found, splat(*weight));
                }
            finish_some(sum, line * map.pitch + map.strips[s].first, map.strips[s].width, rounding, filter, kept);
        }
    kept.end(ending, 0);
}

}  // namespace COFIRE_ISA
}  // namespace cofire

#endif
