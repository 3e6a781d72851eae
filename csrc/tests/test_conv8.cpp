// Every algorithm of every kernel set for convs on bytes against the reference, bit for bit: the layers of the
// backbones and ragged ones, with masks of all kinds, by one thread and by two. All arrays lie on the heap, exactly as
// large as they must be: meant for the sanitizers too. Exit code 0 if all is well.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "../conv8.h"

namespace cofire::test {
namespace {

int failures = 0, cases = 0;

class Numbers {
   public:
    explicit Numbers(uint32_t seed) : state_(seed * 2654435761u + 1) {}

    // In [low, high].
    int in(int low, int high) {
        state_ = state_ * 1664525u + 1013904223u;
        return low + int(uint64_t(state_ >> 8) * uint64_t(high - low + 1) >> 24);
    }
    bool coin() { return in(0, 1) == 1; }

    template <class T>
    std::vector<T> list(int64_t n, int low, int high) {
        std::vector<T> found(n);
        for (T& value : found) value = T(in(low, high));
        return found;
    }

   private:
    uint32_t state_;
};

// ---- Layers

struct Layer {
    Shape x;
    int filters, kernel, stride, padding, groups = 1, dilation = 1, kernel_w = 0;

    Op op() const {
        Op op{};
        op.kind = Kind::conv, op.name = "conv";
        op.kernel = {kernel, kernel_w ? kernel_w : kernel}, op.stride = {stride, stride};
        op.dilation = {dilation, dilation}, op.padding = {padding, padding, padding, padding}, op.groups = groups;
        return op;
    }
    Shape y() const {
        const auto side = [&](int n, int k) { return (n + 2 * padding - dilation * (k - 1) - 1) / stride + 1; };
        return {filters, side(x.h, kernel), side(x.w, kernel_w ? kernel_w : kernel)};
    }
    std::string text() const {
        char text[120];
        std::snprintf(text, sizeof text, "%dx%dx%d to %d, k%d/%d s%d p%d g%d d%d", x.c, x.h, x.w, filters, kernel,
                      kernel_w, stride, padding, groups, dilation);
        return text;
    }
};

// Those of ResNet-20, -56, -18 and -34, VGG16 and MobileNetV1.
std::vector<Layer> backbone_layers() {
    std::vector<Layer> all;
    const auto block = [&](int channels, int side, int filters, int stride) {
        all.push_back({{channels, side, side}, filters, 3, stride, 1});
        if (stride == 1) return;
        all.push_back({{channels, side, side}, filters, 1, stride, 0});
        all.push_back({{filters, side / stride, side / stride}, filters, 3, 1, 1});
    };
    block(3, 32, 16, 1), block(16, 32, 16, 1), block(16, 32, 32, 2), block(32, 16, 64, 2);
    all.push_back({{3, 224, 224}, 64, 7, 2, 3});
    block(64, 56, 64, 1), block(64, 56, 128, 2), block(128, 28, 256, 2), block(256, 14, 512, 2);
    block(3, 32, 64, 1), block(64, 32, 64, 1), block(64, 16, 128, 1), block(128, 16, 128, 1), block(128, 8, 256, 1);
    block(256, 8, 256, 1), block(256, 4, 512, 1), block(512, 4, 512, 1), block(512, 2, 512, 1);
    all.push_back({{3, 224, 224}, 32, 3, 2, 1});
    int side = 112, channels = 32;
    for (const int step : {64, -128, 128, -256, 256, -512, 512, -1024, 1024}) {  // below zero: with a stride of two
        const int filters = std::abs(step), stride = step < 0 ? 2 : 1;
        all.push_back({{channels, side, side}, channels, 3, stride, 1, channels});
        side /= stride;
        all.push_back({{channels, side, side}, filters, 1, 1, 0});
        channels = filters;
    }
    for (const int inputs : {64, 512, 1024}) all.push_back({{inputs, 1, 1}, inputs == 64 ? 10 : 1000, 1, 1, 0});
    return all;
}

// Smaller, so that the reference has at most so many MACs: fewer filters first, then fewer lines.
Layer cut(Layer layer, double macs) {
    constexpr int kFilters = 13;
    const auto all = [&] {
        return double(layer.x.c / layer.groups) * layer.kernel * layer.kernel * double(layer.y().size());
    };
    while (layer.groups == 1 && layer.filters > kFilters && all() > macs) layer.filters = (layer.filters + 1) / 2;
    while (layer.x.h > 2 * layer.kernel && all() > macs) layer.x.h = layer.x.h / 2 + 1;
    return layer;
}

Layer ragged(Numbers& numbers) {
    for (;;) {
        const int groups = numbers.in(0, 2) ? 1 : numbers.in(2, 5), kernel = numbers.in(1, 5);
        Layer layer{{groups * numbers.in(1, 20), numbers.in(1, 20), numbers.in(1, 37)},
                    groups * numbers.in(1, 9),
                    kernel,
                    numbers.in(1, 3),
                    numbers.in(0, 9) ? numbers.in(0, 3) : numbers.in(4, 150),
                    groups,
                    numbers.in(1, 3),
                    numbers.coin() ? numbers.in(1, 6) : 0};
        if (numbers.in(0, 3) == 0) layer.groups = layer.filters = layer.x.c = numbers.in(2, 9);
        if (numbers.in(0, 3) == 0) layer.x.c = layer.groups * numbers.in(60, 140);
        const Shape y = layer.y();
        const bool fits =
            (layer.dilation * (layer.kernel - 1) < layer.x.h + 2 * layer.padding) &&
            (layer.dilation * (std::max(layer.kernel_w, layer.kernel) - 1) < layer.x.w + 2 * layer.padding);
        if (fits && y.h > 0 && y.w > 0) return layer;
    }
}

// ---- Cases

enum class Keep { none, one, all_but_one, all, some };

std::vector<int> mask(int width, Keep keep, Numbers& numbers) {
    std::vector<int> on;
    const int special = numbers.in(0, width - 1);
    for (int c = 0; c < width; ++c) {
        const bool chosen = keep == Keep::all || (keep == Keep::one && c == special) ||
                            (keep == Keep::all_but_one && c != special) || (keep == Keep::some && numbers.coin());
        if (chosen) on.push_back(c);
    }
    return on;
}

// What weights and inputs are: any; those of the largest sums; those at which products of bytes, taken two by two,
// begin to leave 16 bits.
enum class Values { any, largest, edges };

struct Result {
    std::vector<uint8_t> y;
    std::vector<float> y_float;
    std::vector<uint8_t> peak;
    std::vector<int64_t> sum;
    int64_t macs = 0;

