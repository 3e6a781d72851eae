// Kernels on bytes that have a file of their own; kernels8.h says what they do.
#pragma once

#include "kernels8.h"
#include "lanes.h"

namespace cofire {
namespace COFIRE_ISA {

void dot(const int8_t* const* w, int rows, const Run8* runs, int count, int64_t row, const uint8_t* const* x,
         int pixels, int32_t* sums);

}  // namespace COFIRE_ISA
}  // namespace cofire
