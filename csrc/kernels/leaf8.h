// The inner loops on bytes. The rules of leaf.h hold here too.
//
// Sums take neighbouring channels together, in words of 32 bits: four bytes where the instruction set multiplies bytes,
// else two of 16 bits.
#pragma once

#include <cstdint>

namespace cofire {

constexpr int kSlack8 = 64;   // bytes of room after every array that a leaf walks
constexpr int kMaxRows8 = 8;  // the most that Leaf8::rows is

// Where the sums of some filters go: Quantized in conv8.h has the formula. Pointers are null where there is nothing.
struct Ending8 {
    int zero_out, low, high, zero_residual;
    float residual_multiplier;
    // of each filter
    int32_t start[kMaxRows8];  // added to the sum
    float multiplier[kMaxRows8];
    const uint8_t* residual[kMaxRows8];
    uint8_t* y[kMaxRows8];
    float* y_float[kMaxRows8];  // instead of y
    uint8_t* peak[kMaxRows8];
    int64_t* sum[kMaxRows8];
};

// The inputs of a gemm: word k of tap t of pixel i is x[at[t] + k * pitch + i].
struct Walk8 {
    const uint32_t* x;
    const int64_t* at;
    int taps, words;
    int64_t pitch;
};

// The microkernels on bytes of one instruction set.
struct Leaf8 {
    const char* name;
    int lanes;          // words in a vector
    int channels;       // that share a word: 4 or 2
    int rows, vectors;  // a tile of gemm: filters that a call takes at most, and vectors of pixels that they fit best

    // Words of n pixels: to[i] has pixel i * step of each of the planes, which are as many as share a word. Up to
    // `lanes` words more are written.
    void (*interleave)(const uint8_t* const* planes, int step, int n, uint32_t* to);

    // Words of the weights row[in[k]], k < n; the last is filled up with zeros. `on` has the bits of the same list, for
    // `inputs` inputs. Returns the sum of the weights. Up to kSlack8 bytes more are written.
    int32_t (*gather)(const int8_t* row, const int* in, int n, const uint64_t* on, int inputs, uint32_t* to);

    // The sums of `rows` filters over n pixels of a walk, finished. Their weights: w[r][t * words + k].
    void (*gemm)(const uint32_t* const* w, int rows, const Walk8& walk, int n, const Ending8& ending);

    // sums[r * count + i] = sum over k < n of w[r][k] * x[i * ldx + k]. Arrays end on whole cache lines, with zeros
    // behind the weights.
    void (*dot)(const int8_t* const* w, int rows, int n, const uint8_t* x, int64_t ldx, int count, int32_t* sums);

    // n sums of filter `row` of an ending, finished; null: sums of zero, and without the start.
    void (*finish)(const int32_t* sums, int n, const Ending8& ending, int row);
};

// The named set, or the best for this CPU if the name is empty; null if it is not there.
const Leaf8* find_leaf8(const char* name);

// The set that goes with the kernels of an engine: with "v4" it is "vnni" where the CPU has that.
const Leaf8* leaf8_of(const char* leaf);

}  // namespace cofire
