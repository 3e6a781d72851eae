// Program files made by hand, for tests: small networks that together have every kind of op.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../sha256.h"

namespace cofire::test {

struct TensorText {
    std::string name;
    std::vector<int> shape;
    std::vector<float> values;
    const char* type = "F32";  // the values are stored as I8 or I32 then

    size_t each() const { return std::strcmp(type, "I8") == 0 ? 1 : 4; }
    size_t bytes() const { return values.size() * each(); }
};

// A program file before it is put together, so that a test can break any part of it.
struct Source {
    std::string head;  // the program's members before "ops"
    std::vector<std::string> ops;
    std::vector<TensorText> tensors;
};

inline std::string join(const std::vector<std::string>& parts) {
    std::string text;
    for (const std::string& part : parts) text += (text.empty() ? "" : ",") + part;
    return text;
}

inline std::string list(const std::vector<int>& values) {
    std::vector<std::string> parts;
    for (int value : values) parts.push_back(std::to_string(value));
    return "[" + join(parts) + "]";
}

// In quotes, as JSON has it; `text` is printable ASCII.
inline std::string json_string(const std::string& text) {
    std::string result = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') result += '\\';
        result += c;
    }
    return result + '"';
}

inline std::vector<uint8_t> data_of(const Source& source) {
    std::vector<uint8_t> data;
    for (const TensorText& tensor : source.tensors) {
        for (float value : tensor.values) {
            uint8_t four[4];
            const int32_t whole = int32_t(value);
            const bool real = std::strcmp(tensor.type, "F32") == 0;
            std::memcpy(four, real ? static_cast<const void*>(&value) : &whole, 4);
            data.insert(data.end(), four, four + tensor.each());
        }
    }
    return data;
}

inline std::string program_of(const Source& source) {
    const std::vector<uint8_t> data = data_of(source);
    return "{" + source.head + ",\"ops\":[" + join(source.ops) + "],\"sha256\":\"" + sha256(data.data(), data.size()) +
           "\"}";
}

inline std::string tensor_entry(const TensorText& tensor, size_t begin) {
    const size_t end = begin + tensor.bytes();
    return json_string(tensor.name) + ":{\"dtype\":\"" + tensor.type + "\",\"shape\":" + list(tensor.shape) +
           ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}

inline std::string header_of(const std::string& program, const std::vector<TensorText>& tensors) {
    std::string header = "{\"__metadata__\":{\"cofire.program\":" + json_string(program) + "}";
    size_t begin = 0;
    for (const TensorText& tensor : tensors) {
        header += "," + tensor_entry(tensor, begin);
        begin += tensor.bytes();
    }
    return header + "}";
}

inline std::vector<uint8_t> file_of(const std::string& header, const std::vector<uint8_t>& data) {
    std::vector<uint8_t> bytes;
    bytes.reserve(8 + header.size() + data.size());
    for (int i = 0; i < 8; ++i) bytes.push_back(uint8_t(uint64_t(header.size()) >> 8 * i));
    bytes.insert(bytes.end(), header.begin(), header.end());
    bytes.insert(bytes.end(), data.begin(), data.end());
    return bytes;
}

inline std::vector<uint8_t> file_of(const Source& source) {
    return file_of(header_of(program_of(source), source.tensors), data_of(source));
}

// ---- Networks ----

inline void add_tensor(Source* source, const std::string& name, const std::vector<int>& shape) {
    size_t count = 1;
    for (int side : shape) count *= size_t(side);
    TensorText tensor{name, shape, std::vector<float>(count)};
    for (size_t i = 0; i < count; ++i) tensor.values[i] = float(int(i * 7 + name.size()) % 11 - 5) / 4;
    source->tensors.push_back(tensor);
}

inline void add_op(Source* source, const std::string& kind, const std::string& name, const std::vector<int>& src,
                   int dst, const std::string& attrs, const std::vector<std::string>& weights = {},
                   const std::string& gate = "null") {
    std::vector<std::string> tensors;
    for (const std::string& weight : weights) tensors.push_back(json_string(weight));
    source->ops.push_back("{\"kind\":" + json_string(kind) + ",\"name\":" + json_string(name) +
                          ",\"src\":" + list(src) + ",\"dst\":" + std::to_string(dst) + ",\"attrs\":{" + attrs +
                          "},\"weights\":[" + join(tensors) + "],\"gate\":" + gate + "}");
}

