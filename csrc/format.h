// The versions of the program file, and what it may hold at most (docs/program.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace cofire {

inline constexpr int64_t kOldest = 1, kVersion = 3;  // of the format

// Limits keep every position that an engine computes along one axis below 2^23, and every map and window, padding
// included, within an int.
inline constexpr size_t kMaxHeader = size_t(64) << 20;    // bytes
inline constexpr int64_t kMaxSide = int64_t(1) << 20;     // channels, rows, columns, strides, ...
inline constexpr int64_t kMaxReach = int64_t(1) << 22;    // of a move's positions
inline constexpr int64_t kMaxBuffer = int64_t(1) << 28;   // floats of one buffer
inline constexpr int64_t kMaxBuffers = int64_t(1) << 30;  // floats of all buffers
inline constexpr size_t kMaxOps = 100000;
inline constexpr float kLeastScale = 0x1p-64f, kMostScale = 0x1p64f;  // the same for multipliers
inline constexpr size_t kMaxOutputs = 256;
inline constexpr size_t kMaxDigits = 8;  // of a strided op

}  // namespace cofire
