// What Zen 5 likes better than Zen 3 and Zen 4 do, found by measuring. CPUs that were not measured are taken for these.
#pragma once

#include "kernels/kernels.h"

namespace cofire {

extern bool is_zen5;  // in cpu.cpp: whether this CPU is one; only tests turn it over

// Asks for weights before they are needed: they come from far away. Zen 5 does as good as nothing where a hint asks for
// the second cache, and gets 40 GB/s instead of 17 where it asks for the nearest. On Zen 4 the nearest cache waits for
// too few lines at a time, and loses what it had. Static: inner loops are compiled for several instruction sets.
template <bool Zen5>
static inline void fetch_weights(const void* p) {
    __builtin_prefetch(p, 0, Zen5 ? 3 : 2);
}
static inline void fetch_weights(const void* p) { is_zen5 ? fetch_weights<true>(p) : fetch_weights<false>(p); }

// Filters that gemm takes best at a time for n pixels. Of a single vector of sums each, Zen 5 needs more to keep both
// of its multipliers busy; on Zen 4 their addresses take more registers than there are.
static inline int best_rows(const Kernels& kernels, int n) {
    return n > kernels.lanes || is_zen5 || kernels.rows < 6 ? kernels.rows : 6;
}

}  // namespace cofire