inline std::string act_attrs(const std::string& act, const std::string& slope = "0.0") {
    return "\"act\":" + json_string(act) + ",\"slope\":" + slope;
}

inline std::string window_attrs(int kernel, int stride, const std::vector<int>& padding, int dilation = 1) {
    return "\"kernel\":" + list({kernel, kernel}) + ",\"stride\":" + list({stride, stride}) +
           ",\"padding\":" + list(padding) + ",\"dilation\":" + list({dilation, dilation});
}

// A conv and its tensors `name`.weight and `name`.bias.
inline void add_conv(Source* source, const std::string& name, const std::vector<int>& src, int dst,
                     const std::vector<int>& weight, const std::string& window, int groups, const std::string& act,
                     const std::string& gate = "null") {
    add_tensor(source, name + ".weight", weight);
    add_tensor(source, name + ".bias", {weight[0]});
    const std::string residual = src.size() > 1 ? "true" : "false";
    add_op(source, "conv", name, src, dst,
           window + ",\"groups\":" + std::to_string(groups) + ",\"residual\":" + residual + "," + act_attrs(act),
           {name + ".weight", name + ".bias"}, gate);
}

// A gate that decides its group; `bias` may be empty.
inline std::string head_gate(int group, const std::string& pool, bool softmax, const std::string& weight,
                             const std::string& bias) {
    return "{\"group\":" + std::to_string(group) + ",\"head\":{\"pool\":" + json_string(pool) +
           ",\"softmax\":" + (softmax ? "true" : "false") + ",\"weight\":" + json_string(weight) +
           ",\"bias\":" + (bias.empty() ? "null" : json_string(bias)) + "}}";
}

inline std::string same_gate(int group) { return "{\"group\":" + std::to_string(group) + ",\"head\":null}"; }

// A head of version 2; `more` holds its members "top", "scale" and "src".
inline std::string new_head_gate(int group, const std::string& pool, bool softmax, const std::string& weight,
                                 const std::string& bias, const std::string& more) {
    std::string gate = head_gate(group, pool, softmax, weight, bias);
    return gate.insert(gate.size() - 2, "," + more);
}

// A gated residual block, in place, and a classifier.
inline Source residual_net() {
    Source net;
    net.head =
        "\"version\":1,\"input\":0,\"output\":5,\"output_shape\":[5],"
        "\"buffers\":[[3,8,8],[4,8,8],[6,8,8],[4,1,1],[4,1,1],[5,1,1]],"
        "\"groups\":[{\"name\":\"conv1\",\"filters\":6},{\"name\":\"conv2\",\"filters\":4}],\"threshold\":0.0";
    add_conv(&net, "stem", {0}, 1, {4, 3, 3, 3}, window_attrs(3, 1, {1, 1, 1, 1}), 1, "relu");
    add_tensor(&net, "head1.weight", {6, 4});
    add_tensor(&net, "head1.bias", {6});
    add_conv(&net, "conv1", {1}, 2, {6, 4, 3, 3}, window_attrs(3, 1, {1, 1, 1, 1}), 1, "relu",
             head_gate(0, "max", true, "head1.weight", "head1.bias"));
    add_tensor(&net, "head2.weight", {4, 6});
    add_conv(&net, "conv2", {2, 1}, 1, {4, 6, 3, 3}, window_attrs(3, 1, {1, 1, 1, 1}), 1, "relu",
             head_gate(1, "avg", false, "head2.weight", ""));
    add_op(&net, "pool", "gap", {1}, 3,
           "\"op\":\"avg\"," + window_attrs(1, 1, {0, 0, 0, 0}) + ",\"include_pad\":false,\"adaptive\":true");
    add_op(&net, "flatten", "flat", {3}, 4, "");
    add_conv(&net, "fc", {4}, 5, {5, 4, 1, 1}, window_attrs(1, 1, {0, 0, 0, 0}), 1, "none");
    return net;
}

