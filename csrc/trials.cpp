#include "trials.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "conv_common.h"

namespace cofire {

namespace {

constexpr double kKeep = 0.7;  // share of filters and inputs that are on while a gated conv is timed
constexpr int kRounds = 10;
constexpr double kHopeless = 1.3;  // times the best after the first rounds: not tried again

}  // namespace

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<int> some(int n, double share) {
    std::vector<int> found;
    for (int c = 0; c < n; ++c)
        if (int((c + 1) * share) > int(c * share)) found.push_back(c);
    if (found.empty()) found.push_back(0);
    return found;
}

double share_on(const Op& op) { return op.group >= 0 ? kKeep : 1; }

float read_all(const std::vector<float>& flood) {
    float sum = 0;
    for (size_t i = 0; i < flood.size(); i += kLine) sum += flood[i];
    return sum;
}

size_t fastest(size_t count, const std::function<double(size_t)>& seconds, double deadline) {
    std::vector<double> least(count, std::numeric_limits<double>::infinity());
    const auto best = [&] { return std::min_element(least.begin(), least.end()); };
    for (int round = 0; round <= kRounds && seconds_now() < deadline; ++round) {
        const double limit = kHopeless * *best();
        for (size_t i = 0; i < count && seconds_now() < deadline; ++i) {
            if (round > 2 && least[i] > limit) continue;
            const double found = seconds(i);
            if (round > 0) least[i] = std::min(least[i], found);
        }
    }
    return size_t(best() - least.begin());
}

}  // namespace cofire
