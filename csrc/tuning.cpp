#include "tuning.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>

#include "conv_common.h"

namespace cofire {

namespace {

constexpr double kKeep = 0.7;        // share of filters and inputs that are on while a gated conv is timed
constexpr int64_t kCache = 4 << 20;  // floats that may well stay in the last-level cache between two images
// Floats read between two tries, for an image's other convs come between: they empty all caches, or all but the last.
constexpr int64_t kMemory = 12 << 20, kNear = 512 << 10;
constexpr int kRounds = 10;
constexpr double kHopeless = 1.3;  // times the best after the first rounds: not tried again

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Every channel, or evenly spread ones.
std::vector<int> some(int n, double share) {
    std::vector<int> found;
    for (int c = 0; c < n; ++c)
        if (int((c + 1) * share) > int(c * share)) found.push_back(c);
    if (found.empty()) found.push_back(0);
    return found;
}

struct Trial {
    const Op& op;
    Shape x, y;
    std::vector<int> in, out;
    Floats input, output;
    const std::vector<float>& flood;  // read between tries
    const std::vector<float> ones{std::vector<float>(size_t(y.c), 1.0f)};

    double time(const AbstractConv& conv, Floats& room) {
        float sum = 0;
        for (size_t i = 0; i < flood.size(); i += kLine) sum += flood[i];
        for (int64_t i = 0; i < input.size(); i += kLine) sum += input[i];  // the op before has just written it
        Barrier barrier(1);
        Upcoming upcoming;
        ConvCall call{};
        call.x = input.data(), call.in = in.data(), call.n_in = int(in.size());
        call.out = out.data(), call.n_out = int(out.size());
        call.factor = ones.data(), call.bias = op.bias, call.y = output.data();
        call.room = room.data(), call.upcoming = &upcoming;
        output[0] = sum;  // so that the reading is not left out
        const double begin = seconds_now();
        conv.run(call, Member{0, 1, &barrier});
        return seconds_now() - begin;
    }

    // The fastest of the named algorithms. They take turns, so that a busy machine hits all alike; the best try counts.
    std::string fastest(const std::vector<std::string>& names, const Leaf& leaf) {
        if (names.size() == 1) return names[0];
        Shelf shelf;
        std::vector<std::unique_ptr<AbstractConv>> convs;
        int64_t most = 0;
        for (const std::string& name : names) {
            convs.push_back(make_conv(name, leaf, op, x, y, shelf));
            most = std::max(most, convs.back()->room(1));
        }
        Floats room(most);
        std::vector<double> least(names.size(), std::numeric_limits<double>::infinity());
        for (int round = 0; round <= kRounds; ++round) {
            const double best = *std::min_element(least.begin(), least.end());
            for (size_t i = 0; i < names.size(); ++i) {
                if (round > 2 && least[i] > kHopeless * best) continue;
                const double seconds = time(*convs[i], room);
                if (round > 0) least[i] = std::min(least[i], seconds);
            }
        }
        return names[std::min_element(least.begin(), least.end()) - least.begin()];
    }
};

std::string shape_key(const Op& op, Shape x, Shape y) {
    std::ostringstream key;
    for (int n : {x.c, x.h, x.w, y.c, y.h, y.w, op.kernel.h, op.kernel.w, op.stride.h, op.stride.w, op.dilation.h,
                  op.dilation.w, op.groups, int(op.group >= 0)})
        key << n << ' ';
    return key.str();
}

}  // namespace

std::vector<std::string> tune(const Program& program, const Leaf& leaf) {
    int64_t weights = 0;
    for (const Op& op : program.ops)
        if (op.kind == Kind::conv)
            weights += program.buffers[op.src[0]].c / op.groups * int64_t(program.buffers[op.dst].c) * op.kernel.h *
                       op.kernel.w;
    const std::vector<float> flood(2 * weights > kCache ? kMemory : kNear, 1.0f);
    std::map<std::string, std::string> known;
    std::vector<std::string> words;
    for (const Op& op : program.ops) {
        if (op.kind != Kind::conv) {
            words.push_back("-");
            continue;
        }
        const Shape x = program.buffers[op.src[0]], y = program.buffers[op.dst];
        std::vector<std::string> names = fitting_algorithms(op, x, y);
        names.pop_back();  // the reference defines, it does not compete
        std::string& best = known[shape_key(op, x, y)];
        if (best.empty()) {
            const double keep = op.group >= 0 ? kKeep : 1;
            Trial trial{
                op,   x, y, some(x.c, keep), some(y.c, keep), Floats(x.size() + kSlack), Floats(y.size() + kSlack),
                flood};
            best = trial.fastest(names, leaf);
        }
        words.push_back(best);
    }
    return words;
}

std::vector<std::string> parse_tuning(const Program& program, const std::string& text) {
    std::istringstream stream(text);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    if (words.size() != program.ops.size())
        throw std::runtime_error("tuning must have " + std::to_string(program.ops.size()) + " words, one per op, got " +
                                 std::to_string(words.size()));
    for (size_t i = 0; i < words.size(); ++i) {
        const Op& op = program.ops[i];
        std::vector<std::string> names{"-"};
        if (op.kind == Kind::conv) names = fitting_algorithms(op, program.buffers[op.src[0]], program.buffers[op.dst]);
        if (std::find(names.begin(), names.end(), words[i]) == names.end())
            throw std::runtime_error("tuning of op '" + op.name + "' cannot be '" + words[i] +
                                     "'; delete the tuning file");
    }
    return words;
}

}  // namespace cofire