// Everything that is not a conv, on a map with sides that are not alike; the output is a map.
inline Source elementwise_net() {
    Source net;
    net.head =
        "\"version\":1,\"input\":0,\"output\":7,\"output_shape\":[6,3,2],"
        "\"buffers\":[[2,6,5],[2,6,5],[2,6,5],[2,1,1],[2,6,5],[4,6,5],[6,6,5],[6,3,2],[2,6,5]],"
        "\"groups\":[{\"name\":\"g\",\"filters\":2}],\"threshold\":-0.25";
    add_tensor(&net, "scale", {2});
    add_tensor(&net, "shift", {2});
    add_tensor(&net, "head", {2, 2});
    add_op(&net, "affine", "norm", {0}, 1, "\"lift\":true," + act_attrs("leaky", "0.1"), {"scale", "shift"},
           head_gate(0, "max", false, "head", ""));
    add_op(&net, "act", "act", {1}, 2, act_attrs("sigmoid"));
    add_op(&net, "pool", "squeeze", {2}, 3,
           "\"op\":\"max\"," + window_attrs(1, 1, {0, 0, 0, 0}) + ",\"include_pad\":false,\"adaptive\":true");
    add_op(&net, "mul", "scale", {2, 3}, 4, act_attrs("hardswish"), {}, same_gate(0));
    add_op(&net, "add", "add", {4, 1}, 8, act_attrs("silu"));
    add_op(&net, "cat", "cat", {8, 0}, 5, "");
    add_op(&net, "move", "move", {5}, 6, "\"channels\":[-1,3,2,1,0,-1],\"stride\":[1,1],\"offset\":[0,-1]");
    add_op(&net, "pool", "pool", {6}, 7,
           "\"op\":\"max\"," + window_attrs(2, 2, {0, 0, 0, 0}) + ",\"include_pad\":false,\"adaptive\":false");
    return net;
}

// A depthwise block whose convs share one mask, a dilated conv, a strided one, ceil mode, a linear layer on a map.
inline Source depthwise_net() {
    Source net;
    net.head =
        "\"version\":1,\"input\":2,\"output\":0,\"output_shape\":[3,1,1],"
        "\"buffers\":[[3,1,1],[8,7,7],[2,7,7],[8,4,4],[4,4,4],[4,3,3]],"
        "\"groups\":[{\"name\":\"block\",\"filters\":8}],\"threshold\":0.5";
    add_tensor(&net, "head.weight", {8, 2});
    add_tensor(&net, "head.bias", {8});
    add_conv(&net, "expand", {2}, 1, {8, 2, 1, 1}, window_attrs(1, 1, {0, 0, 0, 0}), 1, "relu6",
             head_gate(0, "avg", true, "head.weight", "head.bias"));
    add_conv(&net, "depthwise", {1}, 3, {8, 1, 3, 3}, window_attrs(3, 2, {1, 1, 1, 1}), 8, "hardsigmoid", same_gate(0));
    add_conv(&net, "dilated", {3}, 4, {4, 4, 3, 3}, window_attrs(3, 1, {2, 2, 2, 2}, 2), 2, "none");
    add_op(&net, "pool", "pool", {4}, 5,
           "\"op\":\"avg\"," + window_attrs(3, 2, {1, 1, 1, 1}) + ",\"include_pad\":true,\"adaptive\":false");
    add_conv(&net, "fc", {5}, 0, {3, 4, 3, 3}, window_attrs(3, 1, {0, 0, 0, 0}), 1, "none");
    return net;
}

