// What a program may cost. Small file, small cost: whoever wants more says so.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "program.h"

namespace cofire {

struct TooCostly : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Limits {
    int64_t memory = int64_t(1) << 29;  // bytes that one image takes on one thread: buffers and scratch
    double work = 0;                    // see work_of; 0: default_work(program)
    double tuning_seconds = -1;         // for timing convs; 0: none is timed; negative: default_tuning(program)
};

// How long one image takes, in steps of which a core makes some 2^34 in a second: a MAC of a conv is one, an element
// that another op reads or writes is 16. Convs count what their inner loops walk: lines with their gaps, in whole
// vectors.
double work_of(const Op& op, const Program& program);

// A second, and four microseconds for each weight.
double default_work(const Program& program);

// A second, and a fifth of one for each megabyte of weights.
double default_tuning(const Program& program);

// Throws TooCostly if one image would take more work than the limit.
void check_work(const Program& program, const Limits& limits);

// Throws TooCostly if one image would take more memory, in bytes, than the limit.
void check_memory(double bytes, const Limits& limits);

}  // namespace cofire
