// What ops of a program file say, and whether it fits: their sources, weights and shapes.
#include <algorithm>

#include "loader.h"
#include "map_checks.h"
#include "window_checks.h"

namespace cofire {

namespace {

constexpr std::string_view kKinds[] = {"conv",    "affine",  "act",     "add",      "mul",       "cat",     "move",
                                       "pool",    "flatten", "rescale", "deconv",   "resample",  "strided", "reduce",
                                       "softmax", "norm",    "conv8",   "quantize", "dequantize"};
constexpr int64_t kKindSince[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 2,
                                  3, 3, 3, 3, 3, 3, 3, 3, 3};  // the version that brought it
constexpr std::string_view kActs[] = {"none",      "relu",    "relu6",       "leaky", "silu",
                                      "hardswish", "sigmoid", "hardsigmoid", "gelu",  "gelu_tanh",
                                      "elu",       "tanh",    "hardtanh",    "mish",  "softplus"};
constexpr Act kNewActs = Act::gelu;  // this and those after it came with version 3

}  // namespace

void Loader::read_ops(JsonValue value, const Where& where) {
    const std::vector<JsonValue> ops = items(value, where, "ops");
    if (ops.empty() || ops.size() > kMaxOps) wrong(value, where, "ops", "a list of 1 to " + std::to_string(kMaxOps));
    program_.ops.reserve(ops.size());
    for (JsonValue op : ops) program_.ops.push_back(read_op(op));
}

Op Loader::read_op(JsonValue value) {
    Where where{"op " + std::to_string(program_.ops.size())};
    const auto [kind, name, src, dst, attrs, weights, gate] =
        fields(value, where, "it", "kind", "name", "src", "dst", "attrs", "weights", "gate");
    if (!names_.insert(text(name, where, "name")).second) wrong(name, where, "name", "unique");
    where.text += " (" + quoted(name.text()) + ")";
    Op op;
    op.name = name.text();
    op.kind = Kind(choice(kind, where, "kind", kKinds));
    if (version_ < kKindSince[size_t(op.kind)])
        wrong(kind, where, "kind", "one that version " + std::to_string(version_) + " has");
    op.dst = buffer(dst, where, "dst");
    if (op.dst == program_.input) where.fail("dst must not be the program's input, got " + std::to_string(op.dst));
    for (JsonValue item : items(src, where, "src")) op.src.push_back(buffer(item, where, "each of src"));
    for (int i : op.src)
        if (!written_[size_t(i)]) where.fail("src " + std::to_string(i) + " must be written before it is read");
    read_kind(&op, attrs, items(weights, where, "weights"), where);
    check_dst(op, where);
    check_forms(op, where);
    if (!gate.is_null()) read_gate(&op, gate, where);
    if (op.shift && (op.group < 0 || !scaled_[size_t(op.group)]))
        where.fail("gate must be of a group whose head has scale, for it is rescaled");
    written_[size_t(op.dst)] = true;
    return op;
}

void Loader::read_kind(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    switch (op->kind) {
        case Kind::conv:
            return conv(op, attrs, weights, where);
        case Kind::affine:
            return affine(op, attrs, weights, where);
        case Kind::act:
        case Kind::add:
        case Kind::mul:
            return elementwise(op, attrs, weights, where);
        case Kind::cat:
            return cat(op, attrs, weights, where);
        case Kind::move:
            return move(op, attrs, weights, where);
        case Kind::pool:
            return pool(op, attrs, weights, where);
        case Kind::flatten:
            return flatten(op, attrs, weights, where);
        case Kind::rescale:
            return rescale(op, attrs, weights, where);
        case Kind::conv8:
            return conv8(op, attrs, weights, where);
        case Kind::quantize:
        case Kind::dequantize:
            return conversion(op, attrs, weights, where);
        case Kind::deconv:
            return deconv(op, attrs, weights, where);
        case Kind::resample:
            return resample(op, attrs, weights, where);
        case Kind::strided:
            count(weights.size(), 0, "weights", where);
            return read_strided(op, attrs, one_source(*op, where), shape(op->dst), where);
        case Kind::reduce:
            count(weights.size(), 0, "weights", where);
            return read_reduce(op, attrs, one_source(*op, where), shape(op->dst), where);
        case Kind::softmax:
            count(weights.size(), 0, "weights", where);
            return read_softmax(op, attrs, one_source(*op, where), shape(op->dst), where);
        case Kind::norm:
            return norm(op, attrs, weights, where);
    }
}

void Loader::affine(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    const auto [lift, act, slope] = fields(attrs, where, "attrs", "lift", "act", "slope");
    op->lift = boolean(lift, where, "lift");
    read_act(op, act, slope, where);
    count(op->src.size(), 1, "src", where);
    count(weights.size(), 2, "weights", where);
    same_shape(shape(op->dst), shape(op->src[0]), "the output's shape", where);
    op->weight = tensor(weights[0], where, {shape(op->dst).c});
    op->bias = tensor(weights[1], where, {shape(op->dst).c});
    const bool shifts = std::any_of(op->bias, op->bias + shape(op->dst).c, [](float x) { return x != 0; });
    if (!op->lift && (shifts || !keeps_zero(op->act))) wrong(lift, where, "lift", "true where zero does not stay zero");
}

void Loader::rescale(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    const auto [act, slope] = fields(attrs, where, "attrs", "act", "slope");
    read_act(op, act, slope, where);
    op->lift = true;
    count(op->src.size(), 1, "src", where);
    count(weights.size(), 1, "weights", where);
    same_shape(shape(op->dst), shape(op->src[0]), "the output's shape", where);
    op->shift = tensor(weights[0], where, {shape(op->dst).c});
}

// quantize and dequantize
void Loader::conversion(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    fields(attrs, where, "attrs");
    count(op->src.size(), 1, "src", where);
    count(weights.size(), 0, "weights", where);
    same_shape(shape(op->dst), shape(op->src[0]), "the output's shape", where);
}

// act, add and mul
void Loader::elementwise(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    const auto [act, slope] = fields(attrs, where, "attrs", "act", "slope");
    read_act(op, act, slope, where);
    count(op->src.size(), op->kind == Kind::act ? 1 : 2, "src", where);
    count(weights.size(), 0, "weights", where);
    const Shape& src = shape(op->src[0]);
    same_shape(shape(op->dst), src, "the output's shape", where);
    const Shape& other = shape(op->src.back());
    if (!(other == Shape{src.c, 1, 1})) same_shape(other, src, "the shape of src[1]", where);
}

void Loader::cat(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    fields(attrs, where, "attrs");
    count(weights.size(), 0, "weights", where);
    if (op->src.empty()) where.fail("src must have 1 entry at least, got 0");
    const Shape& dst = shape(op->dst);
    int64_t channels = 0;
    for (int i : op->src) {
        same_shape(shape(i), {shape(i).c, dst.h, dst.w}, "the shape of each src", where);
        channels += shape(i).c;
    }
    if (channels != dst.c)
        where.fail("output must have " + std::to_string(channels) + " channels, got " + std::to_string(dst.c));
}

void Loader::move(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    const auto [channels, stride, offset] = fields(attrs, where, "attrs", "channels", "stride", "offset");
    count(op->src.size(), 1, "src", where);
    count(weights.size(), 0, "weights", where);
    const Shape &src = shape(op->src[0]), &dst = shape(op->dst);
    op->channels = integers(channels, where, "channels", -1, src.c - 1, size_t(dst.c));
    op->stride = pair(stride, where, "stride");
    op->offset = pair(offset, where, "offset", -kMaxSide);
    if ((dst.h - 1) * int64_t(op->stride.h) > kMaxReach || (dst.w - 1) * int64_t(op->stride.w) > kMaxReach)
        where.fail("stride times output size must be at most " + std::to_string(kMaxReach));
    drop_unused(op, dst);
}

void Loader::flatten(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    fields(attrs, where, "attrs");
    count(op->src.size(), 1, "src", where);
    count(weights.size(), 0, "weights", where);
    const Shape& dst = shape(op->dst);
    if (dst.h != 1 || dst.w != 1 || dst.c != shape(op->src[0]).size())
        where.fail("the output's shape must be [" + std::to_string(shape(op->src[0]).size()) + ", 1, 1], got " +
                   list(dst));
}

void Loader::resample(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    const auto [rows, columns] = fields(attrs, where, "attrs", "rows", "columns");
    count(weights.size(), 2, "weights", where);
    const Shape &src = one_source(*op, where), &dst = shape(op->dst);
    same_shape(dst, {src.c, dst.h, dst.w}, "the output's shape", where);
    op->rows = integers(rows, where, "rows", 0, src.h - 1);
    op->columns = integers(columns, where, "columns", 0, src.w - 1);
    op->weight = tensor(weights[0], where, {dst.h, taps(op->rows, dst.h, "rows", where)});
    op->bias = tensor(weights[1], where, {dst.w, taps(op->columns, dst.w, "columns", where)});
}

int64_t Loader::taps(const std::vector<int>& places, int outputs, const char* what, const Where& where) const {
    if (places.empty() || places.size() % size_t(outputs) != 0)
        where.fail(what + std::string(" must have as many entries for each of ") + std::to_string(outputs) + ", got " +
                   std::to_string(places.size()));
    return int64_t(places.size()) / outputs;
}

void Loader::norm(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
    count(weights.size(), 2, "weights", where);
    read_norm(op, attrs, one_source(*op, where), shape(op->dst), where);
    op->weight = tensor(weights[0], where, {shape(op->dst).c});
    op->bias = tensor(weights[1], where, {shape(op->dst).c});
}

const Shape& Loader::one_source(const Op& op, const Where& where) const {
    count(op.src.size(), 1, "src", where);
    return shape(op.src[0]);
}

void Loader::read_act(Op* op, JsonValue act, JsonValue slope, const Where& where) const {
    op->act = Act(choice(act, where, "act", kActs));
    if (op->act >= kNewActs && version_ < 3)
        wrong(act, where, "act", "one that version " + std::to_string(version_) + " has");
    op->slope = real(slope, where, "slope");
    const bool bounds = op->act == Act::hardtanh, slopes = op->act == Act::leaky || op->act == Act::elu;
    if (bounds && !(op->slope > 0)) wrong(slope, where, "slope of hardtanh", "above 0");
    if (!bounds && !slopes && op->slope != 0) wrong(slope, where, "slope", "0 where act is not leaky");
}

// A buffer is written once, by an op that does not read it; a conv may add to its residual in place. The kind must
// have been read.
void Loader::check_dst(const Op& op, const Where& where) const {
    const std::string dst = "dst " + std::to_string(op.dst);
    if (op.residual && op.dst == op.src[1] && op.dst != op.src[0]) return;
    if (std::find(op.src.begin(), op.src.end(), op.dst) != op.src.end())
        where.fail(dst + " must not be in src, but for a conv's residual");
    if (written_[size_t(op.dst)]) where.fail(dst + " must not be written by an earlier op");
}

// Which ops take bytes, and which give them. What only passes numbers on leaves them as they are.
void Loader::check_forms(const Op& op, const Where& where) const {
    const bool passes = op.kind == Kind::move || op.kind == Kind::cat || op.kind == Kind::flatten ||
                        (op.kind == Kind::pool && op.maximum);
    const bool reads_u8 = op.kind == Kind::conv8 || op.kind == Kind::dequantize;
    for (int source : op.src) {
        if (passes && !(form(source) == form(op.dst)))
            where.fail("src " + std::to_string(source) + " and dst must have one scale and zero, or none");
        if (!passes && op.kind != Kind::pool && form(source).u8() != reads_u8)
            where.fail("src " + std::to_string(source) + (reads_u8 ? " must" : " must not") + " be quantised");
    }
    if (!passes && op.kind != Kind::conv8 && form(op.dst).u8() != (op.kind == Kind::quantize))
        where.fail("dst " + std::to_string(op.dst) + (op.kind == Kind::quantize ? " must" : " must not") +
                   " be quantised");
}

void Loader::count(size_t got, size_t must, const char* what, const Where& where) const {
    if (got != must)
        where.fail(what + std::string(" must have ") + std::to_string(must) + " entries, got " + std::to_string(got));
}

void Loader::same_shape(const Shape& got, const Shape& must, const char* what, const Where& where) const {
    if (!(got == must)) where.fail(what + std::string(" must be ") + list(must) + ", got " + list(got));
}

// Products of such numbers and sums stay within the normal range of float32.
float Loader::multiplier(JsonValue value, const Where& where, const char* what) const {
    const float got = real(value, where, what);
    if (got < kLeastScale || got > kMostScale) wrong(value, where, what, "from 2^-64 to 2^64");
    return got;
}

}  // namespace cofire
