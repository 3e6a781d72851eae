// Tests of load_program: one per rule that docs/program.md has for ops. Prints the failures; exit code 0 if none.
#include <string>

#include "broken_program.h"

namespace cofire::test {
namespace {

void test_op_members() {
    const Source net = residual_net();
    REFUSED(with_op(net, "flat", "\"flatten\"", "\"reshape\""),
            "op 4 (\"flat\"): kind must be one of conv affine act add mul cat move pool flatten rescale deconv "
            "resample strided reduce softmax norm conv8 quantize dequantize, got \"reshape\"");
    REFUSED(with_op(net, "flat", "\"kind\":\"flatten\",", ""), "op 4: it lacks the key \"kind\"");
    REFUSED(with_op(net, "flat", "\"dst\":4", "\"dst\":4,\"dst2\":4"), "op 4: it has the unknown key \"dst2\"");
    REFUSED(with_op(net, "flat", "\"name\":\"flat\"", "\"name\":4"), "op 4: name must be a string, got 4");
    REFUSED(with_op(net, "flat", "\"attrs\":{}", "\"attrs\":[]"), "op 4 (\"flat\"): attrs must be an object");
    REFUSED(with_op(net, "flat", "\"attrs\":{}", "\"attrs\":{\"x\":1}"),
            "op 4 (\"flat\"): attrs has the unknown key \"x\"");
    REFUSED(with_op(net, "flat", "\"weights\":[]", "\"weights\":{}"), "op 4 (\"flat\"): weights must be a list");
    REFUSED(with_op(net, "flat", "\"weights\":[]", "\"weights\":[\"a\"]"), "weights must have 0 entries, got 1");
    REFUSED(with_op(net, "fc", "\"fc.weight\",", ""), "op 5 (\"fc\"): weights must have 2 entries, got 1");
    REFUSED(with_op(net, "fc", "\"fc.weight\"", "7"), "op 5 (\"fc\"): a tensor's name must be a string, got 7");
    REFUSED(with_op(net, "fc", "\"kernel\":[1,1],", ""), "op 5 (\"fc\"): attrs lacks the key \"kernel\"");
}

void test_order() {
    const Source net = residual_net();
    REFUSED(with_op(net, "gap", "[1]", "[6]"), "op 3 (\"gap\"): each of src must be an integer from 0 to 5, got 6");
    REFUSED(with_op(net, "gap", "\"dst\":3", "\"dst\":6"), "op 3 (\"gap\"): dst must be an integer from 0 to 5, got 6");
    REFUSED(with_op(net, "gap", "[1]", "[4]"), "op 3 (\"gap\"): src 4 must be written before it is read");
    REFUSED(with_op(net, "flat", "\"dst\":4", "\"dst\":3"), "op 4 (\"flat\"): dst 3 must not be in src");
    // Two ops with one output; the program's input as an output; an act in place.
    Source twice = net;
    twice.ops.push_back(replaced(net.ops[4], "\"flat\"", "\"again\""));
    REFUSED(twice, "op 6 (\"again\"): dst 4 must not be written by an earlier op");
    Source input = elementwise_net();
    input.ops.push_back(replaced(replaced(input.ops[1], "\"act\",\"src\"", "\"x\",\"src\""), "\"dst\":2", "\"dst\":0"));
    REFUSED(input, "op 8 (\"x\"): dst must not be the program's input, got 0");
    input.ops.back() = replaced(input.ops.back(), "\"dst\":0", "\"dst\":1");
    REFUSED(input, "op 8 (\"x\"): dst 1 must not be in src");
}

void test_in_place() {
    // 4 channels in and out, so that a conv can have its source as its residual.
    Source net = residual_net();
    const std::string conv =
        replaced(replaced(net.ops[0], "\"stem\"", "\"x\""), "\"residual\":false", "\"residual\":true");
    const auto named = [&](const std::string& name, const std::string& src_and_dst) {
        add_tensor(&net, name + ".weight", {4, 4, 3, 3});
        add_tensor(&net, name + ".bias", {4});
        std::string op = replaced(replaced(conv, "\"x\"", "\"" + name + "\""), "[0],\"dst\":1", src_and_dst);
        for (const char* weight : {".weight", ".bias"}) op = replaced(op, std::string("stem") + weight, name + weight);
        net.ops.push_back(op);
    };
    named("x", "[1,1],\"dst\":1");
    REFUSED(net, "op 6 (\"x\"): dst 1 must not be in src");
    net.head = replaced(net.head, "[5,1,1]],", "[5,1,1],[4,8,8],[4,8,8]],");
    net.ops.back() = replaced(net.ops.back(), "\"dst\":1", "\"dst\":6");
    named("y", "[6,1],\"dst\":7");
    named("z", "[6,7],\"dst\":7");
    LOADS(net);
    net.ops.back() = replaced(net.ops.back(), "[6,7],\"dst\":7", "[7,6],\"dst\":7");
    REFUSED(net, "op 8 (\"z\"): dst 7 must not be in src");
    // The caller's input is not to be written, not even in place.
    Source input = elementwise_net();
    add_conv(&input, "x", {1, 0}, 0, {2, 2, 1, 1}, window_attrs(1, 1, {0, 0, 0, 0}), 1, "none");
    REFUSED(input, "op 8 (\"x\"): dst must not be the program's input, got 0");
}

void test_conv() {
    const Source net = depthwise_net();
    auto with = [&](const char* from, const char* to) { return with_op(net, "dilated", from, to); };
    const std::string op = "op 2 (\"dilated\"): ";
    REFUSED(with("\"kernel\":[3,3]", "\"kernel\":[3]"), op + "kernel must be a list of 2, got a list of 1");
    REFUSED(with("\"kernel\":[3,3]", "\"kernel\":3"), op + "kernel must be a list, got 3");
    REFUSED(with("\"kernel\":[3,3]", "\"kernel\":[3,0]"),
            op + "each of kernel must be an integer from 1 to 1048576, got 0");
    REFUSED(with("\"kernel\":[3,3]", "\"kernel\":[2,3]"), op + "output height must be 6, got 4");
    REFUSED(with("\"kernel\":[3,3]", "\"kernel\":[3,2]"), op + "output width must be 6, got 4");
    REFUSED(with("\"kernel\":[3,3]", "\"kernel\":[9,3]"), op + "the kernel must fit into the padded height");
    REFUSED(with("\"kernel\":[3,3]", "\"kernel\":[3,1048576]"), op + "the kernel must fit into the padded width");
    REFUSED(with("\"stride\":[1,1]", "\"stride\":[1,2]"), op + "output width must be 2, got 4");
    REFUSED(with("\"stride\":[1,1]", "\"stride\":[0,1]"), op + "each of stride must be an integer from 1");
    REFUSED(with("\"padding\":[2,2,2,2]", "\"padding\":[2,2]"), op + "padding must be a list of 4, got a list of 2");
    REFUSED(with("\"padding\":[2,2,2,2]", "\"padding\":[2,2,2,-1]"), op + "each of padding must be an integer from 0");
    REFUSED(with("\"padding\":[2,2,2,2]", "\"padding\":[1048576,2,2,2]"),
            op + "each of padding must be an integer from 0");
    REFUSED(with("\"padding\":[2,2,2,2]", "\"padding\":[1,2,2,2]"), op + "output height must be 3, got 4");
    LOADS(with("\"padding\":[2,2,2,2]", "\"padding\":[4,0,0,4]"));
    REFUSED(with("\"dilation\":[2,2]", "\"dilation\":[2,1]"), op + "output width must be 6, got 4");
    REFUSED(with_op(net, "expand", "\"padding\":[0,0,0,0]", "\"padding\":[1000000,0,0,0]"),
            "output height must be 1000007");
    REFUSED(with("\"dilation\":[2,2]", "\"dilation\":[0,2]"), op + "each of dilation must be an integer from 1");
    REFUSED(with("\"dilation\":[2,2]", "\"dilation\":[1048576,2]"), op + "the kernel must fit into the padded height");
    REFUSED(with("\"groups\":2", "\"groups\":3"), op + "groups must divide the channels 8 and 4, got 3");
    REFUSED(with("\"groups\":2", "\"groups\":8"), op + "groups must divide the channels 8 and 4, got 8");
    REFUSED(with("\"groups\":2", "\"groups\":0"), op + "groups must be an integer from 1");
    REFUSED(with("\"groups\":2", "\"groups\":4"),
            "\"dilated.weight\" must have the shape [4, 2, 3, 3], got [4, 4, 3, 3]");
    REFUSED(with("\"dilated.bias\"", "\"fc.bias\""), op + "the tensor \"fc.bias\" must have the shape [4], got [3]");
    REFUSED(with("\"act\":\"none\"", "\"act\":\"exp\""), op + "act must be one of none relu relu6 leaky silu");
    REFUSED(with("\"act\":\"none\"", "\"act\":\"gelu\""), op + "act must be one that version 1 has, got \"gelu\"");
    REFUSED(with("\"act\":\"none\"", "\"act\":0"), op + "act must be one of");
    REFUSED(with("\"slope\":0.0", "\"slope\":0.1"), op + "slope must be 0 where act is not leaky, got 0.1");
    REFUSED(with("\"residual\":false", "\"residual\":0"), op + "residual must be true or false, got 0");
    REFUSED(with("\"residual\":false", "\"residual\":true"), op + "src must have 2 entries, got 1");
    REFUSED(with("[3]", "[3,3]"), op + "src must have 1 entries, got 2");
    REFUSED(with("[3]", "[]"), op + "src must have 1 entries, got 0");
}

void test_residual() {
    const Source net = residual_net();
    for (const char* act : {"none", "relu", "relu6", "leaky", "silu", "hardswish"})
        LOADS(with_op(net, "conv2", "\"relu\"", "\"" + std::string(act) + "\""));
    for (const char* act : {"sigmoid", "hardsigmoid"})
        REFUSED(with_op(net, "conv2", "\"relu\"", "\"" + std::string(act) + "\""),
                "op 2 (\"conv2\"): act after a residual must be zero at zero");
    REFUSED(with_op(net, "conv2", "[2,1]", "[2,0]"),
            "op 2 (\"conv2\"): the residual's shape must be [4, 8, 8], got [3, 8, 8]");
}

void test_affine() {
    const Source net = elementwise_net();
    auto with = [&](const char* from, const char* to) { return with_op(net, "norm", from, to); };
    const std::string op = "op 0 (\"norm\"): ";
    REFUSED(with("\"dst\":1", "\"dst\":5"), op + "the output's shape must be [2, 6, 5], got [4, 6, 5]");
    REFUSED(with("\"lift\":true", "\"lift\":null"), op + "lift must be true or false, got null");
    REFUSED(with("\"lift\":true,", ""), op + "attrs lacks the key \"lift\"");
    REFUSED(with("\"scale\",", ""), op + "weights must have 2 entries, got 1");
    REFUSED(with("\"scale\"", "\"head\""), op + "the tensor \"head\" must have the shape [2], got [2, 2]");
    REFUSED(with("[0]", "[0,0]"), op + "src must have 1 entries, got 2");
}

void test_elementwise() {
    const Source net = elementwise_net();
    REFUSED(with_op(net, "act", "\"dst\":2", "\"dst\":3"),
            "op 1 (\"act\"): the output's shape must be [2, 6, 5], got [2, 1");
    REFUSED(with_op(net, "act", "[1]", "[1,1]"), "op 1 (\"act\"): src must have 1 entries, got 2");
    REFUSED(with_op(net, "act", "\"act\":\"sigmoid\",", ""), "op 1 (\"act\"): attrs lacks the key \"act\"");
    REFUSED(with_op(net, "add", "[4,1]", "[4]"), "op 4 (\"add\"): src must have 2 entries, got 1");
    REFUSED(with_op(net, "add", "[4,1]", "[3,1]"),
            "op 4 (\"add\"): the output's shape must be [2, 1, 1], got [2, 6, 5]");
    LOADS(with_op(net, "add", "[4,1]", "[4,3]"));
    Source shapes = net;
    add_op(&shapes, "mul", "x", {1, 7}, 9, act_attrs("none"));
    shapes.head = replaced(shapes.head, "[2,6,5]],", "[2,6,5],[2,6,5]],");
    REFUSED(shapes, "op 8 (\"x\"): the shape of src[1] must be [2, 6, 5], got [6, 3, 2]");
}

void test_cat_and_flatten() {
    const Source net = elementwise_net();
    REFUSED(with_op(net, "cat", "[8,0]", "[]"), "op 5 (\"cat\"): src must have 1 entry at least, got 0");
    REFUSED(with_op(net, "cat", "[8,0]", "[8]"), "op 5 (\"cat\"): output must have 2 channels, got 4");
    REFUSED(with_op(net, "cat", "[8,0]", "[8,0,1]"), "op 5 (\"cat\"): output must have 6 channels, got 4");
    REFUSED(with_op(net, "cat", "[8,0]", "[8,3]"),
            "op 5 (\"cat\"): the shape of each src must be [2, 6, 5], got [2, 1, 1]");
    LOADS(with_op(net, "cat", "[8,0]", "[8,8]"));
    REFUSED(with_op(residual_net(), "flat", "[3]", "[1]"),
            "op 4 (\"flat\"): the output's shape must be [256, 1, 1], got [4, 1, 1]");
}

void test_move() {
    const Source net = elementwise_net();
    auto with = [&](const char* from, const char* to) { return with_op(net, "move", from, to); };
    const std::string op = "op 6 (\"move\"): ";
    REFUSED(with("[-1,3,2,1,0,-1]", "[-1,3,2,1,0]"), op + "channels must be a list of 6, got a list of 5");
    REFUSED(with("[-1,3,2,1,0,-1]", "[-1,4,2,1,0,-1]"), op + "each of channels must be an integer from -1 to 3, got 4");
    REFUSED(with("[-1,3,2,1,0,-1]", "[-2,3,2,1,0,-1]"),
            op + "each of channels must be an integer from -1 to 3, got -2");
    REFUSED(with("\"stride\":[1,1]", "\"stride\":[1,0]"), op + "each of stride must be an integer from 1");
    REFUSED(with("\"stride\":[1,1]", "\"stride\":[1048576,1]"),
            op + "stride times output size must be at most 4194304");
    REFUSED(with("\"offset\":[0,-1]", "\"offset\":[0,-1048577]"),
            op + "each of offset must be an integer from -1048576");
    REFUSED(with("[5]", "[5,5]"), op + "src must have 1 entries, got 2");
    LOADS(with("\"stride\":[1,1],\"offset\":[0,-1]", "\"stride\":[2,3],\"offset\":[-100,1048576]"));
}

// A program of one pool over a map of (1, size, 1).
Source pool_net(int size, int out, int kernel, int stride, int before, int after, int dilation) {
    Source net;
    net.head = "\"version\":1,\"input\":0,\"output\":1,\"output_shape\":" + list({1, out, 1}) + ",\"buffers\":[" +
               list({1, size, 1}) + "," + list({1, out, 1}) + "],\"groups\":[],\"threshold\":0";
    add_op(&net, "pool", "p", {0}, 1,
           "\"op\":\"max\",\"kernel\":" + list({kernel, 1}) + ",\"stride\":" + list({stride, 1}) +
               ",\"padding\":" + list({before, 0, after, 0}) + ",\"dilation\":" + list({dilation, 1}) +
               ",\"include_pad\":false,\"adaptive\":false");
    return net;
}

void test_pool() {
    const Source net = elementwise_net();
    auto with = [&](const char* from, const char* to) { return with_op(net, "pool", from, to); };
    const std::string op = "op 7 (\"pool\"): ";
    REFUSED(with("\"op\":\"max\"", "\"op\":\"sum\""), op + "op must be one of avg max, got \"sum\"");
    REFUSED(with("\"include_pad\":false", "\"include_pad\":0"), op + "include_pad must be true or false");
    REFUSED(with("\"adaptive\":false", "\"adaptive\":true"),
            op + "an adaptive pool must have kernel, stride and dilation 1");
    REFUSED(with_op(net, "squeeze", "[0,0,0,0]", "[0,0,1,0]"), "op 2 (\"squeeze\"): an adaptive pool must have");
    REFUSED(with("[6]", "[5]"), op + "output must have 4 channels, got 6");
    REFUSED(with("[6]", "[6,6]"), op + "src must have 1 entries, got 2");
    REFUSED(with("\"kernel\":[2,2]", "\"kernel\":[4,2]"), op + "output height must be 2 or 2, got 3");
    REFUSED(with("\"stride\":[2,2]", "\"stride\":[2,1]"), op + "output width must be 4 or 4, got 2");
    LOADS(pool_net(7, 3, 2, 2, 0, 0, 1));
    LOADS(pool_net(7, 4, 2, 2, 0, 0, 1));  // ceil mode
    REFUSED(pool_net(7, 5, 2, 2, 0, 0, 1), "op 0 (\"p\"): output height must be 3 or 4, got 5");
    LOADS(pool_net(1, 1, 2, 2, 0, 0, 1));  // ceil mode with a window larger than the map
    REFUSED(pool_net(1, 1, 9, 2, 0, 0, 1), "output height must be -3 or -3, got 1");
    // Windows with nothing in them: in the padding before and behind, and between the taps.
    const std::string empty = "op 0 (\"p\"): each window must contain an element of the map, along the height";
    REFUSED(pool_net(4, 6, 1, 1, 1, 1, 1), empty);
    REFUSED(pool_net(4, 5, 1, 1, 1, 0, 1), empty);
    REFUSED(pool_net(4, 5, 1, 1, 0, 1, 1), empty);
    REFUSED(pool_net(3, 1, 2, 1, 1, 1, 4), empty);
    LOADS(pool_net(4, 5, 2, 1, 1, 1, 1));
    REFUSED(pool_net(4, 4, 2, 2, 1, 3, 1), empty);
    REFUSED(pool_net(2, 2, 2, 3, 0, 2, 1), empty);  // only ceil mode's last window is empty
    LOADS(pool_net(5, 2, 2, 4, 0, 0, 1));           // ceil mode's last window holds one element
}

// Every small window, against a count of the elements by hand.
void test_pool_exhaustively() {
    for (int code = 0; code < 6 * 7 * 4 * 4 * 4 * 4 * 4; ++code) {
        int rest = code;
        auto digit = [&](int base) {
            const int value = rest % base;
            rest /= base;
            return value;
        };
        const int size = 1 + digit(6), out = 1 + digit(7), kernel = 1 + digit(4), stride = 1 + digit(4);
        const int before = digit(4), after = digit(4), dilation = 1 + digit(4);
        bool right = true;
        for (int i = 0; i < out; ++i) {
            int inside = 0;
            for (int tap = 0; tap < kernel; ++tap) {
                const int at = i * stride - before + tap * dilation;
                inside += at >= 0 && at < size;
            }
            right &= inside > 0;
        }
        const int span = dilation * (kernel - 1) + 1, padded = size + before + after;
        const int last = (out - 1) * stride + span;  // where the last window ends
        right &= last - stride < padded && last + stride > padded;
        bool loaded = true;
        try {
            load(pool_net(size, out, kernel, stride, before, after, dilation));
        } catch (const std::runtime_error&) {
            loaded = false;
        }
        if (loaded != right) {
            CHECK(loaded == right);
            return;
        }
    }
    CHECK(true);
}

// Sizes at the limits: neither overflow nor a long wait.
void test_limits() {
    const int most = 1 << 20;
    LOADS(pool_net(most, most, 1, 1, 0, 0, 1));
    LOADS(pool_net(most, most, most, 1, most / 2, most / 2 - 1, 1));
    REFUSED(pool_net(most, most, most, most, most - 1, most - 1, most), "output height must be");
    LOADS(pool_net(1, 1, most, most, most - 1, 0, 1));
    // What is padded, and what a window spans, is limited as a whole too.
    auto both = [](const Source& net, int before, int kernel, int dilation, int stride, int after) {
        const std::string b = std::to_string(before), a = std::to_string(after);
        std::string op = net.ops[0].substr(0, net.ops[0].find("\"kernel\""));
        op += "\"kernel\":" + list({kernel, kernel}) + ",\"stride\":" + list({stride, stride}) + ",\"padding\":[" + b +
              "," + b + "," + a + "," + a + "],\"dilation\":" + list({dilation, dilation}) +
              ",\"include_pad\":false,\"adaptive\":false},\"weights\":[],\"gate\":null}";
        Source result = net;
        result.ops[0] = op;
        return result;
    };
    const Source small = pool_net(1, 1, 1, 1, 0, 0, 1);
    LOADS(both(small, 8191, 16383, 1, 1, 8191));
    REFUSED(both(small, 8192, 16385, 1, 1, 8192),
            "op 0 (\"p\"): the padded map must have at most 268435456 elements, got [1, 16385");
    REFUSED(both(small, 0, 2, 100000, 1 << 20, 0),
            "op 0 (\"p\"): a window must span at most 268435456 elements, got [100001");
    // A stride or dilation without effect is dropped: no engine has to cope with it.
    const Op dropped = load(both(small, 0, 1, 1 << 20, 1 << 20, 0)).ops[0];
    CHECK(dropped.stride.h == 1 && dropped.stride.w == 1 && dropped.dilation.h == 1 && dropped.dilation.w == 1);
    CHECK(load(depthwise_net()).ops[1].stride.h == 2);
    Source deep = pool_net(1, 1, 1, 1, 0, 0, 1);
    deep.head = replaced(deep.head, "\"groups\":[]", "\"groups\":" + std::string(100, '[') + std::string(100, ']'));
    REFUSED(deep, "nested too deeply");
}

}  // namespace
}  // namespace cofire::test

int main() {
    cofire::test::test_op_members();
    cofire::test::test_order();
    cofire::test::test_in_place();
    cofire::test::test_conv();
    cofire::test::test_residual();
    cofire::test::test_affine();
    cofire::test::test_elementwise();
    cofire::test::test_cat_and_flatten();
    cofire::test::test_move();
    cofire::test::test_pool();
    cofire::test::test_pool_exhaustively();
    cofire::test::test_limits();
    return cofire::test::summary();
}
