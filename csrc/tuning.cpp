#include "tuning.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>

#include "conv_common.h"
#include "denormals.h"
#include "trials.h"

namespace cofire {

namespace {

constexpr int64_t kCache = 4 << 20;  // floats that may well stay in the last-level cache between two images
// Floats read between two tries, for an image's other convs come between: they empty all caches, or all but the last.
constexpr int64_t kMemory = 12 << 20, kNear = 512 << 10;
constexpr int kSample = 8;             // pixels along the side of a map that errors are measured on
constexpr int kTogether = 16;          // filters whose errors are measured together
constexpr double kOverflowing = 1e60;  // squares of weights whose sums may well leave float32: each would be repaired

// Numbers between -1 and 1 with a variance of a third, the same each time.
void fill_randomly(Floats* values) {
    uint32_t state = 1;
    for (int64_t i = 0; i < values->size(); ++i) {
        state = state * 1664525 + 1013904223;  // Numerical Recipes
        (*values)[i] = float(int32_t(state)) * 0x1p-31f;
    }
}

struct Competitor {
    std::string name;
    std::unique_ptr<AbstractConv> conv;
};

struct Trial {
    const Op& op;
    Shape x, y;
    std::vector<int> in, out;
    Floats input, output;
    const std::vector<float>& flood;  // read between tries
    const std::vector<float> ones{std::vector<float>(size_t(y.c), 1.0f)};

    void run(const AbstractConv& conv, Floats& room) {
        Barrier barrier(1);
        Upcoming upcoming;
        ConvCall call{};
        call.x = input.data(), call.in = in.data(), call.n_in = int(in.size());
        call.out = out.data(), call.n_out = int(out.size());
        call.factor = ones.data(), call.bias = op.bias, call.y = output.data();
        call.room = room.data(), call.upcoming = &upcoming;
        const FlushDenormals flush;
        conv.run(call, Member{0, 1, &barrier});
    }

    double time(const AbstractConv& conv, Floats& room) {
        float sum = read_all(flood);
        for (int64_t i = 0; i < input.size(); i += kLine) sum += input[i];  // the op before has just written it
        output[0] = sum;                                                    // so that the reading is not left out
        const double begin = seconds_now();
        run(conv, room);
        return seconds_now() - begin;
    }

