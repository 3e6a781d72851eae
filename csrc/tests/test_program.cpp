// Tests of load_program and of what it stands on: one per rule of docs/program.md. Prints the failures; exit code 0 if
// none.
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>

#include "../json.h"
#include "../program.h"
#include "../sha256.h"
#include "build_program.h"

namespace cofire::test {
namespace {

int failures = 0, checks = 0;

void check(bool ok, const char* text, int line) {
    ++checks;
    if (ok) return;
    ++failures;
    std::printf("line %d: %s\n", line, text);
}

// The message must contain `part`; an unexpected success or another message is a failure.
void check_refused(const std::function<void()>& action, const std::string& part, int line) {
    try {
        action();
        check(false, ("not refused, expected: " + part).c_str(), line);
    } catch (const std::runtime_error& error) {
        const std::string message = error.what();
        check(message.find(part) != std::string::npos, ("expected: " + part + "\n     got: " + message).c_str(), line);
    }
}

#define CHECK(condition) check((condition), #condition, __LINE__)
#define LOADS(source) check_loads((source), __LINE__)
#define REFUSED(source, part) check_refused([&] { load(source); }, (part), __LINE__)
#define BAD_JSON(text, part) check_refused([&] { Json json(text); }, (part), __LINE__)

Program load(const std::vector<uint8_t>& bytes) { return load_program(bytes.data(), bytes.size()); }
Program load(const Source& source) { return load(file_of(source)); }

void check_loads(const Source& source, int line) {
    try {
        load(source);
        check(true, "", line);
    } catch (const std::runtime_error& error) {
        check(false, error.what(), line);
    }
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    if (at == std::string::npos) throw std::logic_error("the test looks for what is not there: " + from);
    return text.replace(at, from.size(), to);
}

std::string& op_of(Source* source, const std::string& name) {
    for (std::string& op : source->ops)
        if (op.find("\"name\":\"" + name + "\"") != std::string::npos) return op;
    throw std::logic_error("the test looks for an op that is not there: " + name);
}

Source with_op(Source source, const std::string& name, const std::string& from, const std::string& to) {
    std::string& op = op_of(&source, name);
    op = replaced(op, from, to);
    return source;
}

Source with_head(Source source, const std::string& from, const std::string& to) {
    source.head = replaced(source.head, from, to);
    return source;
}

std::vector<uint8_t> with_header(const Source& source, const std::string& from, const std::string& to) {
    return file_of(replaced(header_of(program_of(source), source.tensors), from, to), data_of(source));
}

// ---- JSON and SHA-256 ----

void test_sha256() {
    auto digest = [](const std::string& text) {
        return sha256(reinterpret_cast<const uint8_t*>(text.data()), text.size());
    };
    CHECK(digest("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(digest(std::string(1000000, 'a')) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    // Around the border where the length needs a block of its own.
    CHECK(digest(std::string(55, 'a')) == "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
    CHECK(digest(std::string(56, 'a')) == "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
    CHECK(digest(std::string(64, 'a')) == "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
}

void test_json_values() {
    const Json json(" {\"a\": [1, -2.5e1, 0.125, true, false, null], \"b\": {\"c\": \"x\"}, \"d\": [], \"e\": {}} \n");
    const auto members = json.root().members();
    CHECK(members.size() == 4 && members[0].first == "a" && members[3].first == "e");
    const auto items = members[0].second.items();
    CHECK(items.size() == 6 && items[0].number() == 1 && items[1].number() == -25 && items[2].number() == 0.125);
    CHECK(items[3].boolean() && !items[4].boolean() && items[5].is_null());
    CHECK(members[1].second.members()[0].second.text() == "x");
    CHECK(members[2].second.items().empty() && members[3].second.members().empty());
}

void test_json_strings() {
    const Json json(R"("a\"\\\/\b\f\n\r\t\u0041\u00e9\u20AC\ud83d\ude00)"
                    "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\"");
    CHECK(json.root().text() ==
          "a\"\\/\b\f\n\r\tA\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
    for (const char* text : {"\"\x80\"", "\"\xC0\xAF\"", "\"\xE0\x80\x80\"", "\"\xED\xA0\x80\"", "\"\xF5\x80\x80\x80\"",
                             "\"\xF4\x90\x80\x80\"", "\"\xC3\"", "\"\xE2\x82\""})
        BAD_JSON(text, "string is not UTF-8");
    BAD_JSON("\"a\nb\"", "control character");
    BAD_JSON("\"a\\x\"", "unknown escape");
    BAD_JSON("\"\\u12g4\"", "four hexadecimal digits");
    BAD_JSON("\"\\ud800\"", "half of a surrogate pair");
    BAD_JSON("\"\\ud800\\u0041\"", "half of a surrogate pair");
    BAD_JSON("\"\\udc00\\ud800\"", "half of a surrogate pair");
    BAD_JSON("\"abc", "string has no end");
    BAD_JSON("\"abc\\", "unknown escape");
}

void test_json_numbers() {
    auto is_integer = [](const char* text, int64_t expected) {
        int64_t value = -1;
        return Json(text).root().integer(&value) && value == expected;
    };
    int64_t value = 0;
    CHECK(is_integer("0", 0) && is_integer("-7", -7) && !is_integer("1e3", 1000) && !is_integer("2.0", 2));
    CHECK(is_integer("9007199254740991", 9007199254740991));
    CHECK(!Json("9007199254740993").root().integer(&value) && !Json("0.5").root().integer(&value));
    CHECK(!Json("1e300").root().integer(&value) && !Json("\"1\"").root().integer(&value));
    for (const char* text :
         {"01", "1.", ".5", "+1", "-", "1e", "1e+", "NaN", "Infinity", "-Infinity", "0x10", "1 2", "--1"})
        BAD_JSON(text, "invalid JSON at byte");
    BAD_JSON("1e999", "out of range");
}

void test_json_structure() {
    for (const char* text :
         {"",           " ",     "[",     "[1",    "[1,",       "[1,]", "[,]", "{", "{\"a\"", "{\"a\":", "{\"a\":1",
          "{\"a\":1,}", "{a:1}", "{1:1}", "[1 2]", "{\"a\" 1}", "tru",  "nul", "]", "[]]",    "{}x",     "[}"})
        BAD_JSON(text, "invalid JSON at byte");
    BAD_JSON(std::string_view("[]\0", 3), "after the value");
    BAD_JSON("{\"a\":1,\"b\":2,\"\\u0061\":3}", "has the key \"a\" twice");
    CHECK(Json(std::string(32, '[') + std::string(32, ']')).root().items().size() == 1);
    BAD_JSON(std::string(34, '[') + std::string(34, ']'), "nested too deeply");
    BAD_JSON(std::string(1000000, '['), "nested too deeply");
}

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

void test_bytes() {
    const Source net = quantized_net();
    const std::string more = "\"more_outputs\":[],\"structure\":null";
    const auto beside = [&](const std::string& output) {
        return with_head(net, more, "\"more_outputs\":[" + output + "],\"structure\":{\"list\":[0,1]}");
    };
    LOADS(beside("{\"buffer\":7,\"shape\":[8]}"));
    REFUSED(beside("{\"buffer\":6,\"shape\":[128]}"), "input and output must not be quantised");
    REFUSED(with_head(net, "\"output\":8,\"output_shape\":[5]", "\"output\":9,\"output_shape\":[8]"),
            "input and output must not be quantised");
    REFUSED(with_head(net, "{\"buffer\":1,", "{\"buffer\":0,"), "must not be quantised");
    REFUSED(with_head(net, "\"zero\":120", "\"zero\":256"), "quants: zero must be an integer from 0 to 255, got 256");
    for (const char* scale : {"0.0", "-1.0", "1e-30", "1e30", "\"a\""})
        REFUSED(with_head(net, "\"scale\":0.05", std::string("\"scale\":") + scale), "quants: scale must be");
    REFUSED(with_head(net, "{\"buffer\":2,", "{\"buffer\":1,"), "quants: buffer must be above the one before");
    REFUSED(with_op(net, "stem", "\"src\":[1]", "\"src\":[0]"), "op 1 (\"stem\"): src 0 must be quantised");
    REFUSED(with_op(net, "again", "\"dst\":9", "\"dst\":8"), "op 9 (\"again\"): ");
    REFUSED(with_op(net, "conv1", "\"high\":69", "\"high\":8"),
            "op 2 (\"conv1\"): low must be an integer from 0 to 8, got 9");
    REFUSED(with_op(net, "conv1", "\"low\":9,", "\"low\":256,"), "op 2 (\"conv1\"): ");
    REFUSED(with_op(net, "conv2", "\"residual_multiplier\":0.75", "\"residual_multiplier\":0.0"),
            "op 5 (\"conv2\"): residual_multiplier must be");
    REFUSED(with_op(net, "stem", "\"residual_multiplier\":0.0", "\"residual_multiplier\":0.5"),
            "op 1 (\"stem\"): residual_multiplier must be 0 without a residual");
    Source wide = net;  // a sum that could leave int32
    for (TensorText& tensor : wide.tensors)
        if (tensor.name == "fc.bias") tensor.values[0] = 2147483520.0f;
    REFUSED(wide, "op 10 (\"fc\"): sums of filter 0 must stay within int32");
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

// ---- Ops ----

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

void run_all() {
    test_sha256();
    test_json_values();
    test_json_strings();
    test_json_numbers();
    test_json_structure();
    test_valid_residual();
    test_valid_elementwise();
    test_valid_depthwise();
    test_valid_policy();
    test_valid_quantized();
    test_valid_maps();
    test_valid_variants();
    test_container();
    test_tensor_entries();
    test_members();
    test_buffers();
    test_groups();
    test_heads();
    test_new_heads();
    test_rescale();
    test_outputs();
    test_bytes();
    test_maps();
    test_op_members();
    test_order();
    test_in_place();
    test_conv();
    test_residual();
    test_affine();
    test_elementwise();
    test_cat_and_flatten();
    test_move();
    test_pool();
    test_pool_exhaustively();
    test_limits();
}

}  // namespace
}  // namespace cofire::test

int main() {
    cofire::test::run_all();
    std::printf("%d checks, %d failures\n", cofire::test::checks, cofire::test::failures);
    return cofire::test::failures == 0 ? 0 : 1;
}
