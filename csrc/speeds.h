// What this CPU does at best, by the clock: what an op's time is held against.
#pragma once

#include <cstdint>
#include <string>

namespace cofire {

// Of one thread, per second.
struct Speeds {
    // of floats, of bytes, and of Winograd's 16 bits, by the inner loops of a kernel set on data in the nearest cache
    double macs, macs8, macs16;
    double bytes;  // read, of memory that is walked again and again
};

// `kernel` is a kernel set, "" or "ref" for the best; `bytes` is how much memory is walked. Some hundredths of a
// second.
Speeds measured_speeds(const std::string& kernel, int64_t bytes);

}  // namespace cofire
