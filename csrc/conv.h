// A conv, prepared to run on lists of live inputs and active filters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "floats.h"
#include "kernels/kernels.h"
#include "program.h"
#include "team.h"
#include "zen5.h"

namespace cofire {

// A stretch of weights.
struct Stretch {
    const float* begin = nullptr;
    int64_t size = 0;
};

// What the next conv will read first, fetched into the cache a little at a time while this one computes: memory has
// nothing to do then.
class Upcoming {
   public:
    // Only so much is fetched that there is room for this conv's own data, and nothing where that is little of a
    // stretch: memory is busy without it then.
    void add(Stretch stretch) {
        if (stretch.size > 0 && stretch.size <= kWorth && count_ < 2)
            stretches_[count_++] = {stretch.begin, std::min(stretch.size, kMost)};
    }

    // So much that everything is there after as many calls as are still to come.
    void fetch_share(int calls) {
        int64_t lines = 0;
        for (int s = 0; s < count_; ++s) lines += stretches_[s].size / 16;
        for (lines /= calls; lines >= 0 && count_ > 0; lines -= kLines) fetch();
    }

    // The last lines may lie past the end: fetching them does no harm, asking for each would cost more.
    void fetch() {
        if (count_ == 0) return;
        Stretch& now = stretches_[count_ - 1];
#pragma GCC unroll 32
        for (int line = 0; line < kLines; ++line) fetch_weights(now.begin + line * 16);
        now.begin += kLines * 16, now.size -= kLines * 16;
        if (now.size <= 0) --count_;
    }

   private:
    static constexpr int64_t kMost = 80 * 1024, kWorth = 2 * kMost;  // floats
    static constexpr int kLines = 32;
    Stretch stretches_[2];  // the last one comes first
    int count_ = 0;
};

// One execution. Planes are contiguous: channel c of x lies at x + c * area.
struct ConvCall {
    const float* x;
    const int* in;  // live input channels, ascending
    int n_in;
    const int* out;  // active filters, ascending
    int n_out;
    const float *factor, *bias;  // per filter: act(sum * factor + bias [+ residual])
    float* y;
    const float* residual;  // null, or laid out as y, and maybe y itself
    float* peak;            // null, or per filter: raised to the largest value this member wrote
    float* sum;             // null, or per filter, NaN before: that of a plane which was finished in one go
    float* room;            // room(threads) floats, shared by the team
    Upcoming* upcoming;     // this member's
};

class AbstractConv {
   public:
    virtual ~AbstractConv() = default;
    virtual int64_t room(int threads) const = 0;  // floats of scratch for a team
    virtual Stretch weights() const = 0;          // as they lie for `run`
    // Called by every member of a team with the same call. Returns the MACs this member walked: those of a direct conv,
    // padding taps included.
    virtual int64_t run(const ConvCall& call, const Member& member) const = 0;
};

// A way to run convs. `make` prepares one, with its weights in the arena if it lays them out anew; the op and the arena
// must outlive it.
struct ConvAlgorithm {
    const char* name;
    bool (*fits)(const Op& op, Shape x, Shape y);
    std::unique_ptr<AbstractConv> (*make)(const Kernels& kernels, const Op& op, Shape x, Shape y, Arena& arena);
};

// All there are, likely best first. The last, "ref", fits every conv and defines what the others must give.
const std::vector<ConvAlgorithm>& conv_algorithms();

// The names of those that fit an op.
std::vector<std::string> fitting_algorithms(const Op& op, Shape x, Shape y);

std::unique_ptr<AbstractConv> make_conv(const std::string& algorithm, const Kernels& kernels, const Op& op, Shape x,
                                        Shape y, Arena& arena);

}  // namespace cofire
