// A program (docs/program.md) in memory: parsed, checked, ready to run. Nothing here computes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "floats.h"

namespace cofire {

struct Shape {
    int c, h, w;
    int area() const { return h * w; }
    int64_t size() const { return int64_t(c) * h * w; }
    bool operator==(const Shape& other) const { return c == other.c && h == other.h && w == other.w; }
};

struct Pair {
    int h, w;
};

struct Padding {
    int top, left, bottom, right;
};

enum class Act {
    none,
    relu,
    relu6,
    leaky,
    silu,
    hardswish,
    sigmoid,
    hardsigmoid,
    gelu,
    gelu_tanh,
    elu,
    tanh,
    hardtanh,
    mish,
    softplus
};

// How a buffer's numbers lie: as float32 where the scale is 0, else as bytes q, each for scale * (q - zero).
struct Form {
    float scale = 0;
    int zero = 0;

    bool u8() const { return scale != 0; }
    bool operator==(const Form& other) const { return scale == other.scale && zero == other.zero; }
};

inline bool keeps_zero(Act act) { return act != Act::sigmoid && act != Act::hardsigmoid && act != Act::softplus; }

enum class Kind {
    conv,
    affine,
    act,
    add,
    mul,
    cat,
    move,
    pool,
    flatten,
    rescale,
    deconv,
    resample,
    strided,
    reduce,
    softmax,
    norm,
    conv8,
    quantize,
    dequantize
};

// Of channels: their sum, mean, maximum.
enum class Reduction { sum, avg, max };

// Over the channels of a group and space; over all channels at each position: mean and variance, only the mean square,
// only the length.
enum class Norm { group, layer, rms, l2 };

// Over space: the maximum, the mean, the mean of magnitudes, or all maxima and then all means.
enum class Pooling { max, avg, abs, both };

// Decides a group's mask from a buffer, right before the op it stands on.
struct Head {
    int source;  // the buffer: the op's src[0] unless the file names another
    Pooling pooling;
    bool softmax;         // over all that was pooled; a dead channel enters as 0
    int rows;             // as many as the group has filters, or one, which speaks for all
    int top;              // so many filters of each image are on; 0: those above the threshold
    bool scale;           // max(logit, 0) is a factor that the group's ops may use
    const float* weight;  // (rows, inputs)
    const float* bias;    // (rows), or null

    int inputs(Shape pooled) const { return pooling == Pooling::both ? 2 * pooled.c : pooled.c; }
};

struct Op {
    Kind kind;
    std::string name;
    std::vector<int> src;
    int dst;
    Act act = Act::none;
    float slope = 0;       // of leaky, elu, hardtanh
    int group = -1;        // of the output only the filters of this group's mask exist; -1: all
    bool decides = false;  // the group's mask is decided here, by `head`
    Head head{};
    // conv: (O, I / groups, kernel) and bias (O); affine: scale (C) and shift (C); rescale: shift (C), in `shift`
    const float* weight = nullptr;
    const float* bias = nullptr;
    const float* shift = nullptr;  // conv (O), or null: act(factor * (sum + bias) + shift), by the group's factors
    // conv and pool
    Pair kernel{1, 1}, stride{1, 1}, dilation{1, 1};  // move has a stride too
    Padding padding{0, 0, 0, 0};
    int groups = 1;
    bool residual = false;                                        // conv: src[1] is added before the activation
    bool lift = false;                                            // affine, rescale: zero does not stay zero
    bool maximum = false, include_pad = false, adaptive = false;  // pool
    std::vector<int> channels;                                    // move: source channel of each, -1 for zero
    Pair offset{0, 0};                                            // move
    std::vector<int> rows, columns;  // resample: the source's rows that each row is made of, as many for each
    // strided: element i, whose digits in the mixed radix `sizes` are d, is source[begin + sum of d * strides];
    // `channels` says from which channel each is, -1: from several
    std::vector<int> sizes, strides;
    int begin = 0;
    Reduction reduction = Reduction::sum;
    int ways = 1;  // softmax: over so many channels, that lie C / ways apart
    bool log = false;
    Norm norm = Norm::group;
    float epsilon = 0;
    // conv8: the same window, and what Quantized in conv8.h has
    const int8_t* weight8 = nullptr;
    const int32_t* bias8 = nullptr;
    const float* multiplier = nullptr;
    float residual_multiplier = 0;
    int low = 0, high = 255;
};

struct Group {
    std::string name;
    int filters;
};

// A buffer that the caller gets, in a shape of as many elements.
struct Output {
    int buffer;
    std::vector<int> shape;
};

// Owns the weights its ops point to. Not copied, only moved.
struct Program {
    int input = 0, output = 0;
    std::vector<int> output_shape;
    std::vector<Output> more_outputs;  // a caller gets them behind the first, each for the whole batch
    std::vector<Shape> buffers;
    std::vector<Form> forms;  // of the buffers
    std::vector<Group> groups;
    float threshold = 0;
    std::vector<Op> ops;
    Floats weights;  // all tensors; fixed in place once loaded

    // Floats that a caller gets for one image.
    int64_t output_size() const {
        int64_t size = buffers[size_t(output)].size();
        for (const Output& more : more_outputs) size += buffers[size_t(more.buffer)].size();
        return size;
    }

    Program() = default;
    Program(Program&&) = default;
    Program& operator=(Program&&) = default;
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;
};

// Parses and checks the bytes of a program file: whatever they are, the result is a program that runs without reading
// or writing out of bounds, or a std::runtime_error that says what is wrong and where. Never allocates more than a
// small multiple of `size` plus the buffers' stated sizes, which are limited.
Program load_program(const uint8_t* bytes, size_t size);

}  // namespace cofire
