// A conv, prepared to run on lists of live inputs and active filters.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/leaf.h"
#include "program.h"
#include "team.h"

namespace cofire {

// One execution. Planes are contiguous: channel c of x lies at x + c * area.
struct ConvCall {
    const float* x;
    const int* in;  // live input channels, ascending
    int n_in;
    const int* out;  // active filters, ascending
    int n_out;
    float* y;
    const float* residual;  // null, or laid out as y, and maybe y itself
    float* peak;            // null, or per filter: raised to the largest value this member wrote
    float* room;            // room(threads) floats, shared by the team
};

class AbstractConv {
   public:
    virtual ~AbstractConv() = default;
    virtual const char* name() const = 0;
    virtual int64_t room(int threads) const = 0;  // floats of scratch for a team
    // Called by every member of a team with the same call. Returns the MACs this member walked: those of a direct conv,
    // padding taps included.
    virtual int64_t run(const ConvCall& call, const Member& member) const = 0;
};

// The algorithms that can run an op, likely best first; "ref" always is last.
std::vector<std::string> conv_algorithms(const Op& op, Shape x, Shape y);

// Prepares a conv; `leaf` is not used by "ref". The op must outlive it.
std::unique_ptr<AbstractConv> make_conv(const std::string& algorithm, const Leaf& leaf, const Op& op, Shape x, Shape y);

}  // namespace cofire
