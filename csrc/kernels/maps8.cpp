// What is done to maps of bytes beside convs: made of floats, added up, pooled.
#include "ending8.h"
#include "functions8.h"
#include "vec8.h"

namespace cofire {
namespace COFIRE_ISA {

namespace {

inline pairs load_pairs(const uint8_t* p) { return *reinterpret_cast<const pairs_anywhere*>(p); }

// The largest of each window, from a line that holds the largest of each column: windows begin at every second.
template <int Kernel>
void across(const uint8_t* line, int n, uint8_t* y) {
    for (int i = 0; i < n; i += kLanes) {
        const pairs both = load_pairs(line + 2 * i), first = both & uint16_t(0xff), second = both >> 8;
        pairs most = first > second ? first : second;
        if constexpr (Kernel == 3) {
            const pairs third = load_pairs(line + 2 * i + 2) & uint16_t(0xff);
            most = most > third ? most : third;
        }
        const bytes found = __builtin_convertvector(most, bytes);
        if (n - i >= kLanes)
            store(y + i, found);
        else
            store_some(y + i, found, n - i);
    }
}

}  // namespace

void quantize(const float* x, int n, float inverse, int zero, uint8_t* q) {
    Ending8 ending{};
    ending.zero_out = zero, ending.high = 255;
    const Rounding rounding(ending);
    for (int i = 0; i < n; i += kLanes) {
        const floats real = *reinterpret_cast<const floats_anywhere*>(x + i) * splat(inverse);
        const bytes found = narrowed(rounding.rounded(real == real ? real : floats{}));
        if (n - i >= kLanes)
            store(q + i, found);
        else
            store_some(q + i, found, n - i);
    }
}

uint8_t largest(const uint8_t* x, int n) {
    uint8_t most = 0;
    for (int i = 0; i < n; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

int64_t sum(const uint8_t* x, int n) {
    int64_t all = 0;
    constexpr int kBlock = 1 << 16;  // whose sum int32 holds
    for (int begin = 0; begin < n; begin += kBlock) {
        int32_t part = 0;
        for (int i = begin; i < n && i < begin + kBlock; ++i) part += x[i];
        all += part;
    }
    return all;
}

void max_pool(const uint8_t* x, const Pool8Map& map, uint8_t* line, uint8_t* y) {
    typedef uint8_t wide __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));
    for (int i = 0; i < map.left; ++i) line[i] = 0;
    for (int oy = 0; oy < map.out_height; ++oy, y += map.out_width) {
        const int top = 2 * oy - map.top, begin = top < 0 ? 0 : top;
        const int end = top + map.kernel < map.height ? top + map.kernel : map.height;
        for (int i = 0; i < map.width; i += 4 * kLanes) {
            wide most = {};
            for (int iy = begin; iy < end; ++iy) {
                const wide next = *reinterpret_cast<const wide*>(x + int64_t(iy) * map.width + i);
                most = most > next ? most : next;
            }
            *reinterpret_cast<wide*>(line + map.left + i) = most;
        }
        *reinterpret_cast<wide*>(line + map.left + map.width) = wide{};
        (map.kernel == 2 ? across<2> : across<3>)(line, map.out_width, y);
    }
}

}  // namespace COFIRE_ISA
}  // namespace cofire
