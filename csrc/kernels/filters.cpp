// Pixels times filters: vectors hold filters and pixels are broadcast, so that a map of any size fills them.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "clamp.h"
#include "functions.h"
#include "vec.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kPixels = 14;  // by two vectors of filters: 28 of 32 registers
#else
constexpr int kPixels = 6;  // 12 of 16
#endif

// Weights as they lie.
struct Straight {
    const float* w;
    int64_t pitch;

    vec operator()(int strip, int64_t row) const { return load(w + strip * pitch + row); }
};

// Listed filters from the strips that hold them, into strips of their own.
class Picking {
   public:
    explicit Picking(const Strips& strips) : to_(strips.to), pitch_(strips.pitch) {
#if defined(__AVX512F__)
        for (int strip = 0; strip < strips.count; ++strip) {
            const int rest = strips.listed - strip * kLanes;
            find(strips, strips.filters + strip * kLanes, rest < kLanes ? rest : kLanes, sources_[strip]);
        }
#else  // all of them at once: without permutations they come one by one
        for (int f = 0; f < strips.listed; ++f) {
            const float* from = strips.w + strips.filters[f] / kLanes * pitch_ + strips.filters[f] % kLanes;
            float* to = to_ + f / kLanes * pitch_ + f % kLanes;
            for (int k = 0; k < strips.nk; ++k) {
                const int64_t row = int64_t(strips.in[k]) * kLanes;
                to[row] = from[row];
            }
        }
#endif
    }

    vec operator()(int strip, int64_t row) const {
        float* to = to_ + strip * pitch_ + row;
#if defined(__AVX512F__)
        const Sources& sources = sources_[strip];
        __m512 picked =
            _mm512_permutex2var_ps(load(sources.from[0] + row), sources.places[1], load(sources.from[1] + row));
        for (int s = 2; s < sources.count; ++s)
            picked = _mm512_permutex2var_ps(picked, sources.places[s], load(sources.from[s] + row));
        store(to, vec(picked));
        return vec(picked);
#else
        return load(to);
#endif
    }

   private:
#if defined(__AVX512F__)
    // A permutation of two vectors, and one more for each that follows.
    struct Sources {
        int count = 0;
        const float* from[kLanes];
        __m512i places[kLanes];
    };

    static void find(const Strips& strips, const int* filters, int count, Sources& sources) {
        int place[kLanes] = {};
        for (int f = 0; f < count; ++sources.count) {
            const int number = filters[f] / kLanes;
            if (sources.count > 1)
                for (int lane = 0; lane < kLanes; ++lane) place[lane] = lane;
            for (; f < count && filters[f] / kLanes == number; ++f)
                place[f] = filters[f] % kLanes + (sources.count > 0 ? kLanes : 0);
            sources.from[sources.count] = strips.w + number * strips.pitch;
            sources.places[sources.count] = _mm512_loadu_si512(place);
        }
        if (sources.count == 1) sources.from[1] = sources.from[0], sources.places[1] = sources.places[0];
    }

    Sources sources_[2];
#endif
    float* const to_;
    const int64_t pitch_;
};

// Vectors of filters, `step` apart, one for each pixel, become lines of pixels.
template <int Pixels>
void turn(const vec* sums, int step, float* const* y, int at) {
    const auto sum = [&](int i) { return sums[(i < Pixels ? i : Pixels - 1) * step]; };
#pragma GCC unroll 4
    for (int i = 0; i < Pixels; i += 4) {
        vec rows[4] = {sum(i), sum(i + 1), sum(i + 2), sum(i + 3)};
        transpose(rows[0], rows[1], rows[2], rows[3]);
#pragma GCC unroll 4
        for (int number = 0; number < kQuads; ++number)
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
                const vec4 pixels = quad(rows[r], number);
                float* to = y[4 * number + r] + at + i;
                if (Pixels - i >= 4)
                    store4(to, pixels);
                else
                    __builtin_memcpy(to, &pixels, sizeof(float) * (Pixels - i));
            }
    }
}

