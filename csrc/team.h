// The threads that work on one image together. Each runs the whole program; between ops, and inside some, they meet.
#pragma once

#include <atomic>
#include <thread>

namespace cofire {

// Where a fixed number of threads wait for each other. Spins a while before it yields: ops take microseconds.
class Barrier {
   public:
    explicit Barrier(int threads) : threads_(threads) {}

    void wait() {
        if (threads_ == 1) return;
        const unsigned round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins)
            if (spins > 4000) std::this_thread::yield();
    }

   private:
    const int threads_;
    std::atomic<int> arrived_{0};
    std::atomic<unsigned> round_{0};
};

struct Range {
    int begin, end;
};

// One member of a team.
struct Member {
    int thread, threads;
    Barrier* barrier;

    bool first() const { return thread == 0; }
    void meet() const { barrier->wait(); }

    // This member's share of n things, in one piece.
    Range share(int n) const { return {int(int64_t(n) * thread / threads), int(int64_t(n) * (thread + 1) / threads)}; }
};

}  // namespace cofire
