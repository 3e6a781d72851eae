// Which algorithm each conv of a program runs with.
#pragma once

#include <string>
#include <vector>

#include "conv.h"
#include "kernels/kernels.h"
#include "limits.h"
#include "program.h"

namespace cofire {

// One word per op, "-" where there is no choice to make. Convs are timed here, each shape once, with the weights out of
// the cache where the whole program's would not fit, until the limits' seconds are over: then the likely best has to
// do. An algorithm that would take too much memory, or is too inexact with a conv's own weights, is not chosen.
std::vector<std::string> tune(const Program& program, const Kernels& kernels, const Limits& limits);

// The largest error of an algorithm with a conv's own weights on random inputs, found on two pixels of every filter:
// against sums in float64, in units of the standard deviation that such sums have. NaN if one is not, or may well not
// be, finite.
double inexactness(const std::string& algorithm, const Kernels& kernels, const Op& op, Shape x, Shape y);
constexpr double kMostInexact = 5e-4;  // of an algorithm that may be chosen; docs/numerics.md

// The words of a text made from an earlier result; throws if they do not fit the program.
std::vector<std::string> parse_tuning(const Program& program, const std::string& text);

}  // namespace cofire
