// What the timings of convs on floats and on bytes share.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/kernels8.h"
#include "limits.h"
#include "program.h"

namespace cofire {

constexpr double kMostTried = double(int64_t(1) << 32);  // steps of work: a conv that takes longer is not timed

double seconds_now();

// Every channel, or evenly spread ones.
std::vector<int> some(int n, double share);

// The share of filters and inputs that are on while a conv is timed.
double share_on(const Op& op);

// Reads what other ops would have read in between; returns a number that must be used.
float read_all(const std::vector<float>& flood);

// The number of the fastest of so many. They take turns, so that a busy machine hits all alike; the best try counts.
// When the time is over, what is known has to do.
size_t fastest(size_t count, const std::function<double(size_t)>& seconds, double deadline);

// The algorithms on bytes that fit a conv, the reference last; and those that may be chosen, the fastest first, or the
// likely best where the time is over.
std::vector<std::string> fitting_algorithms8(const Program& program, const Op& op);
std::vector<std::string> tuned_algorithms8(const Program& program, const Op& op, const Kernels8& kernels,
                                           const Limits& limits, const std::vector<float>& flood, double deadline);

}  // namespace cofire
