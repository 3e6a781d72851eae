// Which algorithm each conv of a program runs with.
#pragma once

#include <string>
#include <vector>

#include "kernels/leaf.h"
#include "program.h"

namespace cofire {

// One word per op, "-" where there is no choice to make. Convs are timed here, each shape once, with the weights out of
// the cache where the whole program's would not fit.
std::vector<std::string> tune(const Program& program, const Leaf& leaf);

// The words of a text made from an earlier result; throws if they do not fit the program.
std::vector<std::string> parse_tuning(const Program& program, const std::string& text);

}  // namespace cofire
