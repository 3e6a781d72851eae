// GMAC/s of convs on bytes beside convs on floats, layer by layer, one thread; the best algorithm of each, all inputs
// and filters on, then `share` of both at random. They take turns and the best try counts, so that other work on the
// machine hits both alike. bench_conv8 [rounds] [share] [kernel set on floats] [on bytes]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>

#include "../conv.h"
#include "../conv8.h"

namespace cofire {
namespace {

struct Layer {
    const char* name;
    Shape x;
    int filters, kernel, stride, groups;
};

const Layer kLayers[] = {
    {"ResNet-34 stem", {3, 224, 224}, 64, 7, 2, 1},     {"ResNet-34 3x3", {64, 56, 56}, 64, 3, 1, 1},
    {"ResNet-34 3x3/2", {64, 56, 56}, 128, 3, 2, 1},    {"ResNet-34 3x3", {128, 28, 28}, 128, 3, 1, 1},
    {"ResNet-34 3x3/2", {128, 28, 28}, 256, 3, 2, 1},   {"ResNet-34 3x3", {256, 14, 14}, 256, 3, 1, 1},
    {"ResNet-34 1x1/2", {256, 14, 14}, 512, 1, 2, 1},   {"ResNet-34 3x3/2", {256, 14, 14}, 512, 3, 2, 1},
    {"ResNet-34 3x3", {512, 7, 7}, 512, 3, 1, 1},       {"ResNet-34 fc", {512, 1, 1}, 1000, 1, 1, 1},
    {"MobileNetV1 stem", {3, 224, 224}, 32, 3, 2, 1},   {"MobileNetV1 dw", {32, 112, 112}, 32, 3, 1, 32},
    {"MobileNetV1 1x1", {32, 112, 112}, 64, 1, 1, 1},   {"MobileNetV1 dw/2", {64, 112, 112}, 64, 3, 2, 64},
    {"MobileNetV1 1x1", {64, 56, 56}, 128, 1, 1, 1},    {"MobileNetV1 dw", {128, 56, 56}, 128, 3, 1, 128},
    {"MobileNetV1 1x1", {128, 56, 56}, 128, 1, 1, 1},   {"MobileNetV1 1x1", {128, 28, 28}, 256, 1, 1, 1},
    {"MobileNetV1 dw", {256, 28, 28}, 256, 3, 1, 256},  {"MobileNetV1 1x1", {256, 28, 28}, 256, 1, 1, 1},
    {"MobileNetV1 1x1", {256, 14, 14}, 512, 1, 1, 1},   {"MobileNetV1 dw", {512, 14, 14}, 512, 3, 1, 512},
    {"MobileNetV1 1x1", {512, 14, 14}, 512, 1, 1, 1},   {"MobileNetV1 1x1", {512, 7, 7}, 1024, 1, 1, 1},
    {"MobileNetV1 dw", {1024, 7, 7}, 1024, 3, 1, 1024}, {"MobileNetV1 1x1", {1024, 7, 7}, 1024, 1, 1, 1},
    {"MobileNetV1 fc", {1024, 1, 1}, 1000, 1, 1, 1},    {"ResNet-56 stem", {3, 32, 32}, 16, 3, 1, 1},
    {"ResNet-56 3x3", {16, 32, 32}, 16, 3, 1, 1},       {"ResNet-56 3x3", {32, 16, 16}, 32, 3, 1, 1},
    {"ResNet-56 3x3", {64, 8, 8}, 64, 3, 1, 1},         {"VGG16 3x3", {64, 32, 32}, 64, 3, 1, 1},
    {"VGG16 3x3", {256, 8, 8}, 256, 3, 1, 1},           {"VGG16 3x3", {512, 4, 4}, 512, 3, 1, 1},
    {"VGG16 3x3", {512, 2, 2}, 512, 3, 1, 1},
};

uint32_t random_bits() {
    static uint32_t state = 1;
    return (state = state * 1664525u + 1013904223u) >> 8;
}

std::vector<int> some(int n, double share) {
    std::vector<int> found;
    for (int c = 0; c < n; ++c)
        if (random_bits() < share * (1 << 24)) found.push_back(c);
    if (found.empty()) found.push_back(0);
    return found;
}

double seconds_of(const std::function<void()>& run) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    run();
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

// A layer on random floats and on random bytes, with every algorithm that fits.
class Trial {
   public:
    Trial(const Layer& layer, const Kernels& kernels, const Kernels8& kernels8)
        : x_(layer.x),
          y_{layer.filters, (layer.x.h - 1) / layer.stride + 1, (layer.x.w - 1) / layer.stride + 1},
          weight_(int64_t(y_.c) * (x_.c / layer.groups) * layer.kernel * layer.kernel),
          weight8_(weight_.size()),
          bias8_(y_.c),
          bias_(y_.c),
          ones_(y_.c, 1.0f),
          multiplier_(y_.c, 1e-4f),
          input_(x_.size() + kSlack),
          output_(y_.size() + kSlack),
          input8_(x_.size() + kSlack8),
          output8_(y_.size()),
          peak_(y_.c),
          peak8_(y_.c) {
        const int padding = (layer.kernel - 1) / 2;
        op_.kind = Kind::conv, op_.kernel = {layer.kernel, layer.kernel}, op_.stride = {layer.stride, layer.stride};
        op_.padding = {padding, padding, padding, padding}, op_.groups = layer.groups, op_.act = Act::relu;
        for (size_t i = 0; i < weight_.size(); ++i) {
            weight8_[i] = int8_t(random_bits() % 127 - 63);
            weight_[i] = float(weight8_[i]);
        }
        for (int64_t i = 0; i < x_.size(); ++i) input8_[i] = uint8_t(random_bits()), input_[i] = float(input8_[i]);
        op_.weight = weight_.data(), op_.bias = bias_.data();
        Quantized quantized{};
        quantized.weight = weight8_.data(), quantized.bias = bias8_.data(), quantized.multiplier = multiplier_.data();
        for (const std::string& name : fitting_algorithms(op_, x_, y_))
            if (name != "ref") convs_.push_back({name, make_conv(name, kernels, op_, x_, y_, arena_)});
        for (const ConvAlgorithm8& algorithm : conv8_algorithms())
            if (algorithm.fits(op_, quantized, x_, y_) && algorithm.name != std::string("ref"))
                convs8_.push_back({algorithm.name, algorithm.make(kernels8, op_, quantized, x_, y_, arena_)});
    }