    std::string fastest(const std::vector<Competitor>& competitors, double deadline) {
        int64_t most = 0;
        for (const Competitor& competitor : competitors) most = std::max(most, competitor.conv->room(1));
        Floats room(most);
        const auto seconds = [&](size_t i) { return time(*competitors[i].conv, room); };
        return competitors[cofire::fastest(competitors.size(), seconds, deadline)].name;
    }
};

Trial trial_of(const Op& op, Shape x, Shape y, const std::vector<float>& flood) {
    const double keep = share_on(op);
    Trial trial{op,   x, y, some(x.c, keep), some(y.c, keep), Floats(x.size() + kSlack), Floats(y.size() + kSlack),
                flood};
    fill_randomly(&trial.input);
    return trial;
}

// The algorithms that compete: the reference, the last of all, only defines. Some want much memory for a large map.
std::vector<Competitor> competitors_of(const Op& op, Shape x, Shape y, const Kernels& kernels, const Limits& limits,
                                       Arena& arena) {
    std::vector<std::string> names = fitting_algorithms(op, x, y);
    names.pop_back();
    std::vector<Competitor> found;
    for (const std::string& name : names) {
        auto conv = make_conv(name, kernels, op, x, y, arena);
        const double bytes = 4 * double(conv->room(1) + x.size() + y.size());
        if (name == "gemm" || names.size() == 1 || bytes < 0.5 * double(limits.memory))
            found.push_back({name, std::move(conv)});
    }
    return found;
}

std::string shape_key(const Op& op, Shape x, Shape y) {
    std::ostringstream key;
    for (int n : {x.c, x.h, x.w, y.c, y.h, y.w, op.kernel.h, op.kernel.w, op.stride.h, op.stride.w, op.dilation.h,
                  op.dilation.w, op.groups, int(op.group >= 0)})
        key << n << ' ';
    return key.str();
}

// Whether an algorithm may be chosen for a conv with these weights. All but Winograd's add up the products themselves.
bool is_exact(const std::string& algorithm, const Kernels& kernels, const Op& op, Shape x, Shape y) {
    return algorithm.rfind("wino", 0) != 0 || inexactness(algorithm, kernels, op, x, y) <= kMostInexact;
}

}  // namespace

double inexactness(const std::string& algorithm, const Kernels& kernels, const Op& op, Shape x, Shape y) {
    if (op.groups == 1 && y.c > kTogether) {  // a few filters at a time, whose weights stay in the cache
        const int64_t size = int64_t(x.c) * op.kernel.h * op.kernel.w;
        double most = 0;
        for (int first = 0; first < y.c; first += kTogether) {
            Op some = op;
            some.weight += first * size;
            const double found = inexactness(algorithm, kernels, some, x, {std::min(kTogether, y.c - first), y.h, y.w});
            if (!(found <= most)) most = found;
            if (std::isnan(most)) return most;
        }
        return most;
    }
    Op sums = op;  // without what comes after them, on a map of a few tiles
    sums.act = Act::none, sums.residual = false, sums.padding = {0, 0, 0, 0};
    const std::vector<float> no_bias(y.c, 0.0f);
    sums.bias = no_bias.data();
    const auto reach = [](int n, int stride, int kernel, int dilation) {
        return (n - 1) * stride + (kernel - 1) * dilation + 1;
    };
    const Shape to{y.c, std::min(y.h, kSample), std::min(y.w, kSample)};
    const Shape from{x.c, reach(to.h, op.stride.h, op.kernel.h, op.dilation.h),
                     reach(to.w, op.stride.w, op.kernel.w, op.dilation.w)};
    Arena arena(0);
    const auto conv = make_conv(algorithm, kernels, sums, from, to, arena);
    const std::vector<float> nothing;
    Trial trial{sums,   from, to, some(x.c, 1), some(y.c, 1), Floats(from.size() + kSlack), Floats(to.size() + kSlack),
                nothing};
    fill_randomly(&trial.input);
    Floats room(conv->room(1));
    trial.run(*conv, room);
    double most = 0;
    const int inputs = x.c / op.groups;
    const int64_t taps = int64_t(op.kernel.h) * op.kernel.w;
    for (int o = 0; o < y.c; ++o) {
        const float* weights = op.weight + o * inputs * taps;
        double squares = 0;
        for (int64_t i = 0; i < inputs * taps; ++i) squares += double(weights[i]) * weights[i];
        if (squares > kOverflowing) return std::numeric_limits<double>::quiet_NaN();
        for (int pixel = o % to.area(), n = 0; n < 2; ++n, pixel = (pixel + to.area() / 2) % to.area()) {
            double sum = 0;
            const int first = o / (y.c / op.groups) * inputs;
            const float* corner =
                trial.input.data() + int64_t(pixel / to.w) * op.stride.h * from.w + pixel % to.w * op.stride.w;
            for (int i = 0; i < inputs; ++i)
                for (int64_t tap = 0; tap < taps; ++tap)
                    sum += double(weights[i * taps + tap]) *
                           corner[int64_t(first + i) * from.area() + tap / op.kernel.w * op.dilation.h * from.w +
                                  tap % op.kernel.w * op.dilation.w];
            const double error = std::abs(trial.output[o * int64_t(to.area()) + pixel] - sum);
            if (!(error <= most * std::sqrt(squares / 3))) most = error / std::sqrt(squares / 3);
            if (!(most < std::numeric_limits<double>::infinity())) return std::numeric_limits<double>::quiet_NaN();
        }
    }
    return most;
}

std::vector<std::string> tune(const Program& program, const Kernels& kernels, const Limits& limits) {
    const double seconds = limits.tuning_seconds < 0 ? default_tuning(program) : limits.tuning_seconds;
    const double deadline = seconds_now() + seconds;
    int64_t weights = 0;
    for (const Op& op : program.ops)
        if (op.kind == Kind::conv || op.kind == Kind::conv8)
            weights += program.buffers[op.src[0]].c / op.groups * int64_t(program.buffers[op.dst].c) * op.kernel.h *
                       op.kernel.w;
    const std::vector<float> flood(seconds <= 0 ? 0 : 2 * weights > kCache ? kMemory : kNear, 1.0f);
    std::map<std::string, std::vector<std::string>> known;  // of each shape: the best first
    std::vector<std::string> words;
    for (const Op& op : program.ops) {
        const Shape x = program.buffers[op.src[0]], y = program.buffers[op.dst];
        if (op.kind != Kind::conv && op.kind != Kind::conv8) {
            words.emplace_back("-");
            continue;
        }
        std::vector<std::string>& names =
            known[op.kind == Kind::conv ? shape_key(op, x, y) : shape_key(op, x, y) + "8"];
        if (op.kind == Kind::conv8) {
            if (names.empty())
                names = tuned_algorithms8(program, op, *kernels8_of(kernels.name), limits, flood, deadline);
            const std::vector<std::string> can = fitting_algorithms8(program, op);  // with its own weights
            words.push_back(*std::find_first_of(names.begin(), names.end(), can.begin(), can.end()));
            continue;
        }
        if (names.empty()) {
            Arena arena = seconds > 0 ? Arena() : Arena(0);
            const std::vector<Competitor> competitors = competitors_of(op, x, y, kernels, limits, arena);
            for (const Competitor& competitor : competitors) names.push_back(competitor.name);
            if (names.size() > 1 && work_of(op, program) < kMostTried && seconds_now() < deadline) {
                const std::string best = trial_of(op, x, y, flood).fastest(competitors, deadline);
                std::stable_partition(names.begin(), names.end(),
                                      [&](const std::string& name) { return name == best; });
            }
        }
        words.push_back(*std::find_if(names.begin(), names.end(),
                                      [&](const std::string& name) { return is_exact(name, kernels, op, x, y); }));
    }
    return words;
}

std::vector<std::string> parse_tuning(const Program& program, const Kernels& kernels, const std::string& text) {
    std::istringstream stream(text);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    if (words.size() != program.ops.size())
        throw std::runtime_error("tuning must have " + std::to_string(program.ops.size()) + " words, one per op, got " +
                                 std::to_string(words.size()));
    for (size_t i = 0; i < words.size(); ++i) {
        const Op& op = program.ops[i];
        std::vector<std::string> names{"-"};
        const Shape x = program.buffers[op.src[0]], y = program.buffers[op.dst];
        if (op.kind == Kind::conv) names = fitting_algorithms(op, x, y);
        if (op.kind == Kind::conv8) names = fitting_algorithms8(program, op);
        if (std::find(names.begin(), names.end(), words[i]) == names.end())
            throw std::runtime_error("tuning of op '" + op.name + "' cannot be '" + words[i] +
                                     "'; delete the tuning file");
        if (op.kind == Kind::conv && !is_exact(words[i], kernels, op, x, y))
            throw std::runtime_error("tuning of op '" + op.name + "' cannot be '" + words[i] +
                                     "', which is too inexact with its weights; delete the tuning file");
    }
    return words;
}

}  // namespace cofire
