// Memory for the inner loops: zeroed, aligned to cache lines, on huge pages where it is large or shares them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace cofire {

class Floats {
   public:
    Floats() = default;
    explicit Floats(int64_t size) : size_(size) {
        constexpr size_t kHuge = size_t(2) << 20;
        const size_t bytes = size_t(size) * sizeof(float), alignment = bytes >= kHuge ? kHuge : 64;
        const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
        void* memory = std::aligned_alloc(alignment, rounded ? rounded : alignment);
        if (!memory) throw std::bad_alloc();
        data_.reset(static_cast<float*>(memory));
#if defined(__linux__)
        if (alignment == kHuge) madvise(memory, rounded, MADV_HUGEPAGE);  // 2 % of a ResNet's time
#endif
        std::memset(memory, 0, rounded);
    }

    float* data() { return data_.get(); }
    const float* data() const { return data_.get(); }
    int64_t size() const { return size_; }
    float& operator[](int64_t i) { return data_.get()[i]; }
    const float& operator[](int64_t i) const { return data_.get()[i]; }

   private:
    struct Free {
        void operator()(float* memory) const { std::free(memory); }
    };
    std::unique_ptr<float[], Free> data_;
    int64_t size_ = 0;
};

// Also known as a bump allocator: many arrays side by side, so that small ones lie on huge pages too: a network of
// small convs would need thousands of others, whose addresses no CPU remembers from one image to the next. They live as
// long as the arena.
class Arena {
   public:
    float* take(int64_t size) {
        size = whole(size, 16);
        if (size > left_) {
            chunks_.emplace_back(whole(size, kChunk));
            const int64_t spare = chunks_.back().size() - size;
            if (spare <= left_) return chunks_.back().data();
            next_ = chunks_.back().data(), left_ = spare + size;
        }
        left_ -= size;
        return std::exchange(next_, next_ + size);
    }

   private:
#if defined(__SANITIZE_ADDRESS__)
    static constexpr int64_t kChunk = 16;  // each array on its own: the sanitizer sees where it ends
#else
    static constexpr int64_t kChunk = 512 * 1024;  // floats of a huge page
#endif
    static int64_t whole(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

    std::vector<Floats> chunks_;
    float* next_ = nullptr;
    int64_t left_ = 0;
};

}  // namespace cofire
