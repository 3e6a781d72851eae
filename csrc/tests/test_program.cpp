// Tests of load_program: one per rule of docs/program.md, those of single ops in test_ops.cpp. Prints the failures;
// exit code 0 if none.
#include <string>

#include "broken_program.h"

namespace cofire::test {
namespace {

// ---- Valid files ----

void test_valid_residual() {
    const Program program = load(residual_net());
    CHECK(program.input == 0 && program.output == 5 && program.output_shape == std::vector<int>{5});
    CHECK(program.buffers.size() == 6 && program.buffers[2] == (Shape{6, 8, 8}));
    CHECK(program.groups.size() == 2 && program.groups[0].name == "conv1" && program.groups[1].filters == 4);
    CHECK(program.ops.size() == 6 && program.threshold == 0);
    const Op& conv = program.ops[2];
    CHECK(conv.kind == Kind::conv && conv.name == "conv2" && conv.src == (std::vector<int>{2, 1}) && conv.dst == 1);
    CHECK(conv.residual && conv.act == Act::relu && conv.groups == 1 && conv.kernel.h == 3 && conv.padding.right == 1);
    CHECK(conv.group == 1 && conv.decides && conv.head.pooling == Pooling::avg && !conv.head.softmax &&
          conv.head.bias == nullptr);
    CHECK(conv.head.source == 2 && conv.head.rows == 4 && conv.head.top == 0 && !conv.head.scale && !conv.shift);
    const Head& first = program.ops[1].head;
    CHECK(first.bias != nullptr && first.softmax && first.pooling == Pooling::max && first.inputs({4, 8, 8}) == 4);
    CHECK(program.ops[0].group == -1 && !program.ops[0].decides);
    const TensorText stem = residual_net().tensors[0];
    CHECK(std::vector<float>(program.ops[0].weight, program.ops[0].weight + stem.values.size()) == stem.values);
    CHECK(program.ops[0].weight == program.weights.data());
}

void test_valid_elementwise() {
    const Program program = load(elementwise_net());
    CHECK(program.threshold == -0.25f && program.output_shape == (std::vector<int>{6, 3, 2}));
    CHECK(program.ops[0].kind == Kind::affine && program.ops[0].lift && program.ops[0].slope == 0.1f);
    CHECK(program.ops[3].kind == Kind::mul && program.ops[3].group == 0 && !program.ops[3].decides);
    CHECK(program.ops[6].channels == (std::vector<int>{-1, 3, 2, 1, 0, -1}) && program.ops[6].offset.w == -1);
    CHECK(program.ops[7].maximum && !program.ops[7].adaptive && program.ops[2].adaptive);
}

void test_valid_depthwise() {
    const Program program = load(depthwise_net());
    CHECK(program.output_shape == (std::vector<int>{3, 1, 1}) && program.threshold == 0.5f);
    CHECK(program.ops[1].groups == 8 && program.ops[1].group == 0 && !program.ops[1].decides);
    CHECK(program.ops[2].dilation.h == 2 && program.ops[3].include_pad && !program.ops[3].maximum);
}

void test_valid_quantized() {
    const Program program = load(quantized_net());
    const Op &stem = program.ops[1], &conv2 = program.ops[5];
    CHECK(program.forms[1].u8() && program.forms[1].scale == 0.05f && program.forms[1].zero == 120);
    CHECK(!program.forms[0].u8() && !program.forms[7].u8() && !program.forms[8].u8());
    CHECK(stem.kind == Kind::conv8 && stem.weight8[0] == int8_t(4 * float(int(11) % 11 - 5) / 4));
    CHECK(conv2.residual && conv2.dst == conv2.src[1] && conv2.residual_multiplier == 0.75f);
    CHECK(program.ops[2].low == 9 && program.ops[2].high == 69 && program.ops[2].multiplier[3] == 0.01f);
}

void test_valid_policy() {
    const Program program = load(policy_net());
    const Op &conv1 = program.ops[2], &again = program.ops[3], &conv2 = program.ops[4], &fc = program.ops[6];
    CHECK(conv1.head.pooling == Pooling::both && conv1.head.inputs({4, 8, 8}) == 8 && conv1.head.top == 3);
    CHECK(conv1.head.scale && conv1.head.source == 1 && conv1.head.rows == 6 && conv1.shift != nullptr);
    CHECK(again.kind == Kind::rescale && again.lift && again.shift != nullptr && again.act == Act::leaky);
    CHECK(conv2.head.source == 2 && conv2.head.rows == 1 && conv2.head.top == 0 && conv2.shift == nullptr);
    CHECK(fc.head.pooling == Pooling::abs && fc.head.source == 0 && fc.head.inputs({3, 8, 8}) == 3 && fc.head.softmax);
}

void test_valid_maps() {
    const Program program = load(maps_net());
    CHECK(program.more_outputs.size() == 2 && program.more_outputs[1].buffer == 6 && program.output_size() == 264);
    CHECK(program.ops[0].kind == Kind::deconv && program.ops[0].groups == 2 && program.ops[0].decides);
    CHECK(program.ops[1].norm == Norm::group && program.ops[1].groups == 3);
    CHECK(program.ops[2].rows.size() == 8 && program.ops[2].columns.size() == 6);
    CHECK(program.ops[3].ways == 3 && program.ops[3].log && program.ops[4].reduction == Reduction::avg);
    CHECK(program.ops[5].channels == (std::vector<int>{-1, -1}));  // both are made of three channels
}

void test_valid_variants() {
    // Names beyond ASCII, spaces around the header, keys in another order.
    LOADS(with_op(residual_net(), "flat", "\"flat\"", "\"fl\xC3\xA4t\\u00e4\""));
    LOADS(with_op(residual_net(), "flat", "{\"kind\":\"flatten\",\"name\":\"flat\"",
                  "{\"name\":\"flat\",\"kind\":\"flatten\""));
    const Source net = residual_net();
    CHECK(load(file_of(header_of(program_of(net), net.tensors) + "      ", data_of(net))).ops.size() == 6);
    // A module that is called twice has its weights twice.
    Source shared = elementwise_net();
    shared.ops.push_back("");
    shared.head = replaced(shared.head, "[2,6,5]],", "[2,6,5],[2,6,5]],");
    shared.ops.back() =
        replaced(replaced(shared.ops[0], "\"norm\",\"src\":[0],\"dst\":1", "\"norm#2\",\"src\":[1],\"dst\":9"),
                 shared.ops[0].substr(shared.ops[0].find("\"gate\"")), "\"gate\":null}");
    REFUSED(shared, "op 8 (\"norm#2\"): the tensor \"scale\" must be used only once");
    for (const char* name : {"scale", "shift"}) {
        shared.ops.back() =
            replaced(shared.ops.back(), "\"" + std::string(name) + "\"", "\"" + std::string(name) + "2\"");
        add_tensor(&shared, std::string(name) + "2", {2});
    }
    LOADS(shared);
    LOADS(with_op(residual_net(), "stem", "relu", "leaky"));
    LOADS(with_op(with_op(residual_net(), "stem", "relu", "leaky"), "stem", "\"slope\":0.0", "\"slope\":-1e-3"));
}

// ---- The container ----

void test_container() {
    const Source net = residual_net();
    const std::vector<uint8_t> bytes = file_of(net), data = data_of(net);
    const std::string header = header_of(program_of(net), net.tensors);
    for (size_t size = 0; size < bytes.size(); size += size < 64 ? 1 : 61)
        REFUSED(std::vector<uint8_t>(bytes.begin(), bytes.begin() + long(size)), "invalid program file: ");
    check_refused([] { load_program(nullptr, 0); }, "must have 8 bytes at least, got 0", __LINE__);
    REFUSED(std::vector<uint8_t>(8, 0xFF), "length must be at most 0, got 18446744073709551615");
    REFUSED(file_of("", data), "must begin with '{'");
    REFUSED(file_of(" " + header, data), "must begin with '{'");
    REFUSED(file_of(header + "x", data), "unexpected text after the value");
    REFUSED(file_of("{}", {}), "not a cofire program");
    REFUSED(with_header(net, "cofire.program", "cofire_program"),
            "__metadata__ has the unknown key \"cofire_program\"");
    REFUSED(with_header(net, "{\"cofire.program\"", "{\"a\":\"b\",\"cofire.program\""), "unknown key \"a\"");
    REFUSED(file_of("{\"__metadata__\":{}}", {}), "lacks the key \"cofire.program\"");
    REFUSED(file_of("{\"__metadata__\":[]}", {}), "__metadata__ must be an object, got a list of 0");
    REFUSED(file_of("{\"__metadata__\":{\"cofire.program\":1}}", {}), "cofire.program must be a string, got 1");
    REFUSED(file_of("{\"__metadata__\":{\"cofire.program\":\"{\"}}", {}), "cofire.program: invalid JSON at byte 1");
    REFUSED(file_of("{\"__metadata__\":{\"cofire.program\":\"[]\"}}", {}), "must be an object, got a list of 0");
}

void test_tensor_entries() {
    const Source net = residual_net();
    const std::string stem = "\"stem.weight\":{\"dtype\":\"F32\",\"shape\":[4,3,3,3],\"data_offsets\":[0,432]}";
    auto with_stem = [&](const std::string& from, const std::string& to) {
        return with_header(net, stem, replaced(stem, from, to));
    };
    REFUSED(with_stem("F32", "F16"), "tensor \"stem.weight\": dtype must be one of F32 I8 I32, got \"F16\"");
    REFUSED(with_stem("\"dtype\"", "\"type\""), "tensor \"stem.weight\": entry has the unknown key \"type\"");
    REFUSED(with_stem("\"dtype\":\"F32\",", ""), "tensor \"stem.weight\": entry lacks the key \"dtype\"");
    REFUSED(with_stem("[4,3,3,3]", "[4,3,3,-3]"), "tensor \"stem.weight\": each of shape must be an integer from 0");
    REFUSED(with_stem("[4,3,3,3]", "[4,3,3,2.5]"), "got 2.5");
    REFUSED(with_stem("[4,3,3,3]", "[600,600,600,600]"), "shape must fit into the file");
    REFUSED(with_stem("[4,3,3,3]", "[4,3,3,4]"),
            "data_offsets must span 576 bytes for the shape [4, 3, 3, 4], got 432");
    REFUSED(with_stem("[0,432]", "[0,428]"), "must span 432 bytes");
    REFUSED(with_stem("[0,432]", "[432,0]"), "data_offsets[1] must be an integer from 432");
    REFUSED(with_stem("[0,432]", "[0,1e9]"), "data_offsets[1] must be an integer");
    REFUSED(with_stem("[0,432]", "[0]"), "data_offsets must be a list of 2, got a list of 1");
    REFUSED(with_stem("[0,432]", "[4,436]"), "tensors must lie side by side");
    REFUSED(with_header(net, "[432,448]", "[428,444]"), "tensors must lie side by side");
    std::vector<uint8_t> longer = file_of(net);
    longer.resize(longer.size() + 4);
    REFUSED(longer, "tensors must fill the data");
    REFUSED(with_header(net, stem, stem + "," + stem), "has the key \"stem.weight\" twice");
    Source unused = net;
    add_tensor(&unused, "extra", {2});
    REFUSED(unused, "tensor \"extra\" must be used by an op");
    REFUSED(with_header(net, "\"stem.weight\":{", "\"other\":{"),
            "op 0 (\"stem\"): the tensor \"stem.weight\" must be in");
    std::vector<uint8_t> damaged = file_of(net);
    damaged.back() ^= 1;
    REFUSED(damaged, "the file is damaged");
    REFUSED(with_header(net, "\\\"sha256\\\":\\\"", "\\\"sha256\\\":\\\"0"), "sha256 must be");
}

// ---- The program's members ----

void test_members() {
    const Source net = residual_net();
    REFUSED(with_head(net, "\"version\":1", "\"version\":4"), "file has version 4, this cofire reads 1 to 3: upgrade");
    REFUSED(with_head(net, "\"version\":1", "\"version\":4,\"new\":0"),
            "file has version 4, this cofire reads 1 to 3: upgrade");
    REFUSED(with_head(net, "\"version\":1", "\"version\":0"), "file has version 0, this cofire reads 1 to 3");
    REFUSED(with_head(net, "\"version\":1", "\"version\":\"1\""), "version must be an integer, got \"1\"");
    REFUSED(with_head(net, "\"version\":1,", ""), "the program lacks the key \"version\"");
    REFUSED(with_head(net, "\"input\":0", "\"inputs\":0"), "the program has the unknown key \"inputs\"");
    REFUSED(with_head(net, "\"input\":0", "\"input\":6"), "input must be an integer from 0 to 5, got 6");
    REFUSED(with_head(net, "\"output\":5", "\"output\":-1"), "output must be an integer from 0 to 5, got -1");
    REFUSED(with_head(net, "\"output\":5", "\"output\":null"), "got null");
    REFUSED(with_head(net, "[5],", "[5,1],"), "output_shape must be that of the output buffer, [5, 1, 1], got [5, 1]");
    REFUSED(with_head(net, "[5],", "[6],"), "output_shape must be that of the output buffer");
    REFUSED(with_head(with_head(net, "\"output\":5", "\"output\":1"), "[5],", "[256],"), "output_shape must be");
    REFUSED(with_head(with_head(net, "\"output\":5", "\"output\":0"), "[5],", "[3,8,8],"),
            "output must not be the input");
    REFUSED(with_head(net, "\"threshold\":0.0", "\"threshold\":1e39"), "threshold must be a float32 number, got 1e+39");
    REFUSED(with_head(net, "\"threshold\":0.0", "\"threshold\":null"), "threshold must be a float32 number, got null");
    Source none = net;
    none.ops.clear();
    REFUSED(none, "ops must be a list of 1 to 100000, got a list of 0");
    none.ops.assign(100001, "0");
    REFUSED(none, "ops must be a list of 1 to 100000, got a list of 100001");
    REFUSED(with_op(net, "flat", "\"flat\"", "\"gap\""), "op 4: name must be unique, got \"gap\"");
}

void test_buffers() {
    const Source net = residual_net();
    REFUSED(with_head(net, "[6,8,8]", "[6,8]"), "buffer 2: shape must be a list of 3, got a list of 2");
    REFUSED(with_head(net, "[6,8,8]", "[6,0,8]"),
            "buffer 2: each of shape must be an integer from 1 to 1048576, got 0");
    REFUSED(with_head(net, "[6,8,8]", "[6,8,1048577]"), "buffer 2: each of shape must be an integer from 1 to 1048576");
    REFUSED(with_head(net, "[6,8,8]", "[6,8,2147483656]"), "buffer 2: each of shape must be an integer");
    REFUSED(with_head(net, "[6,8,8]", "[1048576,1048576,1048576]"), "buffer 2: must have at most 268435456 elements");
    REFUSED(with_head(net, "[6,8,8]", "[1,16384,16385]"), "buffer 2: must have at most 268435456 elements");
    const std::string big = "[1,16384,16384]";
    REFUSED(with_head(net, "[6,8,8]", big + "," + big + "," + big + "," + big), "all buffers together");
    REFUSED(with_head(net, "[5,1,1]],", "[5,1,1],[1,1,1]],"), "buffer 6 must be written by an op");
    REFUSED(with_head(net, "\"buffers\":", "\"buffers\":[],\"x\":"), "unknown key \"x\"");
    Source empty = net;
    empty.head = replaced(net.head, "[[3,8,8],[4,8,8],[6,8,8],[4,1,1],[4,1,1],[5,1,1]]", "[]");
    REFUSED(empty, "input must be an integer from 0 to -1");
}

void test_groups() {
    const Source net = residual_net();
    REFUSED(with_head(net, "\"filters\":6", "\"filters\":0"), "group 0: filters must be an integer from 1");
    REFUSED(with_head(net, "\"filters\":6", "\"filters\":6,\"x\":1"), "group 0: entry has the unknown key \"x\"");
    REFUSED(with_head(net, "\"name\":\"conv2\"", "\"name\":\"conv1\""), "group 1: name must be unique");
    REFUSED(with_head(net, "\"filters\":6", "\"filters\":5"),
            "op 1 (\"conv1\"): group 0 must have as many filters as the output channels, 6, got 5");
    REFUSED(with_head(net, "\"filters\":4}", "\"filters\":4},{\"name\":\"x\",\"filters\":1}"),
            "group 2 must be the gate");
    REFUSED(with_op(net, "conv1", "\"group\":0", "\"group\":2"),
            "op 1 (\"conv1\"): group must be an integer from 0 to 1");
    REFUSED(with_op(net, "conv1", "\"group\":0", "\"group\":-1"), "op 1 (\"conv1\"): group must be an integer");
    REFUSED(with_op(net, "conv1", "\"group\":0,", ""), "op 1 (\"conv1\"): gate lacks the key \"group\"");
    REFUSED(with_op(net, "conv1", "\"group\":0", "\"group\":0,\"x\":0"),
            "op 1 (\"conv1\"): gate has the unknown key \"x\"");
    REFUSED(with_op(net, "conv1", "\"gate\":{", "\"gate\":[],\"x\":{"), "op 1: it has the unknown key \"x\"");
    REFUSED(with_op(net, "flat", "\"gate\":null", "\"gate\":false"),
            "op 4 (\"flat\"): gate must be an object, got false");
    // The head comes first, and once.
    REFUSED(with_op(net, "flat", "\"gate\":null", "\"gate\":" + head_gate(1, "max", true, "head2.weight", "")),
            "op 4 (\"flat\"): group 1 must have its head on its first op, and only there");
    Source swapped = with_head(with_head(net, "\"filters\":6", "\"filters\":4"), "\"filters\":4}]", "\"filters\":6}]");
    swapped = with_op(with_op(swapped, "conv1", "\"group\":0", "\"group\":1"), "conv2", "\"group\":1", "\"group\":0");
    REFUSED(swapped, "op 1 (\"conv1\"): groups must be in the order in which they are decided, got 1 before 0");
    Source headless = depthwise_net();
    headless.ops[0] = replaced(headless.ops[0], head_gate(0, "avg", true, "head.weight", "head.bias"), same_gate(0));
    REFUSED(headless, "op 0 (\"expand\"): group 0 must have its head on its first op, and only there");
}

void test_heads() {
    const Source net = residual_net();
    REFUSED(with_op(net, "conv1", "\"pool\":\"max\"", "\"pool\":\"min\""),
            "op 1 (\"conv1\"): pool must be one of max avg");
    REFUSED(with_op(net, "conv1", "\"softmax\":true", "\"softmax\":1"),
            "op 1 (\"conv1\"): softmax must be true or false");
    REFUSED(with_op(net, "conv1", "\"softmax\":true,", ""), "op 1 (\"conv1\"): head lacks the key \"softmax\"");
    REFUSED(with_op(net, "conv1", "\"softmax\":true", "\"softmax\":true,\"x\":0"), "head has the unknown key \"x\"");
    REFUSED(with_op(net, "conv1", "head1.weight", "head2.weight"),
            "op 1 (\"conv1\"): the tensor \"head2.weight\" must have the shape [6, 4], got [4, 6]");
    REFUSED(with_op(net, "conv1", "head1.bias", "stem.bias"), "must have the shape [6], got [4]");
    REFUSED(with_op(net, "conv1", "\"head1.bias\"", "null"), "tensor \"head1.bias\" must be used");
    REFUSED(with_op(net, "conv1", "\"head1.weight\"", "null"),
            "op 1 (\"conv1\"): a tensor's name must be a string, got null");
}

// What version 2 has, each version only in its own form.
void test_new_heads() {
    const Source net = policy_net();
    const std::string conv1 = "op 2 (\"conv1\"): ", conv2 = "op 4 (\"conv2\"): ";
    REFUSED(with_head(residual_net(), "\"version\":1", "\"version\":2"), "head lacks the key \"top\"");
    REFUSED(with_head(net, "\"version\":2", "\"version\":1"), conv1 + "weights must have 2 entries, got 3");
    REFUSED(with_op(residual_net(), "conv1", "\"pool\":\"max\"", "\"pool\":\"both\""),
            "pool must be one of max avg, got");
    REFUSED(with_op(net, "conv1", "\"pool\":\"both\"", "\"pool\":\"min\""),
            conv1 + "pool must be one of max avg abs both, got \"min\"");
    REFUSED(with_op(net, "conv1", "\"pool\":\"both\"", "\"pool\":\"abs\""),
            conv1 + "the tensor \"head1.weight\" must have the shape [6, 4], got [6, 8]");
    for (const char* top : {"0", "7", "-1", "true", "1.5"})
        REFUSED(with_op(net, "conv1", "\"top\":3", std::string("\"top\":") + top),
                conv1 + "top must be an integer from 1 to 6, got");
    LOADS(with_op(net, "conv1", "\"top\":3", "\"top\":6"));
    LOADS(with_op(net, "conv1", "\"top\":3", "\"top\":null"));
    REFUSED(with_op(net, "conv1", "\"scale\":true", "\"scale\":1"), conv1 + "scale must be true or false");
    REFUSED(with_op(net, "conv1", "\"scale\":true", "\"scale\":false"),
            conv1 + "gate must be of a group whose head has scale, for it is rescaled");
    REFUSED(with_op(net, "conv1", ",\"src\":null", ""), conv1 + "head lacks the key \"src\"");
    REFUSED(with_op(net, "conv1", "\"src\":null", "\"src\":7"),
            conv1 + "src of the head must be an integer from 0 to 6");
    REFUSED(with_op(net, "conv1", "\"src\":null", "\"src\":3"),
            conv1 + "src 3 of the head must be written before it is read");
    REFUSED(with_op(net, "conv2", "\"src\":2", "\"src\":4"),
            conv2 + "the tensor \"head2.weight\" must have the shape [1, 6], got [1, 4]");
    REFUSED(with_op(net, "conv2", "\"top\":null", "\"top\":1"),
            conv2 + "top of a head with one row must be null, got 1");
    REFUSED(with_op(net, "conv2", "head2.bias", "stem.bias"), "must have the shape [1], got [4]");
}

void test_rescale() {
    const Source net = policy_net();
    const std::string op = "op 3 (\"again\"): ";
    REFUSED(with_op(net, "again", same_gate(0), "null"), op + "gate must be of a group whose head has scale");
    REFUSED(with_op(net, "again", "\"weights\":[\"again.shift\"]", "\"weights\":[]"),
            op + "weights must have 1 entries, got 0");
    REFUSED(with_op(net, "again", "again.shift", "stem.bias"), "must have the shape [6], got [4]");
    REFUSED(with_op(net, "again", "\"src\":[3]", "\"src\":[3,3]"), op + "src must have 1 entries, got 2");
    REFUSED(with_op(net, "again", "\"src\":[3]", "\"src\":[1]"), op + "the output's shape must be [4, 8, 8]");
    Source old = with_head(residual_net(), "[5,1,1]],", "[5,1,1],[6,8,8]],");
    add_op(&old, "rescale", "again", {2}, 6, act_attrs("none"), {"head1.bias"}, same_gate(0));
    REFUSED(old, "op 6 (\"again\"): kind must be one that version 1 has, got \"rescale\"");
}

// ---- What version 3 has ----

void test_outputs() {
    const Source net = maps_net();
    LOADS(with_head(net, "\"shape\":[90]", "\"shape\":[9,10,1,1]"));
    REFUSED(with_head(net, "\"shape\":[90]", "\"shape\":[91]"), "must have as many elements as the output buffer");
    REFUSED(with_head(net, "\"buffer\":6", "\"buffer\":7"), "buffer must be an integer from 0 to 6");
    REFUSED(with_head(net, "\"buffer\":3,\"shape\":[6,4,6]", "\"buffer\":0,\"shape\":[24]"), "must not be the input");
    for (const char* structure :
         {"null", "0", "{\"tuple\":[0,1]}", "{\"tuple\":[0,1,1]}", "{\"list\":[0,1,2,{}]}", "{}"})
        REFUSED(with_head(net, "{\"tuple\":[0,{\"dict\":{\"map\":1,\"turned\":2}}]}", structure), "structure must be");
    REFUSED(with_head(net, "{\"tuple\":[0", "{\"set\":[0"), "structure must be tuple, list or dict");
    REFUSED(with_head(net, "{\"tuple\":[0", "{\"tuple\":[3"), "structure must be an integer from 0 to 2, got 3");
    REFUSED(with_head(net, "\"card\":{\"classes\":[\"a\",\"b\"]}", "\"card\":[]"), "card must be an object");
    REFUSED(with_head(net, ",\"structure\":{", ",\"x\":{"), "unknown key \"x\"");
    REFUSED(with_head(net, "\"version\":3", "\"version\":2"), "unknown key \"more_outputs\"");
}

void test_maps() {
    const Source net = maps_net();
    const std::string up = "op 0 (\"up\"): ", turn = "op 5 (\"turn\"): ", size = "op 2 (\"size\"): ";
    REFUSED(with_op(net, "up", "\"stride\":[2,1]", "\"stride\":[3,1]"), up + "output height must be 7 to 9, got 5");
    REFUSED(with_op(net, "up", "\"padding\":[1,0,1,0]", "\"padding\":[1,0,0,0]"), up + "output height must be 6 to 7");
    LOADS(with_op(net, "up", "\"padding\":[1,0,1,0]", "\"padding\":[1,0,2,0]"));
    REFUSED(with_op(net, "up", "\"groups\":2", "\"groups\":4"), up + "groups must divide the channels 4 and 6, got 4");
    REFUSED(with_op(net, "up", "\"groups\":2", "\"groups\":1"), "must have the shape [4, 6, 3, 2], got [4, 3, 3, 2]");
    REFUSED(with_op(net, "size", "4,4]", "4,5]"), size + "each of rows must be an integer from 0 to 4, got 5");
    REFUSED(with_op(net, "size", ",4,4]", ",4]"), size + "rows must have as many entries for each of 4, got 7");
    REFUSED(with_op(net, "size", "\"columns\":[0,0,1,1,2,2]", "\"columns\":[]"), size + "columns must have as many");
    REFUSED(with_op(net, "turn", "\"begin\":4", "\"begin\":3"), turn + "strides must stay inside the source");
    REFUSED(with_op(net, "turn", "\"begin\":4", "\"begin\":6"), turn + "strides must stay inside the source");
    REFUSED(with_op(net, "turn", "[45,-1,5]", "[45,-1]"), turn + "strides must be a list of 3");
    REFUSED(with_op(net, "turn", "[2,5,9]", "[1,5,18]"), turn + "the first of sizes must make up the channels, 2");
    REFUSED(with_op(net, "turn", "[2,5,9]", "[2,5,8]"), turn + "sizes must be factors of the output's 90");
    REFUSED(with_op(net, "soft", "\"ways\":3", "\"ways\":4"), "ways must be a divisor of the channels, 6, got 4");
    REFUSED(with_op(net, "sum", "\"avg\"", "\"min\""), "op must be one of sum avg max, got \"min\"");
    REFUSED(with_op(net, "norm", "\"groups\":3", "\"groups\":4"), "groups must be a divisor of the channels");
    REFUSED(with_op(net, "norm", "\"group\"", "\"layer\""), "groups must be a divisor of the channels, or 1");
    REFUSED(with_op(net, "norm", "1e-5", "0.0"), "epsilon must be 1e-30 or more, got 0");
    Source old = with_head(residual_net(), "[5,1,1]],", "[5,1,1],[1,8,8]],");
    add_op(&old, "reduce", "sum", {2}, 6, "\"op\":\"sum\"");
    REFUSED(old, "op 6 (\"sum\"): kind must be one that version 1 has, got \"reduce\"");
}

}  // namespace
}  // namespace cofire::test

int main() {
    cofire::test::test_valid_residual();
    cofire::test::test_valid_elementwise();
    cofire::test::test_valid_depthwise();
    cofire::test::test_valid_quantized();
    cofire::test::test_valid_policy();
    cofire::test::test_valid_maps();
    cofire::test::test_valid_variants();
    cofire::test::test_container();
    cofire::test::test_tensor_entries();
    cofire::test::test_members();
    cofire::test::test_buffers();
    cofire::test::test_groups();
    cofire::test::test_heads();
    cofire::test::test_new_heads();
    cofire::test::test_rescale();
    cofire::test::test_outputs();
    cofire::test::test_maps();
    return cofire::test::summary();
}