    // Floats by their bits.
    bool operator==(const Result& other) const {
        return y == other.y && peak == other.peak && sum == other.sum && macs == other.macs &&
               std::equal(y_float.begin(), y_float.end(), other.y_float.begin(),
                          [](float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; });
    }
};

struct Case {
    Layer layer;
    Shape x, y;
    Op op;
    std::vector<int8_t> weight;
    std::vector<int32_t> bias;
    std::vector<float> multiplier;
    Quantized q{};
    std::vector<int> in, out;
    std::vector<uint8_t> input, residual, residual_on;
    bool adds, in_place, keeps;

    Case(const Layer& made, Keep inputs, Keep filters, Values values, Numbers& numbers)
        : layer(made), x(made.x), y(made.y()), op(made.op()) {
        const int64_t each = int64_t(x.c / op.groups) * op.kernel.h * op.kernel.w;
        weight = numbers.list<int8_t>(each * y.c, -127, 127);
        bias = numbers.list<int32_t>(y.c, -20000, 20000);
        input = numbers.list<uint8_t>(x.size() + kSlack8, 0, 255);
        q.zero_in = numbers.coin() ? 0 : numbers.in(0, 255);
        if (values == Values::edges) {
            constexpr int kWeights[] = {-128, -127, -65, -64, -1, 0, 63, 64, 65, 127},
                          kInputs[] = {0, 1, 127, 128, 254, 255};
            for (int8_t& each_weight : weight) each_weight = int8_t(kWeights[numbers.in(0, 9)]);
            for (uint8_t& each_input : input) each_input = uint8_t(kInputs[numbers.in(0, 5)]);
        }
        if (values == Values::largest) {
            std::fill(input.begin(), input.end(), uint8_t(numbers.coin() ? 255 : 0));
            for (int64_t i = 0; i < int64_t(weight.size()); ++i) weight[i] = i / each % 2 ? -127 : 127;
            q.zero_in = numbers.coin() ? 0 : 255;
        }
        for (int o = 0; o < y.c; ++o) multiplier.push_back(float(numbers.in(1, 1000)) / float(200000 + 3000 * each));
        if (numbers.in(0, 9) == 0) multiplier[0] = 3e30f;  // beyond int32
        q.weight = weight.data(), q.bias = bias.data(), q.multiplier = multiplier.data();
        q.zero_out = numbers.coin() ? 0 : numbers.in(0, 255);
        q.low = numbers.coin() ? q.zero_out : 0, q.high = numbers.in(0, 3) ? 255 : numbers.in(q.low, 255);
        q.to_float = numbers.in(0, 7) == 0;
        adds = numbers.coin(), in_place = adds && !q.to_float && numbers.coin(), keeps = !q.to_float && numbers.coin();
        q.zero_residual = numbers.in(0, 255), q.residual_multiplier = float(numbers.in(1, 300)) / 100;
        in = mask(x.c, inputs, numbers), out = mask(y.c, filters, numbers);
        if (adds) residual = numbers.list<uint8_t>(y.size(), 0, 255);
        if (adds && numbers.coin()) residual_on = numbers.list<uint8_t>(y.c, 0, 1);
    }