    void print(const char* title, double share, int rounds) {
        const std::vector<int> in = some(x_.c, share), out = some(y_.c, share);
        std::vector<double> least(convs_.size() + convs8_.size(), std::numeric_limits<double>::infinity());
        int64_t macs = 0;
        for (int round = 0; round < rounds; ++round)
            for (size_t i = 0; i < least.size(); ++i)
                least[i] = std::min(least[i], seconds_of([&] {
                                        macs = i < convs_.size() ? run(*convs_[i].conv, in, out)
                                                                 : run8(*convs8_[i - convs_.size()].conv, in, out);
                                    }));
        const auto best = [&](size_t begin, size_t end) {
            return std::min_element(least.begin() + begin, least.begin() + end) - least.begin();
        };
        const size_t one = best(0, convs_.size()), other = best(convs_.size(), least.size());
        std::printf("%-17s %4dx%3dx%3d to %4d  %3.0f %%  %8.3f ms %7.1f GMAC/s %-9s  %8.3f ms %7.1f GMAC/s %-9s %5.2f",
                    title, x_.c, x_.h, x_.w, y_.c, 100 * share, 1e3 * least[one], 1e-9 * double(macs) / least[one],
                    convs_[one].name.c_str(), 1e3 * least[other], 1e-9 * double(macs) / least[other],
                    convs8_[other - convs_.size()].name.c_str(), least[one] / least[other]);
        for (size_t i = convs_.size(); i < least.size() && convs8_.size() > 1; ++i)
            std::printf("  %s %.3f", convs8_[i - convs_.size()].name.c_str(), 1e3 * least[i]);
        std::printf("\n");
    }

   private:
    template <class Conv>
    struct Named {
        std::string name;
        std::unique_ptr<Conv> conv;
    };

    int64_t run(const AbstractConv& conv, const std::vector<int>& in, const std::vector<int>& out) {
        if (room_.size() < conv.room(1)) room_ = Floats(conv.room(1));
        Barrier barrier(1);
        Upcoming upcoming;
        ConvCall call{};
        call.x = input_.data(), call.in = in.data(), call.n_in = int(in.size());
        call.out = out.data(), call.n_out = int(out.size());
        call.factor = ones_.data(), call.bias = bias_.data(), call.y = output_.data(), call.peak = peak_.data();
        call.room = room_.data(), call.upcoming = &upcoming;
        return conv.run(call, Member{0, 1, &barrier});
    }

    int64_t run8(const AbstractConv8& conv, const std::vector<int>& in, const std::vector<int>& out) {
        if (4 * room_.size() < conv.room(1)) room_ = Floats(conv.room(1) / 4 + 1);
        Barrier barrier(1);
        ConvCall8 call{};
        call.x = input8_.data(), call.in = in.data(), call.n_in = int(in.size());
        call.out = out.data(), call.n_out = int(out.size());
        call.y = output8_.data(), call.peak = peak8_.data();
        Upcoming upcoming;
        call.upcoming = &upcoming;
        call.room = reinterpret_cast<uint8_t*>(room_.data());
        return conv.run(call, Member{0, 1, &barrier});
    }

    const Shape x_, y_;
    Op op_{};
    std::vector<float> weight_;
    std::vector<int8_t> weight8_;
    std::vector<int32_t> bias8_;
    std::vector<float> bias_, ones_, multiplier_;
    Floats input_, output_, room_;
    std::vector<uint8_t> input8_, output8_;
    std::vector<float> peak_;
    std::vector<uint8_t> peak8_;
    Arena arena_;
    std::vector<Named<AbstractConv>> convs_;
    std::vector<Named<AbstractConv8>> convs8_;
};

}  // namespace
}  // namespace cofire

int main(int count, char** arguments) {
    using namespace cofire;
    const int rounds = count > 1 ? std::atoi(arguments[1]) : 20;
    const double share = count > 2 ? std::atof(arguments[2]) : 0.7;
    const Kernels* kernels = find_kernels(count > 3 ? arguments[3] : "");
    const Kernels8* kernels8 = find_kernels8(count > 4 ? arguments[4] : "");
    if (!kernels || !kernels8) return std::printf("this CPU does not have those kernel sets\n"), 2;
    std::printf("%55s %-28s  bytes: %-22s  floats / bytes\n", "floats:", kernels->name, kernels8->name);
    for (const Layer& layer : kLayers) {
        Trial trial(layer, *kernels, *kernels8);
        trial.print(layer.name, 1, rounds);
        trial.print(layer.name, share, rounds);
    }
}
