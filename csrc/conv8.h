// A conv on bytes, prepared to run on lists of live inputs and active filters. Every algorithm gives what
// conv8_reference.cpp gives, bit for bit.
//
// Buffers hold planes of u8 as float buffers hold planes of floats; a byte q stands for scale * (q - zero).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "conv.h"
#include "kernels/kernels8.h"

namespace cofire {

// What a conv on bytes has beside the window of its op. With the live inputs i and the taps t that lie inside the plane
//
//     sum = bias + sum over i and t of weight * (x - zero_in)           in int32, which wraps around,
//     real = float(sum) * multiplier                                    each step rounded to float32,
//     real = real + float(residual - zero_residual) * residual_multiplier   with a residual,
//     y = clamp(nearest even of real, low - zero_out, high - zero_out) + zero_out, or real itself as a float.
//
// All multipliers are normal floats or zero; 0 <= low <= high <= 255, zeros are in 0 .. 255.
struct Quantized {
    const int8_t* weight;     // (O, I / groups, kernel)
    const int32_t* bias;      // (O)
    const float* multiplier;  // (O)
    int zero_in = 0, zero_out = 0, low = 0, high = 255;
    int zero_residual = 0;
    float residual_multiplier = 0;
    bool to_float = false;  // y is float32, and nothing is rounded to bytes
};

// One execution. Planes are contiguous: channel c of x lies at x + c * area.
struct ConvCall8 {
    const uint8_t* x;  // kSlack8 bytes of room after it
    const int* in;     // live input channels, ascending: no other is read
    int n_in;
    const int* out;  // active filters, ascending
    int n_out;
    uint8_t* y;
    float* y_float;              // instead of y, if to_float
    const uint8_t* residual;     // null, or laid out as y, and maybe y itself
    const uint8_t* residual_on;  // per filter: whether its residual is live, else it is zero; null: all are
    uint8_t* peak;               // null, or per filter: raised to the largest byte this member wrote
    int64_t* sum;                // null, or per filter: the bytes this member wrote are added
    uint8_t* room;               // room(threads) bytes, aligned to cache lines, shared by the team
    Upcoming* upcoming;          // this member's
};

// Filters that are not active are not written; with a residual, those whose residual is live keep it as if `sum` were
// zero. Peaks and sums cover them too.
class AbstractConv8 {
   public:
    virtual ~AbstractConv8() = default;
    virtual int64_t room(int threads) const = 0;  // bytes of scratch for a team
    virtual Stretch weights() const = 0;          // as they lie for `run`
    // Called by every member of a team with the same call, but for peak and sum. Returns the MACs this member walked:
    // those of a direct conv, padding taps included. What the team wrote is there after it has met again.
    virtual int64_t run(const ConvCall8& call, const Member& member) const = 0;
};

// A way to run convs on bytes. `make` prepares one, with its weights in the arena if it lays them out anew; the op, the
// arrays of `quantized` and the arena must outlive it.
struct ConvAlgorithm8 {
    const char* name;
    bool (*fits)(const Op& op, const Quantized& quantized, Shape x, Shape y);
    std::unique_ptr<AbstractConv8> (*make)(const Kernels8& kernels, const Op& op, const Quantized& quantized, Shape x,
                                           Shape y, Arena& arena);
};

// All there are, likely best first. The last, "ref", fits every conv and defines what the others must give.
const std::vector<ConvAlgorithm8>& conv8_algorithms();

// With the named algorithm, or with the likely best if the name is empty. Of the op only the window counts: kernel,
// stride, dilation, padding, groups.
std::unique_ptr<AbstractConv8> make_conv8(const std::string& algorithm, const Kernels8& kernels, const Op& op,
                                          const Quantized& quantized, Shape x, Shape y, Arena& arena);

}  // namespace cofire
