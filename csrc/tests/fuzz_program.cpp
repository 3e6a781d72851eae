// Feeds load_program with broken files: `fuzz_program N [seed]`. A case may load or be refused with a
// std::runtime_error; anything else (a crash, another exception, much memory, a program that is not well formed) ends
// the process with code 1 and the number of the case, which `fuzz_program 1 seed case` repeats.
//
// With -DCOFIRE_FUZZ_RUN (and the engine linked), what loads is run as well: by the reference, and by this CPU's
// kernels with algorithms chosen at random.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <new>
#include <stdexcept>
#include <string>

#include "../program.h"
#include "build_program.h"
#ifdef COFIRE_FUZZ_RUN
#include "../conv.h"
#include "../engine.h"
#include "../trials.h"
#endif

namespace {

size_t allocated = 0;  // bytes, since last set to 0

}  // namespace

// They count; the sanitizers still see malloc and free. Not inlined, or GCC 12 takes them for a mismatched pair.
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
    allocated += size;
    return std::malloc(size > 0 ? size : 1);
}
[[gnu::noinline]] void* operator new(size_t size) {
    if (void* memory = operator new(size, std::nothrow)) return memory;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace cofire::test {
namespace {

// Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014).
class SplitMix {
   public:
    explicit SplitMix(uint64_t seed) : state_(seed) {}

    uint64_t next() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
        z = (z ^ z >> 27) * 0x94D049BB133111EB;
        return z ^ z >> 31;
    }

    size_t below(size_t end) { return end == 0 ? 0 : size_t(next() % end); }

   private:
    uint64_t state_;
};

// ---- Mutations ----

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Where a run of characters that `belongs` accepts begins and ends, looking from a random place on; empty if there is
// none.
template <typename Belongs>
std::pair<size_t, size_t> random_run(const std::string& text, SplitMix* random, Belongs belongs) {
    size_t begin = random->below(text.size());
    while (begin < text.size() && !belongs(text[begin])) ++begin;
    while (begin > 0 && begin < text.size() && belongs(text[begin - 1])) --begin;
    size_t end = begin;
    while (end < text.size() && belongs(text[end])) ++end;
    return {begin, end - begin};
}

void edit_number(std::string* text, SplitMix* random) {
    static const char* const kNumbers[] = {"0",
                                           "1",
                                           "2",
                                           "3",
                                           "4",
                                           "5",
                                           "6",
                                           "7",
                                           "8",
                                           "16",
                                           "31",
                                           "64",
                                           "255",
                                           "1048575",
                                           "1048576",
                                           "1048577",
                                           "268435456",
                                           "2147483647",
                                           "-1",
                                           "-2",
                                           "0.5",
                                           "-1048577",
                                           "1e400",
                                           "2147483648",
                                           "4294967295",
                                           "4294967296",
                                           "4294967297",
                                           "1e3",
                                           "-0.0",
                                           "1e-40",
                                           "3.4e38",
                                           "16777217",
                                           "1e18",
                                           "4611686018427387904",
                                           "18446744073709551616"};
    const auto [begin, length] = random_run(*text, random, is_digit);
    if (length == 0) return;
    const size_t how = random->below(3);
    if (how == 0) {
        text->replace(begin, length, kNumbers[random->below(std::size(kNumbers))]);
    } else if (how == 1) {  // one digit
        (*text)[begin + random->below(length)] = char('0' + random->below(10));
    } else if (length < 10) {  // a neighbour
        const int64_t value = std::stoll(text->substr(begin, length)) + int64_t(random->below(5)) - 2;
        text->replace(begin, length, std::to_string(value));
    }
}

// Swaps two words: keys, names, kinds, literals.
void swap_words(std::string* text, SplitMix* random) {
    auto is_word = [](char c) { return (c >= 'a' && c <= 'z') || c == '_' || c == '.' || is_digit(c); };
    auto first = random_run(*text, random, is_word), second = random_run(*text, random, is_word);
    if (first.first > second.first) std::swap(first, second);
    if (first.first + first.second > second.first) return;
    const std::string a = text->substr(first.first, first.second), b = text->substr(second.first, second.second);
    text->replace(second.first, b.size(), a);
    text->replace(first.first, a.size(), b);
}

// Replaces a word by one of the format's own.
void edit_word(std::string* text, SplitMix* random) {
    static const char* const kWords[] = {
        "conv",     "affine",     "act",    "add",     "mul",     "cat",     "move",        "pool",   "flatten",
        "none",     "relu",       "leaky",  "silu",    "sigmoid", "true",    "false",       "null",   "hardsigmoid",
        "max",      "avg",        "F32",    "version", "head",    "softmax", "stem.weight", "kernel", "[]",
        "{}",       "rescale",    "abs",    "both",    "top",     "scale",   "src",         "shift",  "conv8",
        "quantize", "dequantize", "quants", "zero",    "low",     "high",    "I8",          "I32"};
    const auto [begin, length] = random_run(*text, random, [](char c) { return (c >= 'a' && c <= 'z') || c == '.'; });
    if (length > 0) text->replace(begin, length, kWords[random->below(std::size(kWords))]);
}

void edit_bytes(std::string* text, SplitMix* random) {
    static constexpr char kSyntax[] = "{}[]:,\"\\ -.0e";
    static const char* const kSnippets[] = {
        "\\u00e9",          "\\ud83d\\ude00", "\\ud83d",  "\\u0000",  "\\\\u20ac", "\\n",
        "\xF0\x9F\x98\x80", "\xC3\xA9",       "\xE2\x82", "[[[[[[[[", "\"x\":0,",  "[0],"};
    const size_t at = random->below(text->size() + 1);
    const size_t length = std::min(1 + random->below(random->below(2) ? 4 : 64), text->size() - at);
    switch (random->below(8)) {
        case 0:  // flip a bit
            if (at < text->size()) (*text)[at] = char((*text)[at] ^ (1 << random->below(8)));
            return;
        case 1:
            text->insert(at, 1, kSyntax[random->below(sizeof kSyntax - 1)]);
            return;
        case 2:
            text->insert(at, 1, char(random->next()));
            return;
        case 3:
            text->erase(at, length);
            return;
        case 4:  // a chunk once more, here or elsewhere
            text->insert(random->below(2) ? at : random->below(text->size() + 1), text->substr(at, length));
            return;
        case 5:
            if (at < text->size()) (*text)[at] = kSyntax[random->below(sizeof kSyntax - 1)];
            return;
        case 6:
            text->insert(at, kSnippets[random->below(std::size(kSnippets))]);
            return;
        default:
            if (random->below(4) == 0) text->resize(at);
            return;
    }
}

void mutate(std::string* text, SplitMix* random) {
    switch (random->below(8)) {
        case 0:
        case 1:
        case 2:
        case 3:
            return edit_number(text, random);
        case 4:
            return swap_words(text, random);
        case 5:
            return edit_word(text, random);
        default:
            return edit_bytes(text, random);
    }
}

// Writes the digest that the data now has where the header states one.
void fix_digest(std::string* header, const std::string& data) {
    const std::string before = "sha256\\\":\\\"";
    const size_t at = header->find(before);
    if (at == std::string::npos) return;
    size_t end = at + before.size();
    while (end < header->size() && (is_digit((*header)[end]) || ((*header)[end] >= 'a' && (*header)[end] <= 'f')))
        ++end;
    header->replace(at + before.size(), end - at - before.size(),
                    sha256(reinterpret_cast<const uint8_t*>(data.data()), data.size()));
}

// A valid file in its parts.
struct Seed {
    std::string header, data;
};

std::string file_of(const Seed& seed) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes.push_back(char(uint64_t(seed.header.size()) >> 8 * i));
    return bytes + seed.header + seed.data;
}

// One broken file. Half of them have a right length and a right digest, so that what is wrong lies deeper.
std::string broken_file(const std::vector<Seed>& seeds, SplitMix* random) {
    Seed seed = seeds[random->below(seeds.size())];
    const bool fixed = random->below(2) == 0;
    std::string bytes = fixed ? "" : file_of(seed);
    for (size_t left = 1 + random->below(8); left > 0; --left)
        mutate(!fixed ? &bytes : random->below(8) == 0 ? &seed.data : &seed.header, random);
    if (!fixed) return bytes;
    fix_digest(&seed.header, seed.data);
    return file_of(seed);
}

// ---- What must hold for a program that loads ----

// Written without a look at the loader: what an engine touches, element by element where that is cheap.
class WellFormed {
   public:
    explicit WellFormed(const Program& program) : program_(program) {}

    const char* problem() {
        written_.assign(program_.buffers.size(), false);
        decided_.assign(program_.groups.size(), false);
        scaled_.assign(program_.groups.size(), false);
        if (!is_buffer(program_.input) || !is_buffer(program_.output) || program_.ops.empty())
            return "input, output, ops";
        for (const Shape& shape : program_.buffers)
            if (shape.c < 1 || shape.h < 1 || shape.w < 1 || shape.size() > (1 << 28)) return "buffer";
        if (!std::isfinite(program_.threshold)) return "threshold";
        if (program_.forms.size() != program_.buffers.size()) return "forms";
        if (form(program_.input).u8() || form(program_.output).u8()) return "bytes for the caller";
        for (const Form& form : program_.forms)
            if (!std::isfinite(form.scale) || form.scale < 0 || form.zero < 0 || form.zero > 255) return "form";
        int64_t shown = 1;
        for (int side : program_.output_shape) shown *= side;
        if (shown != shape(program_.output).size()) return "output_shape";
        for (const Output& more : program_.more_outputs) {
            int64_t size = 1;
            for (int side : more.shape) size *= side;
            if (!is_buffer(more.buffer) || size != shape(more.buffer).size()) return "more outputs";
        }
        written_[size_t(program_.input)] = true;
        for (const Op& op : program_.ops)
            if (const char* what = problem(op)) return what;
        for (bool written : written_)
            if (!written) return "unwritten buffer";
        for (bool decided : decided_)
            if (!decided) return "undecided group";
        return nullptr;
    }

   private:
    bool is_buffer(int i) const { return i >= 0 && size_t(i) < program_.buffers.size(); }
    const Shape& shape(int i) const { return program_.buffers[size_t(i)]; }
    const Form& form(int i) const { return program_.forms[size_t(i)]; }

    template <class T>
    bool inside(const T* tensor, int64_t count) const {
        const T *begin = reinterpret_cast<const T*>(program_.weights.data()),
                *end = reinterpret_cast<const T*>(program_.weights.data() + program_.weights.size());
        return tensor != nullptr && tensor >= begin && tensor + count <= end &&
               reinterpret_cast<uintptr_t>(tensor) % alignof(T) == 0;
    }

    const char* problem(const Op& op) {
        if (!is_buffer(op.dst) || op.src.empty() || op.dst == program_.input) return "dst";
        bool read = false;
        for (int i : op.src) {
            if (!is_buffer(i) || !written_[size_t(i)]) return "src";
            read |= i == op.dst;
        }
        const bool convolves = op.kind == Kind::conv || op.kind == Kind::conv8;
        const bool in_place = convolves && op.residual && op.src[1] == op.dst && op.src[0] != op.dst;
        if (!in_place && (read || written_[size_t(op.dst)])) return "dst is written twice or while it is read";
        if (const char* what = problem_of_kind(op)) return what;
        if (const char* what = problem_of_gate(op)) return what;
        written_[size_t(op.dst)] = true;
        return nullptr;
    }

    const char* problem_of_gate(const Op& op) {
        if (op.group < 0) return op.decides || op.shift != nullptr ? "head or shift without a gate" : nullptr;
        if (size_t(op.group) >= program_.groups.size()) return "group";
        const int filters = program_.groups[size_t(op.group)].filters;
        if (filters != shape(op.dst).c || decided_[size_t(op.group)] == op.decides) return "gate";
        if (op.decides) {
            if (const char* what = problem_of_head(op.head, filters)) return what;
            scaled_[size_t(op.group)] = op.head.scale;
        }
        decided_[size_t(op.group)] = true;
        return op.shift != nullptr && !scaled_[size_t(op.group)] ? "no factors" : nullptr;
    }

    const char* problem_of_head(const Head& head, int filters) const {
        if (!is_buffer(head.source) || !written_[size_t(head.source)]) return "head's source";
        if (head.rows != filters && (head.rows != 1 || head.top != 0)) return "head's rows";
        if (head.top < 0 || head.top > filters) return "head's top";
        const int64_t inputs = int64_t(shape(head.source).c) * (head.pooling == Pooling::both ? 2 : 1);
        if (!inside(head.weight, head.rows * inputs)) return "head's weight";
        return head.bias != nullptr && !inside(head.bias, head.rows) ? "head's bias" : nullptr;
    }

    const char* problem_of_kind(const Op& op) const {
        const Shape &src = shape(op.src[0]), &dst = shape(op.dst);
        const bool convolves = op.kind == Kind::conv || op.kind == Kind::conv8;
        const size_t sources = convolves                                      ? 1 + size_t(op.residual)
                               : op.kind == Kind::cat                         ? op.src.size()
                               : op.kind == Kind::add || op.kind == Kind::mul ? 2
                                                                              : 1;
        if (op.src.size() != sources) return "number of src";
        switch (op.kind) {
            case Kind::conv8:
                if (const char* what = problem_of_bytes(op, src, dst)) return what;
                return problem_of_conv(op, src, dst);
            case Kind::quantize:
                return src == dst && !form(op.src[0]).u8() && form(op.dst).u8() ? nullptr : "quantize";
            case Kind::dequantize:
                return src == dst && form(op.src[0]).u8() && !form(op.dst).u8() ? nullptr : "dequantize";
            case Kind::conv:
                return problem_of_conv(op, src, dst);
            case Kind::affine:
                return src == dst && inside(op.weight, src.c) && inside(op.bias, src.c) ? nullptr : "affine";
            case Kind::act:
                return src == dst ? nullptr : "act";
            case Kind::add:
            case Kind::mul: {
                const Shape& other = shape(op.src[1]);
                return src == dst && (other == src || other == Shape{src.c, 1, 1}) ? nullptr : "add or mul";
            }
            case Kind::cat: {
                int64_t total = 0;
                for (int i : op.src) total += shape(i).size();
                return total == dst.size() && src.h == dst.h && src.w == dst.w ? nullptr : "cat";
            }
            case Kind::move:
                return problem_of_move(op, src, dst);
            case Kind::pool:
                return problem_of_pool(op, src, dst);
            case Kind::flatten:
                return dst.c == src.size() && dst.area() == 1 ? nullptr : "flatten";
            case Kind::rescale:
                return src == dst && op.lift && inside(op.shift, src.c) ? nullptr : "rescale";
            case Kind::deconv:
                return problem_of_deconv(op, src, dst);
            case Kind::resample:
                return problem_of_resample(op, src, dst);
            case Kind::strided:
                return problem_of_strided(op, src, dst);
            case Kind::reduce:
                return src.c % dst.c == 0 && src.area() == dst.area() ? nullptr : "reduce";
            case Kind::softmax:
                return src == dst && op.ways >= 1 && src.c % op.ways == 0 ? nullptr : "softmax";
            case Kind::norm:
                return src == dst && op.groups >= 1 && src.c % op.groups == 0 && op.epsilon > 0 &&
                               inside(op.weight, src.c) && inside(op.bias, src.c)
                           ? nullptr
                           : "norm";
        }
        return "kind";
    }

    const char* problem_of_bytes(const Op& op, const Shape& src, const Shape& dst) const {
        const int64_t taps = int64_t(op.kernel.h) * op.kernel.w;
        if (!inside(op.weight8, taps * dst.c * (src.c / op.groups)) || !inside(op.bias8, dst.c) ||
            !inside(op.multiplier, dst.c))
            return "weights on bytes";
        if (op.low < 0 || op.low > op.high || op.high > 255) return "clamp";
        for (int i : op.src)
            if (!form(i).u8()) return "floats in place of bytes";
        return nullptr;
    }

    const char* problem_of_conv(const Op& op, const Shape& src, const Shape& dst) const {
        if (op.groups < 1 || src.c % op.groups != 0 || dst.c % op.groups != 0) return "groups";
        if (op.kernel.h < 1 || op.kernel.w < 1 || op.stride.h < 1 || op.stride.w < 1) return "kernel or stride";
        if (op.residual && !(shape(op.src[1]) == dst)) return "residual";
        const int64_t taps = int64_t(op.kernel.h) * op.kernel.w;
        if (op.kind == Kind::conv &&
            (!inside(op.weight, taps * dst.c * (src.c / op.groups)) || !inside(op.bias, dst.c)))
            return "weights";
        if (op.shift != nullptr && !inside(op.shift, dst.c)) return "shift";
        // The last window ends inside the padded map; one more would not.
        auto fits = [](int64_t size, int64_t out, int64_t kernel, int64_t stride, int64_t dilation) {
            const int64_t end = (out - 1) * stride + (kernel - 1) * dilation + 1;
            return end <= size && end + stride > size && dilation >= 1;
        };
        const Padding& p = op.padding;
        if (p.top < 0 || p.left < 0 || p.bottom < 0 || p.right < 0) return "padding";
        if (double(src.c) * (src.h + p.top + p.bottom) * (src.w + p.left + p.right) > (1 << 28)) return "padded map";
        if (double(op.stride.h) * op.stride.w > (1 << 28) || double(op.dilation.h) * op.dilation.w > (1 << 28))
            return "steps";
        if (!fits(int64_t(src.h) + p.top + p.bottom, dst.h, op.kernel.h, op.stride.h, op.dilation.h)) return "height";
        if (!fits(int64_t(src.w) + p.left + p.right, dst.w, op.kernel.w, op.stride.w, op.dilation.w)) return "width";
        return nullptr;
    }

    const char* problem_of_deconv(const Op& op, const Shape& src, const Shape& dst) const {
        if (op.groups < 1 || src.c % op.groups != 0 || dst.c % op.groups != 0) return "groups";
        if (op.kernel.h < 1 || op.kernel.w < 1 || op.stride.h < 1 || op.stride.w < 1) return "kernel or stride";
        const int64_t taps = int64_t(op.kernel.h) * op.kernel.w;
        return inside(op.weight, taps * src.c * (dst.c / op.groups)) && inside(op.bias, dst.c) ? nullptr : "weights";
    }

    const char* problem_of_resample(const Op& op, const Shape& src, const Shape& dst) const {
        const int64_t rows = int64_t(op.rows.size()), columns = int64_t(op.columns.size());
        if (src.c != dst.c || rows < 1 || columns < 1 || rows % dst.h != 0 || columns % dst.w != 0) return "resample";
        for (int row : op.rows)
            if (row < 0 || row >= src.h) return "resample's rows";
        for (int column : op.columns)
            if (column < 0 || column >= src.w) return "resample's columns";
        return inside(op.weight, rows) && inside(op.bias, columns) ? nullptr : "resample's weights";
    }

    const char* problem_of_strided(const Op& op, const Shape& src, const Shape& dst) const {
        if (op.sizes.size() != op.strides.size() || op.sizes.size() > 8) return "digits";
        if (op.channels.size() != size_t(dst.c)) return "strided's channels";
        int64_t low = op.begin, high = op.begin, count = 1;
        for (size_t i = 0; i < op.sizes.size(); ++i) {
            const int64_t far = int64_t(op.sizes[i] - 1) * op.strides[i];
            (far < 0 ? low : high) += far;
            count *= op.sizes[i];
        }
        for (int channel : op.channels)
            if (channel < -1 || channel >= src.c) return "strided's channels";
        return low >= 0 && high < src.size() && count == dst.size() ? nullptr : "strided's reach";
    }

    const char* problem_of_move(const Op& op, const Shape& src, const Shape& dst) const {
        if (op.channels.size() != size_t(dst.c) || op.stride.h < 1 || op.stride.w < 1) return "move";
        for (int channel : op.channels)
            if (channel < -1 || channel >= src.c) return "move's channels";
        auto reach = [](int64_t out, int64_t stride, int64_t offset) { return (out - 1) * stride + std::abs(offset); };
        const bool near =
            reach(dst.h, op.stride.h, op.offset.h) < (1 << 30) && reach(dst.w, op.stride.w, op.offset.w) < (1 << 30);
        return near ? nullptr : "move's reach";
    }

    const char* problem_of_pool(const Op& op, const Shape& src, const Shape& dst) const {
        if (src.c != dst.c) return "pool's channels";
        if (op.adaptive) return nullptr;
        auto filled = [](int64_t size, int64_t out, int64_t kernel, int64_t stride, int64_t before, int64_t dilation) {
            if (out * kernel > 1000000) return true;  // too much to walk
            for (int64_t i = 0; i < out; ++i) {
                bool any = false;
                for (int64_t tap = 0; tap < kernel && !any; ++tap) {
                    const int64_t at = i * stride - before + tap * dilation;
                    any = at >= 0 && at < size;
                }
                if (!any) return false;
            }
            return true;
        };
        return filled(src.h, dst.h, op.kernel.h, op.stride.h, op.padding.top, op.dilation.h) &&
                       filled(src.w, dst.w, op.kernel.w, op.stride.w, op.padding.left, op.dilation.w)
                   ? nullptr
                   : "empty window";
    }

    const Program& program_;
    std::vector<bool> written_, decided_, scaled_;
};

#ifdef COFIRE_FUZZ_RUN

// Work that is cheap enough to run for every case.
bool is_small(const Program& program) {
    double floats = 0, work = double(program.weights.size());
    for (const Shape& shape : program.buffers) floats += double(shape.size());
    for (const Op& op : program.ops) {
        const Padding& p = op.padding;
        const double taps = double(op.kernel.h) * op.kernel.w, dst = double(program.buffers[size_t(op.dst)].size());
        work += dst * taps * program.buffers[size_t(op.src[0])].c + double(p.top) + p.left + p.bottom + p.right;
    }
    return floats < (1 << 14) && work < (1 << 20);
}

// An algorithm for each conv, of those that can run it; over many cases, every one of them. Timing would take too long.
std::string random_tuning(const Program& program, SplitMix* random) {
    std::string text;
    for (const Op& op : program.ops) {
        std::vector<std::string> can{"-"};
        if (op.kind == Kind::conv)
            can = fitting_algorithms(op, program.buffers[size_t(op.src[0])], program.buffers[size_t(op.dst)]);
        if (op.kind == Kind::conv8) can = fitting_algorithms8(program, op);
        text += (text.empty() ? "" : " ") + can[random->below(can.size())];
    }
    return text;
}

void run(Program program, const char* kernel, const std::string& tuning) {
    const float threshold = program.threshold;
    const std::vector<float> input(size_t(program.buffers[size_t(program.input)].size()));
    std::vector<float> output(size_t(program.output_size()));
    const Engine engine(std::move(program), kernel, tuning);
    Call call{};
    call.input = input.data();
    call.output = output.data();
    call.threshold = threshold;
    engine.run(call);
}

#endif

// ---- The loop ----

struct Tally {
    int64_t loaded = 0, refused = 0;
    double most_memory = 0;  // allocated by one load, per byte of a file plus a kilobyte for the message
    double slowest = 0;      // CPU seconds of one load
};

double cpu_seconds() { return double(std::clock()) / CLOCKS_PER_SEC; }

// Loads `bytes` into `program`, or returns false if they are refused.
bool load(const std::string& bytes, Program* program) {
    try {
        *program = load_program(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
        return true;
    } catch (const std::runtime_error& error) {
        // Other errors of this type, such as that of a system call, are not the loader's.
        if (std::string(error.what()).rfind("invalid program file: ", 0) != 0) throw;
        return false;
    }
}

// Throws if anything is wrong with this case.
void try_case(const std::string& bytes, SplitMix* random, Tally* tally) {
    Program program;
    const double start = cpu_seconds();
    allocated = 0;
    const bool loaded = load(bytes, &program);
    const size_t memory = allocated;
    tally->slowest = std::max(tally->slowest, cpu_seconds() - start);
    tally->most_memory = std::max(tally->most_memory, double(memory) / double(bytes.size() + 1024));
    if (memory > 64 * bytes.size() + 65536) throw std::logic_error("allocated " + std::to_string(memory) + " bytes");
    ++(loaded ? tally->loaded : tally->refused);
    if (!loaded) return;
    if (const char* what = WellFormed(program).problem())
        throw std::logic_error(std::string("not well formed: ") + what);
#ifdef COFIRE_FUZZ_RUN
    if (!is_small(program)) return;
    const std::string tuning = random_tuning(program, random);
    run(std::move(program), "", tuning);
    load(bytes, &program);  // once more, for an engine keeps what it is given
    run(std::move(program), "ref", "");
#else
    (void)random;
#endif
}

std::vector<Seed> valid_files() {
    std::vector<Seed> seeds;
    for (const Source& net :
         {residual_net(), elementwise_net(), depthwise_net(), policy_net(), maps_net(), quantized_net()}) {
        const std::vector<uint8_t> data = data_of(net);
        seeds.push_back({header_of(program_of(net), net.tensors), std::string(data.begin(), data.end())});
    }
    return seeds;
}

void fuzz(int64_t count, uint64_t seed, int64_t first) {
    const std::vector<Seed> seeds = valid_files();
    Tally tally;
    SplitMix any(seed);
    for (const Seed& valid : seeds) try_case(file_of(valid), &any, &tally);
    if (tally.refused > 0) throw std::logic_error("a valid file is refused");
    tally = {};
    const double start = cpu_seconds();
    for (int64_t i = first; i < first + count; ++i) {
        SplitMix random(SplitMix(seed).next() + uint64_t(i));  // of its own, so that a case can be repeated alone
        try {
            try_case(broken_file(seeds, &random), &random, &tally);
        } catch (const std::exception& error) {
            throw std::logic_error("case " + std::to_string(i) + ": " + error.what());
        }
    }
    const double seconds = cpu_seconds() - start;
    std::printf(
        "%lld loaded, %lld refused, %.0f per CPU second; slowest load %.3f ms, most memory %.0f bytes per byte\n",
        static_cast<long long>(tally.loaded), static_cast<long long>(tally.refused), double(count) / seconds,
        1e3 * tally.slowest, tally.most_memory);
}

}  // namespace
}  // namespace cofire::test

int main(int argc, char** argv) {
    const int64_t count = argc > 1 ? std::atoll(argv[1]) : 0;
    if (count < 1) {
        std::printf("usage: fuzz_program N [seed [first case]]\n");
        return 2;
    }
    try {
        cofire::test::fuzz(count, argc > 2 ? uint64_t(std::atoll(argv[2])) : 0, argc > 3 ? std::atoll(argv[3]) : 0);
    } catch (const std::exception& error) {
        std::printf("%s\n", error.what());
        return 1;
    }
}
