// The kernels of one instruction set; what each does stands in kernels.h.
#pragma once

#include "kernels.h"

namespace cofire {
namespace COFIRE_ISA {

void gemm(const float* const* w, int rows, const int* wk, const int* xk, int nk, const float* x, int n, float* out,
          int64_t ldo, const float* const* ahead, bool far);
void gemm_finished(const float* const* w, int rows, const int* wk, const int* xk, int nk, const float* x, int n,
                   const Ending& ending, const float* const* ahead, bool far);
void wino_input(Toom toom, const float* x, const int* channels, int count, Shape shape, const Window& window,
                int across, int row, int rows, float* room, float* v, int64_t ldv, int64_t position);
void wino_output(Toom toom, const float* u, int64_t ldu, int across, int rows, int width, float* y);
void finish(const float* x, int n, float factor, float bias, const float* residual, Act act, float slope, float* y,
            float* peak);
void dot(const float* const* w, int rows, int nk, const float* x, int64_t ldx, int count, float* out, int64_t ldo,
         const float* const* ahead);
void dots(const float* const* w, int rows, const Tap* taps, int count, int length, const float* const* x, int pixels,
          bool adds, float* const* to, int64_t ldo);
void add_lanes(const float* x, int n, float* to);
void filters(const Strips& strips, const Planes& x, const FilterEnding& ending);
void depthwise(const float* x, int pitch, const int* at, const float* w, int taps, int lines, int width, float bias,
               Act act, float slope, float* y, float* peak);
void depthwise3(const float* x, Shape shape, int stride, int top_padding, int left_padding, const float* zeros,
                const float* w, Shape out, float bias, Act act, float slope, float* y, float* peak);
void max_pool(const float* x, Shape shape, int kernel, int top_padding, int left_padding, Shape out, float* y);
void take(const float* from, int step, int n, float* to);
void softmax(float* x, int n);
void maximum(const float* x, int n, float* y);
float largest(const float* x, int n);
float sum(const float* x, int n);
float sum_of_magnitudes(const float* x, int n);
bool finite(const float* x, int n);

}  // namespace COFIRE_ISA
}  // namespace cofire
