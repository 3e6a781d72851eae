#include "forks.h"

#include <atomic>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace cofire {

namespace {

struct Forks {
    std::mutex mutex;
    std::atomic<unsigned> count{0};
};

// Never destroyed: engines may outlive every other static object.
Forks& state() {
    static Forks& forks = *[] {
        auto* made = new Forks;
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); },
                       [] {
                           state().count.fetch_add(1, std::memory_order_relaxed);
                           state().mutex.unlock();
                       });
#endif
        return made;
    }();
    return forks;
}

}  // namespace

unsigned forks() { return state().count.load(std::memory_order_relaxed); }

std::mutex& unforked() { return state().mutex; }

}  // namespace cofire
