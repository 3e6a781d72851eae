// Threads that wait for work: one job at a time, run by all of them together with the caller.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "forks.h"

namespace cofire {

class Workers {
   public:
    explicit Workers(int threads) : count_(threads - 1) { hire(); }

    ~Workers() { dismiss(); }

    // job(context, thread) on threads 0 .. n - 1, thread 0 being the caller; returns when all are done.
    void run(void (*job)(void*, int), void* context) {
        if (count_ == 0) return job(context, 0);
        if (forks() != forks_) {
            dismiss();
            hire();
        }
        Crew& crew = *crew_;
        {
            std::lock_guard<std::mutex> lock(crew.mutex);
            crew.job = job, crew.context = context;
            crew.busy.store(count_, std::memory_order_relaxed);
            ++crew.round;
        }
        crew.wake.notify_all();
        job(context, 0);
        while (crew.busy.load(std::memory_order_acquire) > 0) std::this_thread::yield();
    }

   private:
    struct Crew {
        std::vector<std::thread> threads;
        std::mutex mutex;
        std::condition_variable wake;
        unsigned round = 0;
        bool stop = false;
        void (*job)(void*, int) = nullptr;
        void* context = nullptr;
        std::atomic<int> busy{0};

        void work(int thread) {
            for (unsigned seen = 0;;) {
                std::unique_lock<std::mutex> lock(mutex);
                wake.wait(lock, [&] { return round != seen; });
                seen = round;
                if (stop) return;
                const auto job_now = job;
                void* const context_now = context;
                lock.unlock();
                job_now(context_now, thread);
                busy.fetch_sub(1, std::memory_order_release);
            }
        }
    };

    void hire() {
        forks_ = forks();
        crew_ = std::make_unique<Crew>();
        try {
            for (int thread = 1; thread <= count_; ++thread)
                crew_->threads.emplace_back([crew = crew_.get(), thread] { crew->work(thread); });
        } catch (...) {  // the system gives no more threads
            dismiss();
            throw;
        }
    }

    // In a child of fork() the threads are gone: who joins them, or destroys what they wait for, waits forever.
    void dismiss() {
        if (forks() != forks_) {
            crew_.release();
            return;
        }
        {
            std::lock_guard<std::mutex> lock(crew_->mutex);
            crew_->stop = true;
            ++crew_->round;
        }
        crew_->wake.notify_all();
        for (std::thread& thread : crew_->threads) thread.join();
    }

    const int count_;
    unsigned forks_ = 0;
    std::unique_ptr<Crew> crew_;
};

}  // namespace cofire
