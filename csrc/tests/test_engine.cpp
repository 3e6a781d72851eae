// Runs small programs with every kernel set and every algorithm, by one thread and by several, and compares with "ref".
// All arrays lie on the heap, exactly as large as they must be: meant for the sanitizers. Exit code 0 if all is well.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "../conv.h"
#include "../engine.h"

namespace cofire::test {
namespace {

std::atomic<int> failures{0};

void check(bool ok, const std::string& what) {
    if (ok) return;
    ++failures;
    std::printf("FAILED %s\n", what.c_str());
}

// In -1 .. 1; always the same.
class Numbers {
   public:
    explicit Numbers(uint32_t seed) : state_(seed * 2654435761u + 1) {}

    float next() {
        state_ = state_ * 1664525u + 1013904223u;
        return float(int32_t(state_)) / 2147483648.0f;
    }

    std::vector<float> list(int64_t n) {
        std::vector<float> found(n);
        for (float& value : found) value = next();
        return found;
    }

   private:
    uint32_t state_;
};

// ---- Programs ----

// Ops one after the other. Weights are put in place at the end: until then ops only say how many they need.
class Maker {
   public:
    explicit Maker(Shape input) { program_.buffers.push_back(input); }

    int conv(std::vector<int> src, int filters, int kernel, int stride, int padding, Act act, int groups = 1,
             int dilation = 1, bool in_place = false) {
        const Shape x = program_.buffers[src[0]];
        const auto side = [&](int n) { return (n + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1; };
        Op op{};
        op.kind = Kind::conv;
        op.kernel = {kernel, kernel}, op.stride = {stride, stride}, op.dilation = {dilation, dilation};
        op.padding = {padding, padding, padding, padding};
        op.groups = groups, op.residual = src.size() > 1, op.act = act, op.slope = act == Act::leaky ? 0.1f : 0;
        op.src = std::move(src);
        needs_.push_back({int64_t(filters) * (x.c / groups) * kernel * kernel, filters});
        return add(op, {filters, side(x.h), side(x.w)}, in_place ? op.src[1] : -1);
    }

    int elementwise(Kind kind, std::vector<int> src, Act act, bool lift = false) {
        Op op{};
        op.kind = kind, op.act = act, op.lift = lift;
        op.src = std::move(src);
        const Shape shape = program_.buffers[op.src[0]];
        const int64_t need = kind == Kind::affine ? shape.c : 0;
        needs_.push_back({need, need});
        return add(op, shape);
    }

    int cat(std::vector<int> src) {
        Op op{};
        op.kind = Kind::cat;
        op.src = std::move(src);
        Shape shape = program_.buffers[op.src[0]];
        shape.c = 0;
        for (int source : op.src) shape.c += program_.buffers[source].c;
        needs_.push_back({0, 0});
        return add(op, shape);
    }

    int move(int src, std::vector<int> channels, int stride, int offset, Shape shape) {
        Op op{};
        op.kind = Kind::move;
        op.src = {src};
        op.channels = std::move(channels), op.stride = {stride, stride}, op.offset = {offset, offset};
        needs_.push_back({0, 0});
        return add(op, shape);
    }

    int pool(int src, bool maximum, int kernel, int stride, int padding) {
        const Shape x = program_.buffers[src];
        const auto side = [&](int n) { return (n + 2 * padding - kernel) / stride + 1; };
        Op op{};
        op.kind = Kind::pool, op.maximum = maximum, op.src = {src};
        op.kernel = {kernel, kernel}, op.stride = {stride, stride}, op.padding = {padding, padding, padding, padding};
        needs_.push_back({0, 0});
        return add(op, {x.c, side(x.h), side(x.w)});
    }

    int global(int src, bool maximum) {
        Op op{};
        op.kind = Kind::pool, op.maximum = maximum, op.adaptive = true, op.src = {src};
        needs_.push_back({0, 0});
        return add(op, {program_.buffers[src].c, 1, 1});
    }

    int flatten(int src) {
        Op op{};
        op.kind = Kind::flatten, op.src = {src};
        needs_.push_back({0, 0});
        return add(op, {int(program_.buffers[src].size()), 1, 1});
    }

    // The last op gets a gate: a head of its own, or the mask of a group that was decided before.
    Maker& gate(bool avg, bool softmax, bool bias) {
        Head head{};
        head.source = -1, head.rows = -1;
        head.pooling = avg ? Pooling::avg : Pooling::max, head.softmax = softmax;
        return gate(head, bias);
    }
    // A source or rows of -1 are the usual ones.
    Maker& gate(Head head, bool bias) {
        Op& op = program_.ops.back();
        const int filters = program_.buffers[op.dst].c;
        op.group = int(program_.groups.size()), op.decides = true, op.head = head;
        if (head.source < 0) op.head.source = op.src[0];
        if (head.rows < 0) op.head.rows = filters;
        program_.groups.push_back({"group" + std::to_string(op.group), filters});
        const int64_t inputs = op.head.inputs(program_.buffers[op.head.source]);
        heads_.push_back({op.head.rows * inputs, bias ? op.head.rows : 0});
        return *this;
    }
    Maker& gate_as(int group) {
        program_.ops.back().group = group;
        return *this;
    }
    // The last op, a conv, uses its group's factors.
    void rescaled() { needs_.back().shift = needs_.back().bias; }

    int rescale(int src, int group, Act act) {
        Op op{};
        op.kind = Kind::rescale, op.src = {src}, op.act = act, op.lift = true, op.group = group;
        const Shape shape = program_.buffers[src];
        needs_.push_back({0, 0, shape.c});
        return add(op, shape);
    }

    Program done(uint32_t seed) {
        program_.output = program_.ops.back().dst;
        program_.forms.resize(program_.buffers.size());
        const Shape out = program_.buffers[program_.output];
        program_.output_shape = {out.c, out.h, out.w};
        int64_t total = 0;
        for (const auto& list : {needs_, heads_})
            for (const Need& need : list) total += need.weight + need.bias + need.shift;
        const std::vector<float> numbers = Numbers(seed).list(total);
        program_.weights = Floats(int64_t(total));
        std::copy(numbers.begin(), numbers.end(), program_.weights.data());
        float* at = program_.weights.data();
        const auto take = [&](int64_t n, int64_t inputs) {
            for (int64_t i = 0; i < n; ++i) at[i] /= std::sqrt(float(inputs));
            return (at += n) - n;
        };
        for (size_t i = 0, group = 0; i < program_.ops.size(); ++i) {
            Op& op = program_.ops[i];
            const Need need = needs_[i];
            op.weight = take(need.weight, need.bias ? need.weight / need.bias : 1);
            op.bias = take(need.bias, 1);
            if (op.kind == Kind::affine && !op.lift) std::fill(at - need.bias, at, 0.0f);
            if (need.shift) op.shift = take(need.shift, 1);
            if (!op.decides) continue;
            op.head.weight = take(heads_[group].weight, 1);
            op.head.bias = heads_[group].bias ? take(heads_[group].bias, 1) : nullptr;
            ++group;
        }
        return std::move(program_);
    }

   private:
    struct Need {
        int64_t weight, bias, shift = 0;
    };

    int add(const Op& op, Shape shape, int dst = -1) {
        program_.ops.push_back(op);
        Op& added = program_.ops.back();
        added.name = "op" + std::to_string(program_.ops.size() - 1);
        added.dst = dst < 0 ? int(program_.buffers.size()) : dst;
        if (dst < 0) program_.buffers.push_back(shape);
        return added.dst;
    }

    Program program_;
    std::vector<Need> needs_, heads_;
};

// Residual blocks with gates, in place and not; maps large enough that threads take tile rows of their own.
Program residual_net() {
    Maker net({3, 33, 30});
    const int stem = net.conv({0}, 13, 3, 1, 1, Act::relu);
    const int one = net.conv({stem}, 11, 3, 1, 1, Act::relu);
    net.gate(false, true, true);
    const int two = net.conv({one, stem}, 13, 3, 1, 1, Act::relu, 1, 1, true);
    net.gate(true, false, false);
    const int three = net.conv({two}, 7, 1, 1, 0, Act::leaky);
    net.gate(false, false, true);
    const int four = net.conv({three, two}, 13, 3, 1, 1, Act::silu);
    net.gate(false, true, false);
    const int pooled = net.pool(four, true, 3, 2, 1);
    const int five = net.conv({pooled}, 19, 3, 2, 1, Act::relu6);
    net.gate(false, true, true);
    const int six = net.conv({five}, 9, 3, 2, 1, Act::hardswish);
    const int last = net.conv({net.flatten(net.global(six, false))}, 5, 1, 1, 0, Act::none);
    net.elementwise(Kind::act, {last}, Act::none);
    return net.done(1);
}

// Depthwise, grouped, dilated; several ops under one mask; a linear layer on a map.
Program depthwise_net() {
    Maker net({2, 17, 15});
    const int one = net.conv({0}, 12, 1, 1, 0, Act::relu6);
    net.gate(true, true, true);
    const int two = net.conv({one}, 12, 3, 2, 1, Act::hardsigmoid, 12);
    net.gate_as(0);
    const int three = net.conv({two}, 8, 3, 1, 2, Act::none, 4, 2);
    const int four = net.conv({three}, 16, 5, 3, 2, Act::relu, 8);
    net.gate(false, false, false);
    const std::vector<int> as_is{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int narrow = net.move(four, as_is, 1, 0, {16, 5, 1});  // lines much shorter than a vector
    const int small = net.move(net.conv({narrow}, 16, 3, 1, 1, Act::none, 16), as_is, 1, 0, {16, 3, 3});
    const int five = net.conv({small}, 20, 3, 1, 1, Act::relu);
    net.conv({five}, 6, 3, 1, 0, Act::sigmoid);
    return net.done(2);
}

// Everything that is no conv.
Program elementwise_net() {
    Maker net({4, 6, 9});
    const int lifted = net.elementwise(Kind::affine, {0}, Act::leaky, true);
    net.gate(false, false, true);
    const int scaled = net.elementwise(Kind::affine, {lifted}, Act::none);
    const int bent = net.elementwise(Kind::act, {scaled}, Act::sigmoid);
    net.gate_as(0);
    const int squeezed = net.global(bent, true);
    const int product = net.elementwise(Kind::mul, {scaled, squeezed}, Act::hardswish);
    const int sum = net.elementwise(Kind::add, {product, lifted}, Act::silu);
    const int joined = net.cat({sum, 0, product});
    const int moved = net.move(joined, {-1, 11, 3, 3, 0, 7, -1}, 2, -3, {7, 5, 8});
    const int averaged = net.pool(moved, false, 3, 2, 1);
    net.flatten(averaged);
    net.gate(true, true, false);
    return net.done(3);
}

// Every form of a head: magnitudes of what may be below zero and of what is not, maxima with means, the largest few,
// one row for a whole branch that reads another buffer; factors in convs of every kind and in an op of their own.
Program policy_net() {
    Maker net({3, 18, 17});
    const auto head = [](Pooling pooling, int top, bool scale, int source = -1, int rows = -1) {
        Head made{};
        made.pooling = pooling, made.top = top, made.scale = scale, made.source = source, made.rows = rows;
        return made;
    };
    const int stem = net.conv({0}, 12, 3, 1, 1, Act::relu);
    net.gate(head(Pooling::abs, 7, true), true).rescaled();
    const int features = net.global(stem, false);
    const int one = net.conv({stem}, 12, 3, 1, 1, Act::leaky);
    net.gate(head(Pooling::abs, 0, true), true).rescaled();
    const int two = net.conv({one, stem}, 12, 3, 1, 1, Act::relu, 1, 1, true);
    net.gate(head(Pooling::both, 5, true), false).rescaled();
    const int three = net.conv({two}, 12, 3, 1, 1, Act::relu6, 12);
    net.gate(head(Pooling::both, 9, true), true).rescaled();
    const int again = net.rescale(three, 3, Act::silu);
    const int four = net.conv({again}, 16, 1, 1, 0, Act::relu);
    net.gate(head(Pooling::max, 0, true, features, 1), true).rescaled();
    const int five = net.conv({four}, 12, 1, 1, 0, Act::none);
    net.gate(head(Pooling::avg, 12, false, two), true);
    const int six = net.conv({five, two}, 12, 1, 1, 0, Act::relu, 1, 1, true);
    net.gate(head(Pooling::avg, 0, false, features, 1), true);
    const int seven = net.conv({net.global(six, true)}, 9, 1, 1, 0, Act::none);
    net.gate(head(Pooling::abs, 4, true, six), true).rescaled();
    net.conv({seven}, 5, 1, 1, 0, Act::none);
    return net.done(4);
}

using Make = Program (*)();
struct Named {
    const char* name;
    Make make;
};
const Named kPrograms[] = {
    {"elementwise", elementwise_net}, {"depthwise", depthwise_net}, {"residual", residual_net}, {"policy", policy_net}};

// ---- Calls ----

struct Result {
    std::vector<float> output;
    std::vector<std::vector<uint8_t>> masks;
    std::vector<std::vector<float>> logits;
    std::vector<int64_t> macs;

    bool operator==(const Result& other) const {
        return output == other.output && masks == other.masks && logits == other.logits && macs == other.macs;
    }
};

enum class Forcing { none, some, all };

// Images and forced masks follow from the seed.
Result run(const Engine& engine, int batch, int threads, uint32_t seed, Forcing forcing) {
    const Program& program = engine.program();
    Numbers numbers(seed);
    const std::vector<float> input = numbers.list(batch * program.buffers[program.input].size());
    Result result;
    result.output.assign(batch * program.buffers[program.output].size(), std::numeric_limits<float>::quiet_NaN());
    result.macs.assign(batch * program.ops.size(), -1);
    std::vector<std::vector<uint8_t>> forced;
    std::vector<uint8_t*> masks;
    std::vector<float*> logits;
    std::vector<const uint8_t*> forced_at;
    for (const Group& group : program.groups) {
        result.masks.emplace_back(batch * group.filters, uint8_t(9));
        result.logits.emplace_back(batch * group.filters);
        forced.emplace_back(batch * group.filters);
        for (uint8_t& on : forced.back()) on = numbers.next() > 0;
    }
    for (size_t g = 0; g < forced.size(); ++g) {
        const bool is_forced = forcing == Forcing::all || (forcing == Forcing::some && g % 2 == 0);
        masks.push_back(result.masks[g].data());
        logits.push_back(result.logits[g].data());
        forced_at.push_back(is_forced ? forced[g].data() : nullptr);
    }
    Call call{};
    call.input = input.data(), call.output = result.output.data(), call.batch = batch, call.threads = threads;
    call.forced = forced_at.data(), call.masks = masks.data(), call.logits = logits.data(),
    call.macs = result.macs.data();
    engine.run(call);
    return result;
}

bool close(const std::vector<float>& one, const std::vector<float>& other) {
    for (size_t i = 0; i < one.size(); ++i)
        if (!(std::fabs(one[i] - other[i]) <= 1e-4f * (1 + std::fabs(other[i])))) return false;
    return one.size() == other.size();
}

// Every conv with the given algorithm where it can run with it, elsewhere with the first that can.
std::string tuning_with(const Program& program, const std::string& algorithm) {
    std::string text;
    for (const Op& op : program.ops) {
        std::string word = "-";
        if (op.kind == Kind::conv) {
            const std::vector<std::string> can =
                fitting_algorithms(op, program.buffers[op.src[0]], program.buffers[op.dst]);
            word = std::find(can.begin(), can.end(), algorithm) != can.end() ? algorithm : can[0];
        }
        text += (text.empty() ? "" : " ") + word;
    }
    return text;
}

std::unique_ptr<Engine> engine_of(Make make, const std::string& kernel, const std::string& tuning) {
    try {
        return std::make_unique<Engine>(make(), kernel, tuning);
    } catch (const std::runtime_error&) {
        return nullptr;  // not for this CPU
    }
}

// ---- Tests ----

void test_engine(const Engine& engine, const Engine& reference, const std::string& name) {
    for (const int batch : {1, 8}) {
        const Result wanted = run(reference, batch, 1, 7, Forcing::all);
        const Result found = run(engine, batch, 1, 7, Forcing::all);
        check(close(found.output, wanted.output), name + ": output");
        check(found.macs == wanted.macs, name + ": MACs");
        check(found.masks == wanted.masks, name + ": masks");
        for (size_t g = 0; g < wanted.logits.size(); ++g)
            check(close(found.logits[g], wanted.logits[g]), name + ": logits");
        for (const Forcing forcing : {Forcing::all, Forcing::some, Forcing::none}) {
            const Result alone = run(engine, batch, 1, 8, forcing);
            for (int threads = 1; threads <= 4; ++threads)
                check(run(engine, batch, threads, 8, forcing) == alone,
                      name + ": " + std::to_string(threads) + " threads");
        }
    }
}

void test_side_by_side(const Engine& engine, const std::string& name) {
    constexpr int kCallers = 8, kRounds = 5;
    std::vector<Result> wanted;
    for (int caller = 0; caller < kCallers; ++caller)
        wanted.push_back(run(engine, 1 + caller % 3, 1, caller, Forcing::some));
    std::vector<std::thread> callers;
    for (int caller = 0; caller < kCallers; ++caller)
        callers.emplace_back([&, caller] {
            for (int round = 0; round < kRounds; ++round) {
                const Result found = run(engine, 1 + caller % 3, 1 + (caller + round) % 2, caller, Forcing::some);
                check(found == wanted[caller], name + ": caller " + std::to_string(caller));
            }
        });
    for (std::thread& caller : callers) caller.join();
}

// A call may leave out all but input and output; a profile is one thread's; no image at all is no error.
void test_bare_calls() {
    const Engine engine(residual_net());
    const Program& program = engine.program();
    const std::vector<float> input(2 * program.buffers[program.input].size(), 0.5f);
    std::vector<float> output(2 * program.buffers[program.output].size(), -1), again(output);
    std::vector<double> seconds(program.ops.size());
    Call call{};
    call.input = input.data(), call.output = output.data(), call.batch = 2, call.threads = 2;
    engine.run(call);
    call.output = again.data(), call.seconds = seconds.data();
    engine.run(call);
    check(output == again, "a call without masks");
    check(*std::min_element(seconds.begin(), seconds.end()) >= 0, "seconds");
    call.batch = 0, call.output = nullptr, call.input = nullptr;
    engine.run(call);
}

// Dead planes and scratch may hold anything: here they do.
void test_not_a_number(const Engine& engine, const std::string& name) {
    const Program& program = engine.program();
    const std::vector<float> input(program.buffers[program.input].size(), std::numeric_limits<float>::quiet_NaN());
    std::vector<float> output(program.buffers[program.output].size());
    const Result before = run(engine, 1, 2, 5, Forcing::all);
    Call call{};
    call.input = input.data(), call.output = output.data(), call.threads = 2;
    engine.run(call);
    check(run(engine, 1, 2, 5, Forcing::all) == before, name + ": an image after one of NaN");
}

int test_all() {
    int engines = 0;
    for (const Named& program : kPrograms) {
        const std::unique_ptr<Engine> reference = engine_of(program.make, "ref", "");
        for (const char* kernel : {"v2", "v3", "v4", "base"})
            for (const ConvAlgorithm& algorithm : conv_algorithms()) {
                if (std::string(algorithm.name) == "ref") continue;  // below, once
                const std::string tuning = tuning_with(reference->program(), algorithm.name);
                const std::string name = std::string(program.name) + " " + kernel + " " + tuning;
                const std::unique_ptr<Engine> engine = engine_of(program.make, kernel, tuning);
                if (!engine) continue;
                check(engine->tuning() == tuning, name + ": tuning");
                test_engine(*engine, *reference, name);
                is_zen5 = !is_zen5;
                test_engine(*engine, *reference, name + " as on another CPU");
                is_zen5 = !is_zen5;
                test_not_a_number(*engine, name);
                test_side_by_side(*engine, name);
                ++engines;
            }
        test_engine(*reference, *reference, std::string(program.name) + " ref");
        const std::unique_ptr<Engine> tuned = engine_of(program.make, "", "");
        test_engine(*tuned, *reference, std::string(program.name) + " tuned");
    }
    test_bare_calls();
    check(engines > 0, "no kernel set runs here");
    std::printf("%d engines, %d failures\n", engines, failures.load());
    return failures > 0;
}

}  // namespace
}  // namespace cofire::test

int main() { return cofire::test::test_all(); }
