// Runs a program: batch in, outputs, masks and MAC counts out.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "limits.h"
#include "program.h"

namespace cofire {

// One call of an engine. Pointers may be null where the comment says so.
struct Call {
    const float* input;  // (batch, C, H, W)
    float* output;       // (batch, output_shape), and behind it the same of each further output
    int batch = 1;
    int threads = 1;
    float threshold = 0;
    const uint8_t* const* forced = nullptr;  // per group null or (batch, filters) of 0/1; null: gates decide
    bool heads = false;                      // evaluate heads also where masks are forced, e.g. to time them
    uint8_t* const* masks = nullptr;         // per group null or (batch, filters): the masks that ran; may be null
    float* const* logits = nullptr;  // per group null or (batch, filters); not written where forced; may be null
    int64_t* macs = nullptr;         // (batch, ops): executed MACs; may be null
    double* seconds = nullptr;       // (ops): time of each op, heads included, summed over the batch; may be null
};

// Holds the prepared weights. Calls may come from several threads at once; each borrows a workspace of its own, so that
// no call allocates once as many have run side by side before.
class Engine {
   public:
    // `kernel` is empty for the best kernels of this CPU, or names a set: "ref", "v2", "v3", ... Throws if it is not
    // there. `tuning` is what `tuning()` of an engine of the same program gave, or empty: then every conv is timed
    // here. Throws too if the program would cost more than the limits allow.
    explicit Engine(Program program, const std::string& kernel = "", const std::string& tuning = "",
                    const Limits& limits = {});
    ~Engine();

    void run(const Call& call) const;

    const Program& program() const;
    const std::string& kernel() const;  // name of the kernel set that runs
    std::string tuning() const;         // one word per op: the algorithm it runs with

   private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace cofire
