#include "limits.h"

#include <algorithm>
#include <sstream>

namespace cofire {

namespace {

constexpr double kSecond = double(int64_t(1) << 34);  // steps
constexpr double kPerWeight = 1 << 16;                // steps
constexpr double kElement = 16;                       // steps
constexpr double kVector = 16;                        // floats of the widest

double elements(const Shape& shape) { return double(shape.size()); }

double conv_work(const Op& op, const Shape& x, const Shape& y) {
    const Padding& p = op.padding;
    const double padded = double(x.c) * (double(x.h) + p.top + p.bottom) * (double(x.w) + p.left + p.right);
    const double line = y.w + double(op.kernel.w - 1) * op.dilation.w / op.stride.w;
    const double taps = double(op.kernel.h) * op.kernel.w * (x.c / op.groups);
    return taps * y.c * y.h * std::max(line, kVector) + kElement * (padded + elements(y));
}

double pool_work(const Op& op, const Shape& x, const Shape& y) {
    const double rows = op.adaptive ? double(x.h) / y.h + 2 : op.kernel.h;
    const double columns = op.adaptive ? double(x.w) / y.w + 2 : op.kernel.w;
    return kElement * (elements(x) + elements(y) * (rows * columns + 1));
}

double deconv_work(const Op& op, const Shape& x, const Shape& y) {
    const double taps = double(op.kernel.h) * op.kernel.w;
    const double products = taps * (x.c / op.groups) * y.c * std::max(double(x.area()), kVector);
    return products + kElement * (elements(x) + elements(y) + taps * y.c * x.area());
}

double resample_work(const Op& op, const Shape& x, const Shape& y) {
    return kElement * double(y.c) * (double(op.rows.size()) * x.w + double(y.h) * double(op.columns.size()));
}

[[noreturn]] void refuse(const char* what, double needs, double most, const char* unit) {
    std::ostringstream text;
    text << "one image must take at most " << most << ' ' << unit << " of " << what << ", but this program needs "
         << needs << ": raise the limit if you trust it";
    throw TooCostly(text.str());
}

}  // namespace

double work_of(const Op& op, const Program& program) {
    const Shape &x = program.buffers[size_t(op.src[0])], &y = program.buffers[size_t(op.dst)];
    double work = kElement * (op.decides ? elements(x) + 2.0 * x.c * program.groups[size_t(op.group)].filters : 0);
    if (op.kind == Kind::conv || op.kind == Kind::conv8) return work + conv_work(op, x, y);
    if (op.kind == Kind::pool) return work + pool_work(op, x, y);
    if (op.kind == Kind::deconv) return work + deconv_work(op, x, y);
    if (op.kind == Kind::resample) work += resample_work(op, x, y);
    for (int source : op.src) work += kElement * elements(program.buffers[size_t(source)]);
    return work + kElement * elements(y);
}

double default_work(const Program& program) { return kSecond + kPerWeight * double(program.weights.size()); }

double default_tuning(const Program& program) { return 1 + 0.2e-6 * 4 * double(program.weights.size()); }

void check_work(const Program& program, const Limits& limits) {
    const double most = limits.work > 0 ? limits.work : default_work(program);
    double work = 0;
    for (const Op& op : program.ops) work += work_of(op, program);
    if (!(work <= most)) refuse("work", work, most, "steps");
}

void check_memory(double bytes, const Limits& limits) {
    if (!(bytes <= double(limits.memory))) refuse("memory", bytes, double(limits.memory), "bytes");
}

}  // namespace cofire
