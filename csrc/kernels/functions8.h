// Kernels on bytes that have a file of their own; kernels8.h says what they do.
#pragma once

#include "kernels8.h"
#include "lanes.h"

namespace cofire {
namespace COFIRE_ISA {

void quantize(const float* x, int n, float inverse, int zero, uint8_t* q);
uint8_t largest(const uint8_t* x, int n);
int64_t sum(const uint8_t* x, int n);
void max_pool(const uint8_t* x, const Pool8Map& map, uint8_t* line, uint8_t* y);
void dot(const int8_t* const* w, int rows, const Run8* runs, int count, int64_t row, const uint8_t* const* x,
         int pixels, int32_t* sums);
#if defined(__AVX2__) && !defined(__AVX512F__)
int32_t dot_lacks(const int8_t* w, int n);
#else
constexpr int32_t (*dot_lacks)(const int8_t*, int) = nullptr;
#endif

void filter_words(const int8_t* lines, const int* in, int n, const uint8_t* places, int vectors, uint32_t* to);
void filters(const uint32_t* w, int vectors, int n, const uint32_t* x, int64_t pitch, const Pixel8* pixels, int count,
             int32_t* sums, const Stretch8& next);

void filter_lines(const int32_t* sums, int filters, int n, int64_t pitch, int32_t* lines);

void wino_input(const uint8_t* const* planes, const Tiles8& map, uint32_t* room, uint32_t* v, int64_t position);
void wino_weights(const int8_t* taps, int64_t row, const int* in, int n, const uint64_t* on, int inputs, int8_t* room,
                  uint32_t* to, int64_t position);
void wino_gemm(const uint32_t* w, int64_t ldw, int rows, const uint32_t* v, int count, int64_t pitch, int n,
               const uint32_t* column, int32_t* out, int64_t ldo);
void wino_output(const int32_t* products, int64_t position, int across, int rows, int width, int32_t* sums);
#if defined(__AVX512BW__)
void pair(const uint32_t* a, const uint32_t* b, int n, uint32_t* to);
void wino_pairs(const uint32_t* w, int64_t ldw, int rows, const uint32_t* v, int count, int64_t pitch, int32_t* out,
                int64_t ldo);
void wino_finish(const int32_t* products, int64_t position, const Finish8Map& map, const Ending8& ending);
#else
constexpr void (*pair)(const uint32_t*, const uint32_t*, int, uint32_t*) = nullptr;
constexpr void (*wino_pairs)(const uint32_t*, int64_t, int, const uint32_t*, int, int64_t, int32_t*, int64_t) = nullptr;
constexpr void (*wino_finish)(const int32_t*, int64_t, const Finish8Map&, const Ending8&) = nullptr;
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
void depthwise_lines(const uint8_t* plane, const uint32_t* w, const LinesMap8& map, const Ending8& ending);
#else
constexpr void (*depthwise_lines)(const uint8_t*, const uint32_t*, const LinesMap8&, const Ending8&) = nullptr;
#endif

}  // namespace COFIRE_ISA
}  // namespace cofire