// Version 2: a head for the largest logits with factors, used by a conv and by an op of its own; one row for a whole
// branch, which reads features that were made before; magnitudes.
inline Source policy_net() {
    Source net;
    net.head =
        "\"version\":2,\"input\":0,\"output\":6,\"output_shape\":[5],"
        "\"buffers\":[[3,8,8],[4,8,8],[4,1,1],[6,8,8],[6,8,8],[4,1,1],[5,1,1]],"
        "\"groups\":[{\"name\":\"conv1\",\"filters\":6},{\"name\":\"branch\",\"filters\":4},"
        "{\"name\":\"fc\",\"filters\":5}],\"threshold\":0.0";
    const std::string pool = "\"op\":\"avg\"," + window_attrs(1, 1, {0, 0, 0, 0}) + ",\"include_pad\":false";
    add_conv(&net, "stem", {0}, 1, {4, 3, 3, 3}, window_attrs(3, 1, {1, 1, 1, 1}), 1, "relu");
    add_op(&net, "pool", "features", {1}, 2, pool + ",\"adaptive\":true");
    add_tensor(&net, "head1.weight", {6, 8});
    add_tensor(&net, "head1.bias", {6});
    add_conv(&net, "conv1", {1}, 3, {6, 4, 3, 3}, window_attrs(3, 1, {1, 1, 1, 1}), 1, "relu",
             new_head_gate(0, "both", false, "head1.weight", "head1.bias", "\"top\":3,\"scale\":true,\"src\":null"));
    add_tensor(&net, "conv1.shift", {6});
    net.ops.back().replace(net.ops.back().find("\"conv1.bias\""), 12, "\"conv1.bias\",\"conv1.shift\"");
    add_tensor(&net, "again.shift", {6});
    add_op(&net, "rescale", "again", {3}, 4, act_attrs("leaky", "0.1"), {"again.shift"}, same_gate(0));
    add_tensor(&net, "head2.weight", {1, 4});
    add_tensor(&net, "head2.bias", {1});
    add_conv(&net, "conv2", {4, 1}, 1, {4, 6, 3, 3}, window_attrs(3, 1, {1, 1, 1, 1}), 1, "relu",
             new_head_gate(1, "max", false, "head2.weight", "head2.bias", "\"top\":null,\"scale\":false,\"src\":2"));
    add_op(&net, "pool", "gap", {1}, 5, pool + ",\"adaptive\":true");
    add_tensor(&net, "head3.weight", {5, 3});
    add_conv(&net, "fc", {5}, 6, {5, 4, 1, 1}, window_attrs(1, 1, {0, 0, 0, 0}), 1, "none",
             new_head_gate(2, "abs", true, "head3.weight", "", "\"top\":5,\"scale\":false,\"src\":0"));
    return net;
}

// Version 3: bytes through every op that takes them, with a gate, a residual in place and heads that pool them.
inline Source quantized_net() {
    Source net;
    net.head =
        "\"version\":3,\"input\":0,\"output\":8,\"output_shape\":[5],"
        "\"buffers\":[[3,8,8],[3,8,8],[4,8,8],[4,8,8],[4,4,4],[8,4,4],[8,4,4],[8,1,1],[5,1,1],[8,1,1],[4,4,4]],"
        "\"groups\":[{\"name\":\"conv1\",\"filters\":4},{\"name\":\"conv2\",\"filters\":4}],\"threshold\":0.0,"
        "\"quants\":[{\"buffer\":1,\"scale\":0.05,\"zero\":120},{\"buffer\":2,\"scale\":0.1,\"zero\":0},"
        "{\"buffer\":3,\"scale\":0.1,\"zero\":9},{\"buffer\":4,\"scale\":0.1,\"zero\":9},"
        "{\"buffer\":5,\"scale\":0.1,\"zero\":9},{\"buffer\":6,\"scale\":0.1,\"zero\":9},"
        "{\"buffer\":9,\"scale\":0.5,\"zero\":128},{\"buffer\":10,\"scale\":0.1,\"zero\":9}],"
        "\"more_outputs\":[],\"structure\":null,\"card\":{}";
    std::vector<TensorText> bytes;  // behind all others
    const auto conv = [&](const std::string& name, const std::vector<int>& src, int dst, std::vector<int> weight,
                          const std::string& window, const std::string& clamp, const std::string& gate) {
        add_tensor(&net, name + ".weight", weight);
        for (float& value : net.tensors.back().values) value *= 4;
        net.tensors.back().type = "I8";
        bytes.push_back(net.tensors.back());
        net.tensors.pop_back();
        add_tensor(&net, name + ".bias", {weight[0]});
        for (float& value : net.tensors.back().values) value *= 400;
        net.tensors.back().type = "I32";
        add_tensor(&net, name + ".multiplier", {weight[0]});
        for (float& value : net.tensors.back().values) value = 0.01f;
        const bool residual = src.size() > 1;
        add_op(&net, "conv8", name, src, dst,
               window + ",\"groups\":1,\"residual\":" + (residual ? "true" : "false") + "," + clamp +
                   ",\"residual_multiplier\":" + (residual ? "0.75" : "0.0"),
               {name + ".weight", name + ".bias", name + ".multiplier"}, gate);
    };
    const std::string all = "\"low\":0,\"high\":255", rest = "\"top\":null,\"scale\":false,\"src\":null";
    const std::string pool = window_attrs(2, 2, {0, 0, 0, 0}) + ",\"include_pad\":false,\"adaptive\":false";
    add_op(&net, "quantize", "in", {0}, 1, "");
    conv("stem", {1}, 2, {4, 3, 3, 3}, window_attrs(3, 1, {1, 1, 1, 1}), all, "null");
    add_tensor(&net, "head1.weight", {4, 8});
    conv("conv1", {2}, 3, {4, 4, 3, 3}, window_attrs(3, 1, {1, 1, 1, 1}), "\"low\":9,\"high\":69",
         new_head_gate(0, "both", true, "head1.weight", "", rest));
    add_op(&net, "pool", "max", {3}, 4, "\"op\":\"max\"," + pool);
    add_op(&net, "move", "copy", {4}, 10, "\"channels\":[0,1,-1,3],\"stride\":[1,1],\"offset\":[-1,1]");
    add_tensor(&net, "head2.weight", {4, 4});
    conv("conv2", {4, 10}, 10, {4, 4, 3, 3}, window_attrs(3, 1, {1, 1, 1, 1}), all,
         new_head_gate(1, "abs", false, "head2.weight", "", rest));
    add_op(&net, "cat", "cat", {4, 10}, 5, "");
    add_op(&net, "pool", "grown", {5}, 6,
           "\"op\":\"max\"," + window_attrs(1, 1, {0, 0, 0, 0}) + ",\"include_pad\":false,\"adaptive\":true");
    add_op(&net, "pool", "mean", {6}, 7,
           "\"op\":\"avg\"," + window_attrs(1, 1, {0, 0, 0, 0}) + ",\"include_pad\":false,\"adaptive\":true");
    add_op(&net, "quantize", "again", {7}, 9, "");
    conv("fc", {9}, 8, {5, 8, 1, 1}, window_attrs(1, 1, {0, 0, 0, 0}), all, "null");
    net.tensors.insert(net.tensors.end(), bytes.begin(), bytes.end());
    return net;
}

