#include "speeds.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/kernels8.h"

namespace cofire {

namespace {

constexpr int kDepth = 64;    // inputs that lie in the nearest cache
constexpr int kTimes = 8;     // that each is walked for one sum, so that what follows a sum hardly counts
constexpr int kTries = 16;    // of which the best counts: others use the machine too
constexpr int kRepeats = 64;  // of a try, which is too short for the clock else

template <class Work>
double best_seconds(int tries, const Work& work) {
    using Clock = std::chrono::steady_clock;
    double best = 1e9;
    for (int i = 0; i < tries; ++i) {
        const auto begin = Clock::now();
        work();
        best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
    }
    return best;
}

double float_macs(const Kernels& found) {
    const int n = found.lanes * found.vectors, depth = kDepth * kTimes;
    std::vector<float> x(size_t(kDepth * n + kSlack)), w(size_t(found.rows * depth)),
        out(size_t(found.rows * n + kSlack));
    std::vector<int> wk(static_cast<size_t>(depth)), xk(static_cast<size_t>(depth));
    const float* rows[kMaxRows] = {};
    for (int k = 0; k < depth; ++k) wk[size_t(k)] = k, xk[size_t(k)] = k % kDepth * n;
    for (int r = 0; r < found.rows; ++r) rows[r] = w.data() + r * depth;
    const double seconds = best_seconds(kTries, [&] {
        for (int i = 0; i < kRepeats; ++i)
            found.gemm(rows, found.rows, wk.data(), xk.data(), depth, x.data(), n, out.data(), n, nullptr, false);
    });
    return double(kRepeats) * found.rows * depth * n / seconds;
}

double byte_macs(const Kernels8& found) {
    const int n = found.lanes * found.vectors, depth = kDepth * kTimes;
    std::vector<uint32_t> x(size_t(kDepth * n + kSlack8)), w(size_t(found.rows * depth + kSlack8));
    std::vector<uint8_t> y(size_t(found.rows * n + kSlack8));
    const std::vector<int64_t> at(kTimes, 0);
    const uint32_t* rows[kMaxRows8] = {};
    Ending8 ending{};
    ending.high = 255;
    for (int r = 0; r < found.rows; ++r) rows[r] = w.data() + r * depth, ending.y[r] = y.data() + r * n;
    Walk8 walk{x.data(), at.data(), kTimes, kDepth, n};
    const double seconds = best_seconds(kTries, [&] {
        for (int i = 0; i < kRepeats; ++i) found.gemm(rows, found.rows, walk, n, ending, nullptr);
    });
    return double(kRepeats) * found.rows * depth * n * found.channels / seconds;
}

double pair_macs(const Kernels8& found) {
    const int n = found.lanes * found.vectors, repeats = kRepeats * kTimes;
    std::vector<uint32_t> x(size_t(kDepth * n + kSlack8)), w(size_t(found.rows * kDepth + kSlack8));
    std::vector<int32_t> out(size_t(found.rows * n));
    const double seconds = best_seconds(kTries, [&] {
        for (int i = 0; i < repeats; ++i)
            found.wino_gemm(w.data(), kDepth, found.rows, x.data(), kDepth, n, n, nullptr, out.data(), n);
    });
    return 2.0 * repeats * found.rows * kDepth * n / seconds;
}

double bytes_read(const Kernels& found, int64_t bytes) {
    const int n = int(std::clamp<int64_t>(bytes / int64_t(sizeof(float)), 1 << 10, 1 << 26));
    const std::vector<float> memory(size_t(n) + kSlack, 1.0f);
    float sum = 0;
    const double seconds = best_seconds(4, [&] { sum += found.sum(memory.data(), n); });
    if (!(sum > 0)) throw std::logic_error("a sum of ones must be above 0");  // and so it is not left out
    return sizeof(float) * double(n) / seconds;
}

}  // namespace

Speeds measured_speeds(const std::string& kernel, int64_t bytes) {
    const Kernels* found = find_kernels(kernel == "ref" ? "" : kernel.c_str());
    const Kernels8* found8 = found == nullptr ? nullptr : kernels8_of(found->name);
    if (found == nullptr || found8 == nullptr) throw std::runtime_error("no kernel set \"" + kernel + "\" on this CPU");
    return {float_macs(*found), byte_macs(*found8), pair_macs(*found8), bytes_read(*found, bytes)};
}

}  // namespace cofire
