// One image on its way through a program: its buffers, what is live in them, the masks; and every op but the convs'
// inner work.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "conv.h"
#include "conv8.h"
#include "engine.h"
#include "floats.h"
#include "head8.h"
#include "plan.h"

namespace cofire {

constexpr int kLaidOut = 8;  // floats that a weight may well become where convs lay it out anew

// What all images share: made once per engine, never changed afterwards.
struct Prepared {
    Program program;
    Plan plan;
    const Kernels& kernels;
    const Kernels8& kernels8;
    Arena arena;                                         // weights of the convs
    std::vector<std::unique_ptr<AbstractConv>> convs;    // per op; null where it is no conv
    std::vector<std::unique_ptr<AbstractConv8>> convs8;  // the same for those on bytes
    std::vector<Head8> heads8;                           // per op; empty: heads are walked in float32
    std::vector<std::vector<int>> head_rows;             // per op: rows of its head that are not zeros alone

    Prepared(Program given, const Kernels& set)
        : program(std::move(given)),
          plan(program),
          kernels(set),
          kernels8(*kernels8_of(set.name)),
          arena(kLaidOut * program.weights.size()) {}
    int64_t room(int threads) const;
    double bytes() const;                 // of one image on one thread, with the convs that are there
    int64_t op_room(const Op& op) const;  // scratch of one member for an op that is no conv
};

// What a conv on bytes needs to know.
Quantized quantized_of(const Program& program, const Op& op);

// Channels of a buffer that can be non-zero, or the filters of a group that are on.
struct Channels {
    std::vector<int> list;  // ascending, the first `count` are meant
    std::vector<uint8_t> on;
    int count = 0;

    explicit Channels(int n) : list(n), on(n) {}
    void set_all();
    void list_on();  // makes the list from `on`
};

class Image {
   public:
    Image(const Prepared& prepared, int threads);

    // Runs image `index` of a call. Every member of the team calls it; `seconds` and results are written by the first.
    void run(const Call& call, int index, const Member& member);

   private:
    void step(int number, const Call& call, int index, const Member& member);
    void conv(int number, const Member& member);
    void conv8(int number, const Member& member);
    void set_conv_live(const Op& op);
    void decide(int number, const Call& call, int index, const Member& member);
    void evaluate(int number, const Member& member);
    void multiply_rows(int number, const Member& member);
    void multiply_bytes(const Head8& head, const std::vector<int>& rows, const float* input, int inputs,
                        const Member& member);
    void pool_source(int number, const Member& member);
    void choose(const Op& op, float threshold);
    void set_factors(const Op& op, bool from_head);
    const float* rescaled_bias(const Op& op, const ConvCall& call, const Member& member);
    void keep_residual(int number, const Member& member);
    Upcoming after(int number) const;
    Stretch head_weights(int number) const;
    void clear_dead(int buffer, const int* channels, Range mine, const Member& member);
    void merge_peaks(int buffer, const Member& member);
    void affine(const Op& op, int c);
    void rescale(const Op& op, int c);
    void combine(const Op& op, int c);
    template <class T>
    void move(const Op& op, int c, T zero);
    void quantize(const Op& op, int c);
    void dequantize(const Op& op, int c);
    void pool(const Op& op, int c, float* line);
    void pool8(const Op& op, int c, float* line);
    void max_pool(const Op& op, const float* x, float* y, float* line);
    void resample(const Op& op, int c, float* line);
    void stride_along(const Op& op, int c);
    void reduce(const Op& op, int c);
    void softmax(const Op& op, const Member& member);
    void normalise(const Op& op, const Member& member);
    void normalise_group(const Op& op, int group);
    void normalise_positions(const Op& op, int begin, int count);
    void deconv(int number, float* room, const Member& member);
    void max_pool8(const Op& op, const uint8_t* x, uint8_t* y, uint8_t* line);
    float largest8(int buffer, int c);
    float mean8(int buffer, int c, bool magnitudes);
    template <class T>
    void copy_cat(const Op& op, const Member& member);
    void set_live(const Op& op);
    void give_output(const Call& call, int index, const Member& member);
    void give_buffer(int buffer, float* to, const Member& member);
    int64_t& macs(int number, int thread);

    template <class T>
    T* plane_of(int buffer, int c) {
        return reinterpret_cast<T*>(buffers_ + prepared_.plan.offsets[buffer]) + int64_t(c) * shape(buffer).area();
    }
    float* plane(int buffer, int c) { return plane_of<float>(buffer, c); }
    uint8_t* plane8(int buffer, int c) { return plane_of<uint8_t>(buffer, c); }
    const Form& form(int buffer) const { return prepared_.program.forms[buffer]; }
    Shape shape(int buffer) const { return prepared_.program.buffers[buffer]; }
    float* peaks(int buffer, int thread) {
        return peaks_.data() + peak_offsets_[buffer] + int64_t(thread) * shape(buffer).c;
    }

    float* sums(int buffer) { return sums_.data() + sum_offsets_[buffer]; }

    const Prepared& prepared_;
    const int64_t wide_;  // floats for two numbers per channel
    Arena arena_;
    float *const buffers_, *const room_, *const pooled_, *const softmax_;
    uint8_t* const numbers_;  // of the inputs of a head in bytes
    float *const logits_, *const biases_;
    std::vector<float> peaks_, sums_;                         // sums_: NaN where nobody took it
    std::vector<int64_t> peak_offsets_, sum_offsets_, macs_;  // macs_: per member, of this op and the one before
    std::vector<Channels> live_, masks_;                      // per buffer, per group
    std::vector<std::vector<float>> factors_;                 // per group; empty if its head gives none
    std::vector<int> all_;                                    // 0, 1, 2, ...
    std::vector<float> ones_;
};

}  // namespace cofire