// Version 3: maps of other sizes and orders, ops over channels, two outputs. The input of `norm` has channels that may
// be off.
inline Source maps_net() {
    Source net;
    net.head =
        "\"version\":3,\"input\":0,\"output\":4,\"output_shape\":[2,15],"
        "\"buffers\":[[4,3,2],[6,5,3],[6,5,3],[6,4,6],[2,5,3],[6,5,3],[2,5,9]],"
        "\"groups\":[{\"name\":\"up\",\"filters\":6}],\"threshold\":0.0,"
        "\"more_outputs\":[{\"buffer\":3,\"shape\":[6,4,6]},{\"buffer\":6,\"shape\":[90]}],"
        "\"structure\":{\"tuple\":[0,{\"dict\":{\"map\":1,\"turned\":2}}]},\"card\":{\"classes\":[\"a\",\"b\"]},"
        "\"quants\":[]";
    add_tensor(&net, "up.weight", {4, 3, 3, 2});
    add_tensor(&net, "up.bias", {6});
    add_tensor(&net, "head.weight", {6, 4});
    add_op(&net, "deconv", "up", {0}, 1,
           "\"kernel\":[3,2],\"stride\":[2,1],\"padding\":[1,0,1,0],\"dilation\":[1,1],\"groups\":2",
           {"up.weight", "up.bias"},
           new_head_gate(0, "max", false, "head.weight", "", "\"top\":null,\"scale\":false,\"src\":null"));
    add_tensor(&net, "norm.scale", {6});
    add_tensor(&net, "norm.shift", {6});
    add_op(&net, "norm", "norm", {1}, 2, "\"over\":\"group\",\"groups\":3,\"epsilon\":1e-5",
           {"norm.scale", "norm.shift"});
    add_tensor(&net, "size.rows", {4, 2});
    add_tensor(&net, "size.columns", {6, 1});
    add_op(&net, "resample", "size", {2}, 3, "\"rows\":[0,1,1,2,3,2,4,4],\"columns\":[0,0,1,1,2,2]",
           {"size.rows", "size.columns"});
    add_op(&net, "softmax", "soft", {2}, 5, "\"ways\":3,\"log\":true");
    add_op(&net, "reduce", "sum", {5}, 4, "\"op\":\"avg\"");
    add_op(&net, "strided", "turn", {5}, 6, "\"sizes\":[2,5,9],\"strides\":[45,-1,5],\"begin\":4");
    return net;
}

}  // namespace cofire::test
