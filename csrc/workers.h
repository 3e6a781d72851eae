// Threads that wait for work: one job at a time, run by all of them together with the caller.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace cofire {

class Workers {
   public:
    explicit Workers(int threads) {
        for (int thread = 1; thread < threads; ++thread) threads_.emplace_back([this, thread] { work(thread); });
    }

    ~Workers() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
            ++round_;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    // job(context, thread) on threads 0 .. n - 1, thread 0 being the caller; returns when all are done.
    void run(void (*job)(void*, int), void* context) {
        if (!threads_.empty()) {
            {
                std::lock_guard<std::mutex> lock(mutex_);
                job_ = job, context_ = context;
                busy_.store(int(threads_.size()), std::memory_order_relaxed);
                ++round_;
            }
            wake_.notify_all();
        }
        job(context, 0);
        while (busy_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
    }

   private:
    void work(int thread) {
        for (unsigned seen = 0;;) {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (stop_) return;
            const auto job = job_;
            void* const context = context_;
            lock.unlock();
            job(context, thread);
            busy_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    unsigned round_ = 0;
    bool stop_ = false;
    void (*job_)(void*, int) = nullptr;
    void* context_ = nullptr;
    std::atomic<int> busy_{0};
};

}  // namespace cofire