// What comes next, fetched a little at every step from two places, all of it in the end. Memory gives it in one piece
// faster than without the rows of dead inputs. It goes to the nearest cache, on Zen 4 too: inputs and weights only
// stream through that here.
class Fetching {
   public:
    Fetching(const float* from, int64_t size, int64_t steps)
        : from_(from), half_(size / kLine / 2 * kLine), rate_(steps > 0 ? (size - half_) / kLine * kOne / steps : 0) {}

    void step() {
        const float* at = from_ + at_ / kOne * kLine;
        __builtin_prefetch(at);
        __builtin_prefetch(at + half_);
        at_ += rate_;
    }

   private:
    static constexpr int64_t kOne = 1 << 16;
    const float* from_;
    int64_t half_, rate_, at_ = 0;
};

// Pixels x Count accumulators stay in registers over all of k.
template <int Pixels, int Count, class Weights>
void tile(const Weights& weights_at, const Strips& strips, const Planes& x, int at, const FilterEnding& ending,
          Fetching& ahead) {
    Fetching fetching = ahead;
    for (int f = 0; f < Count * kLanes; ++f) __builtin_prefetch(ending.y[f] + at + Pixels - 1, 1);
    vec sum[Pixels][Count] = {};
    const float* plane = x.x + at;
    const int *in = strips.in, *end = in + strips.nk;
    for (const int64_t pitch = x.pitch; in < end; ++in) {
        const int64_t row = int64_t(*in) * kLanes;
        const float* pixels = plane + *in * pitch;
        fetching.step();
        vec weights[Count];
#pragma GCC unroll 2
        for (int s = 0; s < Count; ++s) weights[s] = weights_at(s, row);
#pragma GCC unroll 16
        for (int i = 0; i < Pixels; ++i) {
            const vec pixel = splat(pixels[i]);
#pragma GCC unroll 2
            for (int s = 0; s < Count; ++s) sum[i][s] += pixel * weights[s];
        }
    }
    ahead = fetching;
    const Clamp clamp(ending.act);
#pragma GCC unroll 2
    for (int s = 0; s < Count; ++s) {
        const vec factor = load(ending.factor + s * kLanes), bias = load(ending.bias + s * kLanes);
        vec best = load(ending.best + s * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < Pixels; ++i) {
            sum[i][s] = clamp(sum[i][s] * factor + bias);
            best = either(sum[i][s], best);
        }
        store(ending.best + s * kLanes, best);
        turn<Pixels>(&sum[0][s], Count, ending.y + s * kLanes, at);
    }
}

template <int Pixels, class Weights>
void tile_of(int pixels, const Weights& weights, const Strips& strips, const Planes& x, int at,
             const FilterEnding& ending, Fetching& ahead) {
    if constexpr (Pixels > 1)
        if (pixels < Pixels) return tile_of<Pixels - 1>(pixels, weights, strips, x, at, ending, ahead);
    (strips.count == 1 ? tile<Pixels, 1, Weights> : tile<Pixels, 2, Weights>)(weights, strips, x, at, ending, ahead);
}

}  // namespace

void filters(const Strips& strips, const Planes& x, const FilterEnding& ending) {
    const Straight straight{strips.filters ? strips.to : strips.w, strips.pitch};
    const int tiles = (x.end - x.begin + kPixels - 1) / kPixels;
    Fetching ahead(strips.ahead ? strips.ahead : straight.w, strips.ahead_size, int64_t(tiles) * strips.nk);
    for (int t = 0, at = x.begin, size; t < tiles; ++t, at += size) {
        size = (x.end - at + tiles - t - 1) / (tiles - t);
        if (t == 0 && strips.filters)
            tile_of<kPixels>(size, Picking(strips), strips, x, at, ending, ahead);
        else
            tile_of<kPixels>(size, straight, strips, x, at, ending, ahead);
    }
}

}  // namespace COFIRE_ISA
}  // namespace cofire
