// How many floats or words a vector of this instruction set has.
#pragma once

#ifndef COFIRE_ISA
#error "COFIRE_ISA names the namespace of the instruction set, e.g. v3"
#endif

namespace cofire {
namespace COFIRE_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

}  // namespace COFIRE_ISA
}  // namespace cofire