    // What may not matter, dead inputs and residuals, is filled with `filling`.
    Result run(const AbstractConv8& conv, int threads, uint8_t filling) const {
        std::vector<uint8_t> x_now = input, residual_now = residual;
        for (int c = 0; c < x.c; ++c)
            if (!std::binary_search(in.begin(), in.end(), c))
                std::fill_n(x_now.begin() + int64_t(c) * x.area(), x.area(), filling);
        for (size_t c = 0; c < residual_on.size(); ++c)
            if (!residual_on[c]) std::fill_n(residual_now.begin() + int64_t(c) * y.area(), y.area(), filling);
        Result result;
        if (q.to_float)
            result.y_float.assign(y.size(), -1.5f);
        else
            result.y = in_place ? residual_now : std::vector<uint8_t>(y.size(), 77);
        const int64_t bytes = conv.room(threads);
        const std::unique_ptr<void, void (*)(void*)> room(std::aligned_alloc(64, (bytes + 64) / 64 * 64), std::free);
        std::memset(room.get(), filling, bytes);
        std::vector<Result> kept(threads);
        ConvCall8 call{};
        call.x = x_now.data(), call.in = in.data(), call.n_in = int(in.size());
        call.out = out.data(), call.n_out = int(out.size());
        call.y = result.y.data(), call.y_float = result.y_float.data();
        call.residual = !adds ? nullptr : in_place ? result.y.data() : residual_now.data();
        call.residual_on = residual_on.empty() ? nullptr : residual_on.data();
        call.room = static_cast<uint8_t*>(room.get());
        Barrier barrier(threads);
        const auto work = [&](int thread) {
            ConvCall8 own = call;
            Upcoming upcoming;
            upcoming.add(conv.weights());
            own.upcoming = &upcoming;
            if (keeps) {
                kept[thread].peak.assign(y.c, 0), kept[thread].sum.assign(y.c, 0);
                own.peak = kept[thread].peak.data(), own.sum = kept[thread].sum.data();
            }
            kept[thread].macs = conv.run(own, Member{thread, threads, &barrier});
        };
        std::vector<std::thread> others;
        for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
        work(0);
        for (std::thread& other : others) other.join();
        result.peak.assign(y.c, 0), result.sum.assign(y.c, 0);
        for (const Result& part : kept) {
            result.macs += part.macs;
            for (int c = 0; c < y.c && keeps; ++c) {
                result.peak[c] = std::max(result.peak[c], part.peak[c]);
                result.sum[c] += part.sum[c];
            }
        }
        // The residual that a dead channel holds in place, and nobody reads
        for (int c = 0; c < y.c && in_place && !residual_on.empty(); ++c)
            if (!residual_on[c] && !std::binary_search(out.begin(), out.end(), c))
                std::fill_n(result.y.begin() + int64_t(c) * y.area(), y.area(), uint8_t(0));
        return result;
    }
};

const std::vector<const Kernels8*>& sets() {
    static const std::vector<const Kernels8*> all = [] {
        std::vector<const Kernels8*> found;
        for (const char* name : {"vnni", "v4", "v3", "v2", "base"})
            if (const Kernels8* kernels = find_kernels8(name)) found.push_back(kernels);
        return found;
    }();
    return all;
}

void compare(const Case& one, const std::string& what) {
    const Kernels8& any = *sets()[0];
    Arena arena(0);
    const Result wanted = one.run(*make_conv8("ref", any, one.op, one.q, one.x, one.y, arena), 1, 0x55);
    for (const ConvAlgorithm8& algorithm : conv8_algorithms()) {
        if (!algorithm.fits(one.op, one.q, one.x, one.y)) continue;
        for (const Kernels8* kernels : sets()) {
            const auto conv = algorithm.make(*kernels, one.op, one.q, one.x, one.y, arena);
            for (const int threads : {1, 2}) {
                ++cases;
                if (one.run(*conv, threads, 0xaa) == wanted) continue;
                ++failures;
                std::printf("FAILED %s %s, %s, %d of %d inputs, %d of %d filters, %d threads\n", algorithm.name,
                            kernels->name, what.c_str(), int(one.in.size()), one.x.c, int(one.out.size()), one.y.c,
                            threads);
            }
        }
    }
}

void test_layer(const Layer& layer, Numbers& numbers) {
    const Keep pairs[][2] = {{Keep::all, Keep::all},  {Keep::some, Keep::some},        {Keep::one, Keep::all_but_one},
                             {Keep::none, Keep::all}, {Keep::all_but_one, Keep::some}, {Keep::some, Keep::one},
                             {Keep::all, Keep::none}};
    for (const auto& pair : pairs) compare(Case(layer, pair[0], pair[1], Values::any, numbers), layer.text());
    compare(Case(layer, Keep::all, Keep::all, Values::largest, numbers), layer.text() + ", largest");
    for (const Keep keep : {Keep::all, Keep::some})
        compare(Case(layer, keep, Keep::all, Values::edges, numbers), layer.text() + ", edges");
}

// 115 inputs are the most whose sums stay below 2^25, where Winograd's modulo 2^26 ends: 9 * 127 * 255 of each.
void test_largest_sums(Numbers& numbers) {
    const auto takes_winograd = [](const Case& one) {
        for (const ConvAlgorithm8& algorithm : conv8_algorithms())
            if (algorithm.name == std::string("wino4")) return algorithm.fits(one.op, one.q, one.x, one.y);
        return false;
    };
    for (const int inputs : {115, 116})
        for (const int zero : {0, 255}) {
            Case one({{inputs, 13, 12}, 3, 3, 1, 1}, Keep::all, Keep::all, Values::largest, numbers);
            std::fill(one.input.begin(), one.input.end(), uint8_t(255 - zero));
            one.q.zero_in = zero;
            compare(one, one.layer.text() + ", largest sums");
            ++cases;
            if (takes_winograd(one) == (inputs == 115)) continue;
            ++failures;
            std::printf("FAILED wino4 must fit 115 inputs and no more, got %d\n", inputs);
        }
}

}  // namespace
}  // namespace cofire::test

// Arguments: how many ragged layers, and how many million MACs a layer of a backbone may have; 0: without these.
int main(int count, char** arguments) {
    using namespace cofire::test;
    const int rounds = count > 1 ? std::atoi(arguments[1]) : 150;
    const double macs = 1e6 * (count > 2 ? std::atof(arguments[2]) : 2);
    Numbers numbers(1);
    test_largest_sums(numbers);
    for (int i = 0; i < rounds; ++i) test_layer(ragged(numbers), numbers);
    if (macs > 0)
        for (const Layer& layer : backbone_layers()) test_layer(cut(layer, macs), numbers);
    std::printf("%d cases, %d failures; kernel sets:", cases, failures);
    for (const cofire::Kernels8* kernels : sets()) std::printf(" %s", kernels->name);
    std::printf("\n");
    return failures > 0;
}
