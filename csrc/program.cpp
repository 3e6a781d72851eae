// Reads a program. The file is untrusted: everything the engine relies on is checked here and in the files that this
// one calls, and nowhere else.
#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <type_traits>

#include "format.h"
#include "map_checks.h"
#include "reading.h"
#include "safetensors.h"
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

class Loader {
   public:
    explicit Loader(Safetensors* file) : file_(*file) {}

    Program load() {
        const Where where{"cofire.program"};
        const std::unique_ptr<Json> json = parse_json(file_.program(), where);
        check_version(json->root(), where);
        const auto [version, input, output, output_shape, buffers, groups, threshold, ops, digest, more, structure,
                    card, quants] =
            version_ < 3
                ? with_nothing(fields(json->root(), where, "the program", "version", "input", "output", "output_shape",
                                      "buffers", "groups", "threshold", "ops", "sha256"))
                : fields(json->root(), where, "the program", "version", "input", "output", "output_shape", "buffers",
                         "groups", "threshold", "ops", "sha256", "more_outputs", "structure", "card", "quants");
        if (text(digest, where, "sha256") != file_.digest())
            where.fail("sha256 must be " + file_.digest() + " for these weights, got " + digest.describe() +
                       ": the file is damaged");
        program_.weights = file_.floats();
        read_buffers(buffers, where);
        if (version_ >= 3) read_quants(quants, where);
        read_groups(groups, where);
        program_.input = buffer(input, where, "input");
        program_.output = buffer(output, where, "output");
        program_.threshold = real(threshold, where, "threshold");
        written_[size_t(program_.input)] = true;  // by the caller
        read_ops(ops, where);
        check_output(output_shape, where);
        if (version_ >= 3) {
            read_more_outputs(more, where);
            check_structure(structure, where);
            if (card.type() != JsonValue::Type::object) wrong(card, where, "card", "an object");
        }
        check_complete(where);
        return std::move(program_);
    }

   private:
    // Of versions that have nothing of what version 3 adds.
    static std::array<JsonValue, 13> with_nothing(const std::array<JsonValue, 9>& old) {
        std::array<JsonValue, 13> all{};
        std::copy(old.begin(), old.end(), all.begin());
        return all;
    }

    void check_version(JsonValue root, const Where& where) {
        if (root.type() != JsonValue::Type::object) wrong(root, where, "the program", "an object");
        for (const auto& [key, value] : root.members()) {
            int64_t version = 0;
            if (key != "version") continue;
            if (!value.integer(&version)) wrong(value, where, "version", "an integer");
            if (version < kOldest || version > kVersion)
                where.fail("file has version " + std::to_string(version) + ", this cofire reads " +
                           std::to_string(kOldest) + " to " + std::to_string(kVersion) +
                           (version > kVersion ? ": upgrade cofire" : ""));
            version_ = version;
        }
    }

    void read_buffers(JsonValue value, const Where& where) {
        int64_t total = 0;
        for (JsonValue item : items(value, where, "buffers")) {
            const Where here{"buffer " + std::to_string(program_.buffers.size())};
            const std::vector<int> sides = integers(item, here, "shape", 1, kMaxSide, 3);
            const Shape shape{sides[0], sides[1], sides[2]};
            if (shape.size() > kMaxBuffer)
                here.fail("must have at most " + std::to_string(kMaxBuffer) + " elements, got " + list(shape));
            total += shape.size();
            if (total > kMaxBuffers)
                here.fail("all buffers together must have at most " + std::to_string(kMaxBuffers) + " elements");
            program_.buffers.push_back(shape);
        }
        written_.assign(program_.buffers.size(), false);
        program_.forms.resize(program_.buffers.size());
    }

    void read_quants(JsonValue value, const Where& where) {
        int64_t next = 0;
        for (JsonValue item : items(value, where, "quants")) {
            const Where here{"quants"};
            const auto [number, scale, zero] = fields(item, here, "entry", "buffer", "scale", "zero");
            const int64_t buffer = integer(number, here, "buffer", 0, int64_t(program_.buffers.size()) - 1);
            if (buffer < next) wrong(number, here, "buffer", "above the one before");
            next = buffer + 1;
            Form& form = program_.forms[size_t(buffer)];
            form.scale = multiplier(scale, here, "scale");
            form.zero = int(integer(zero, here, "zero", 0, 255));
        }
    }

    void read_groups(JsonValue value, const Where& where) {
        std::set<std::string_view> names;
        for (JsonValue item : items(value, where, "groups")) {
            const Where here{"group " + std::to_string(program_.groups.size())};
            const auto [name, filters] = fields(item, here, "entry", "name", "filters");
            if (!names.insert(text(name, here, "name")).second) wrong(name, here, "name", "unique");
            program_.groups.push_back({std::string(name.text()), int(integer(filters, here, "filters", 1, kMaxSide))});
        }
        decided_.assign(program_.groups.size(), false);
        scaled_.assign(program_.groups.size(), false);
    }

    void read_ops(JsonValue value, const Where& where) {
        const std::vector<JsonValue> ops = items(value, where, "ops");
        if (ops.empty() || ops.size() > kMaxOps)
            wrong(value, where, "ops", "a list of 1 to " + std::to_string(kMaxOps));
        program_.ops.reserve(ops.size());
        for (JsonValue op : ops) program_.ops.push_back(read_op(op));
    }

    Op read_op(JsonValue value) {
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

    void read_kind(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
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

    void conv(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
        const auto [kernel, stride, pads, dilation, groups, residual, act, slope] = fields(
            attrs, where, "attrs", "kernel", "stride", "padding", "dilation", "groups", "residual", "act", "slope");
        read_window(op, {kernel, stride, pads, dilation, groups, residual}, where);
        read_act(op, act, slope, where);
        if (version_ < 2 || weights.size() != 3) count(weights.size(), 2, "weights", where);
        if (op->residual && (op->act == Act::sigmoid || op->act == Act::hardsigmoid))
            wrong(act, where, "act after a residual", "zero at zero");
        const int filters = shape(op->dst).c;
        op->weight = tensor(weights[0], where, weight_shape(*op));
        op->bias = tensor(weights[1], where, {filters});
        if (weights.size() == 3) op->shift = tensor(weights[2], where, {filters});
    }

    void conv8(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
        const auto [kernel, stride, pads, dilation, groups, residual, low, high, residual_multiplier] =
            fields(attrs, where, "attrs", "kernel", "stride", "padding", "dilation", "groups", "residual", "low",
                   "high", "residual_multiplier");
        read_window(op, {kernel, stride, pads, dilation, groups, residual}, where);
        const bool to_float = !form(op->dst).u8();
        op->high = int(integer(high, where, "high", to_float ? 255 : 0, 255));
        op->low = int(integer(low, where, "low", 0, to_float ? 0 : op->high));
        op->residual_multiplier = real(residual_multiplier, where, "residual_multiplier");
        if (op->residual)
            multiplier(residual_multiplier, where, "residual_multiplier");
        else if (op->residual_multiplier != 0)
            wrong(residual_multiplier, where, "residual_multiplier", "0 without a residual");
        count(weights.size(), 3, "weights", where);
        const int filters = shape(op->dst).c;
        op->weight8 = tensor<int8_t>(weights[0], where, weight_shape(*op));
        op->bias8 = tensor<int32_t>(weights[1], where, {filters});
        op->multiplier = tensor(weights[2], where, {filters});
        check_sums(*op, where);
    }

    // No sum may leave int32, whatever the bytes are.
    void check_sums(const Op& op, const Where& where) const {
        const int64_t filters = shape(op.dst).c, zero = form(op.src[0]).zero, most = std::max(zero, 255 - zero);
        const int64_t each = int64_t(shape(op.src[0]).c / op.groups) * op.kernel.h * op.kernel.w;
        for (int64_t o = 0; o < filters; ++o) {
            int64_t sum = 0;
            for (int64_t i = 0; i < each; ++i) sum += std::abs(int64_t(op.weight8[o * each + i]));
            const float factor = op.multiplier[o];
            if (sum * most + std::abs(int64_t(op.bias8[o])) > INT32_MAX)
                where.fail("sums of filter " + std::to_string(o) + " must stay within int32");
            if (factor < kLeastScale || factor > kMostScale)
                where.fail("multipliers must be from 2^-64 to 2^64, got " + std::to_string(factor));
        }
    }

    // quantize and dequantize
    void conversion(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
        fields(attrs, where, "attrs");
        count(op->src.size(), 1, "src", where);
        count(weights.size(), 0, "weights", where);
        same_shape(shape(op->dst), shape(op->src[0]), "the output's shape", where);
    }

    // kernel, stride, padding, dilation, groups, residual
    void read_window(Op* op, const std::array<JsonValue, 6>& values, const Where& where) {
        const auto& [kernel, stride, pads, dilation, groups, residual] = values;
        op->kernel = pair(kernel, where, "kernel");
        op->stride = pair(stride, where, "stride");
        op->padding = padding(pads, where);
        op->dilation = pair(dilation, where, "dilation");
        op->groups = int(integer(groups, where, "groups", 1, kMaxSide));
        op->residual = boolean(residual, where, "residual");
        count(op->src.size(), op->residual ? 2 : 1, "src", where);
        const Shape &src = shape(op->src[0]), &dst = shape(op->dst);
        check_groups(*op, src, dst, where);
        for (const Axis& axis : axes(*op, src, dst)) check_conv_axis(axis, where);
        check_padded(axes(*op, src, dst), src.c, where);
        drop_unused(op, dst);
        if (op->residual) same_shape(shape(op->src[1]), dst, "the residual's shape", where);
    }

    std::vector<int64_t> weight_shape(const Op& op) const {
        return {shape(op.dst).c, shape(op.src[0]).c / op.groups, op.kernel.h, op.kernel.w};
    }

    void affine(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
        const auto [lift, act, slope] = fields(attrs, where, "attrs", "lift", "act", "slope");
        op->lift = boolean(lift, where, "lift");
        read_act(op, act, slope, where);
        count(op->src.size(), 1, "src", where);
        count(weights.size(), 2, "weights", where);
        same_shape(shape(op->dst), shape(op->src[0]), "the output's shape", where);
        op->weight = tensor(weights[0], where, {shape(op->dst).c});
        op->bias = tensor(weights[1], where, {shape(op->dst).c});
        const bool shifts = std::any_of(op->bias, op->bias + shape(op->dst).c, [](float x) { return x != 0; });
        if (!op->lift && (shifts || !keeps_zero(op->act)))
            wrong(lift, where, "lift", "true where zero does not stay zero");
    }

    void rescale(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
        const auto [act, slope] = fields(attrs, where, "attrs", "act", "slope");
        read_act(op, act, slope, where);
        op->lift = true;
        count(op->src.size(), 1, "src", where);
        count(weights.size(), 1, "weights", where);
        same_shape(shape(op->dst), shape(op->src[0]), "the output's shape", where);
        op->shift = tensor(weights[0], where, {shape(op->dst).c});
    }

    void deconv(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
        const auto [kernel, stride, pads, dilation, groups] =
            fields(attrs, where, "attrs", "kernel", "stride", "padding", "dilation", "groups");
        op->kernel = pair(kernel, where, "kernel");
        op->stride = pair(stride, where, "stride");
        op->padding = padding(pads, where);
        op->dilation = pair(dilation, where, "dilation");
        op->groups = int(integer(groups, where, "groups", 1, kMaxSide));
        count(weights.size(), 2, "weights", where);
        const Shape &src = one_source(*op, where), &dst = shape(op->dst);
        check_groups(*op, src, dst, where);
        for (const Axis& axis : axes(*op, src, dst)) check_deconv_axis(axis, where);
        if (double(src.c) * dst.c / op->groups * op->kernel.h * op->kernel.w > double(kMaxBuffer))
            where.fail("a transposed conv must have at most " + std::to_string(kMaxBuffer) + " weights");
        op->weight = tensor(weights[0], where, {src.c, dst.c / op->groups, op->kernel.h, op->kernel.w});
        op->bias = tensor(weights[1], where, {dst.c});
    }

    void resample(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
        const auto [rows, columns] = fields(attrs, where, "attrs", "rows", "columns");
        count(weights.size(), 2, "weights", where);
        const Shape &src = one_source(*op, where), &dst = shape(op->dst);
        same_shape(dst, {src.c, dst.h, dst.w}, "the output's shape", where);
        op->rows = integers(rows, where, "rows", 0, src.h - 1);
        op->columns = integers(columns, where, "columns", 0, src.w - 1);
        op->weight = tensor(weights[0], where, {dst.h, taps(op->rows, dst.h, "rows", where)});
        op->bias = tensor(weights[1], where, {dst.w, taps(op->columns, dst.w, "columns", where)});
    }

    int64_t taps(const std::vector<int>& places, int outputs, const char* what, const Where& where) const {
        if (places.empty() || places.size() % size_t(outputs) != 0)
            where.fail(what + std::string(" must have as many entries for each of ") + std::to_string(outputs) +
                       ", got " + std::to_string(places.size()));
        return int64_t(places.size()) / outputs;
    }

    void norm(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
        count(weights.size(), 2, "weights", where);
        read_norm(op, attrs, one_source(*op, where), shape(op->dst), where);
        op->weight = tensor(weights[0], where, {shape(op->dst).c});
        op->bias = tensor(weights[1], where, {shape(op->dst).c});
    }

    const Shape& one_source(const Op& op, const Where& where) const {
        count(op.src.size(), 1, "src", where);
        return shape(op.src[0]);
    }

    void check_groups(const Op& op, const Shape& src, const Shape& dst, const Where& where) const {
        if (src.c % op.groups != 0 || dst.c % op.groups != 0)
            where.fail("groups must divide the channels " + std::to_string(src.c) + " and " + std::to_string(dst.c) +
                       ", got " + std::to_string(op.groups));
    }

    // act, add and mul
    void elementwise(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
        const auto [act, slope] = fields(attrs, where, "attrs", "act", "slope");
        read_act(op, act, slope, where);
        count(op->src.size(), op->kind == Kind::act ? 1 : 2, "src", where);
        count(weights.size(), 0, "weights", where);
        const Shape& src = shape(op->src[0]);
        same_shape(shape(op->dst), src, "the output's shape", where);
        const Shape& other = shape(op->src.back());
        if (!(other == Shape{src.c, 1, 1})) same_shape(other, src, "the shape of src[1]", where);
    }

    void cat(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
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

    void move(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
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

    void pool(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
        static constexpr std::string_view kOps[] = {"avg", "max"};
        const auto [what, kernel, stride, pads, dilation, include_pad, adaptive] =
            fields(attrs, where, "attrs", "op", "kernel", "stride", "padding", "dilation", "include_pad", "adaptive");
        op->maximum = choice(what, where, "op", kOps) == 1;
        op->kernel = pair(kernel, where, "kernel");
        op->stride = pair(stride, where, "stride");
        op->padding = padding(pads, where);
        op->dilation = pair(dilation, where, "dilation");
        op->include_pad = boolean(include_pad, where, "include_pad");
        op->adaptive = boolean(adaptive, where, "adaptive");
        count(op->src.size(), 1, "src", where);
        count(weights.size(), 0, "weights", where);
        const Shape &src = shape(op->src[0]), &dst = shape(op->dst);
        if (src.c != dst.c)
            where.fail("output must have " + std::to_string(src.c) + " channels, got " + std::to_string(dst.c));
        for (const Axis& axis : axes(*op, src, dst)) {
            if (!op->adaptive)
                check_pool_axis(axis, where);
            else if (axis.kernel != 1 || axis.stride != 1 || axis.dilation != 1 || axis.before != 0 || axis.after != 0)
                where.fail(
                    "an adaptive pool must have kernel, stride and dilation 1 "
                    "and padding 0");
        }
        check_padded(axes(*op, src, dst), src.c, where);
        drop_unused(op, dst);
    }

    void flatten(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where) {
        fields(attrs, where, "attrs");
        count(op->src.size(), 1, "src", where);
        count(weights.size(), 0, "weights", where);
        const Shape& dst = shape(op->dst);
        if (dst.h != 1 || dst.w != 1 || dst.c != shape(op->src[0]).size())
            where.fail("the output's shape must be [" + std::to_string(shape(op->src[0]).size()) + ", 1, 1], got " +
                       list(dst));
    }

    void read_act(Op* op, JsonValue act, JsonValue slope, const Where& where) const {
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
    void check_dst(const Op& op, const Where& where) const {
        const std::string dst = "dst " + std::to_string(op.dst);
        if (op.residual && op.dst == op.src[1] && op.dst != op.src[0]) return;
        if (std::find(op.src.begin(), op.src.end(), op.dst) != op.src.end())
            where.fail(dst + " must not be in src, but for a conv's residual");
        if (written_[size_t(op.dst)]) where.fail(dst + " must not be written by an earlier op");
    }

    // Which ops take bytes, and which give them. What only passes numbers on leaves them as they are.
    void check_forms(const Op& op, const Where& where) const {
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

    void read_gate(Op* op, JsonValue value, const Where& where) {
        const auto [group, head] = fields(value, where, "gate", "group", "head");
        op->group = int(integer(group, where, "group", 0, int64_t(program_.groups.size()) - 1));
        const int filters = program_.groups[size_t(op->group)].filters;
        if (filters != shape(op->dst).c)
            where.fail("group " + std::to_string(op->group) + " must have as many filters as the output channels, " +
                       std::to_string(shape(op->dst).c) + ", got " + std::to_string(filters));
        if (decided_[size_t(op->group)] != head.is_null())
            where.fail("group " + std::to_string(op->group) + " must have its head on its first op, and only there");
        if (head.is_null()) return;
        if (op->group > 0 && !decided_[size_t(op->group) - 1])
            where.fail("groups must be in the order in which they are decided, got " + std::to_string(op->group) +
                       " before " + std::to_string(op->group - 1));
        op->decides = true;
        if (version_ < 2)
            read_old_head(op, head, filters, where);
        else
            read_head(op, head, filters, where);
        scaled_[size_t(op->group)] = op->head.scale;
        decided_[size_t(op->group)] = true;
    }

    // Of version 1: four of the keys, the others mean what they do where null or false.
    void read_old_head(Op* op, JsonValue value, int filters, const Where& where) {
        static constexpr std::string_view kPools[] = {"max", "avg"};
        const auto [pool, softmax, weight, bias] = fields(value, where, "head", "pool", "softmax", "weight", "bias");
        op->head.source = op->src[0];
        op->head.pooling = Pooling(choice(pool, where, "pool", kPools));
        op->head.softmax = boolean(softmax, where, "softmax");
        op->head.rows = filters;
        read_head_weights(&op->head, weight, bias, where);
    }

    void read_head(Op* op, JsonValue value, int filters, const Where& where) {
        static constexpr std::string_view kPools[] = {"max", "avg", "abs", "both"};
        const auto [pool, softmax, weight, bias, top, scale, src] =
            fields(value, where, "head", "pool", "softmax", "weight", "bias", "top", "scale", "src");
        Head& head = op->head;
        head.source = src.is_null() ? op->src[0] : buffer(src, where, "src of the head");
        if (!written_[size_t(head.source)])
            where.fail("src " + std::to_string(head.source) + " of the head must be written before it is read");
        head.pooling = Pooling(choice(pool, where, "pool", kPools));
        head.softmax = boolean(softmax, where, "softmax");
        head.rows = is_one_row(weight, where) ? 1 : filters;
        if (!top.is_null()) head.top = int(integer(top, where, "top", 1, filters));
        if (head.top > 0 && head.rows != filters) wrong(top, where, "top of a head with one row", "null");
        head.scale = boolean(scale, where, "scale");
        read_head_weights(&head, weight, bias, where);
    }

    bool is_one_row(JsonValue weight, const Where& where) {
        const auto found = file_.tensors().find(text(weight, where, "a tensor's name"));
        return found != file_.tensors().end() && !found->second.shape.empty() && found->second.shape[0] == 1;
    }

    void read_head_weights(Head* head, JsonValue weight, JsonValue bias, const Where& where) {
        head->weight = tensor(weight, where, {head->rows, head->inputs(shape(head->source))});
        head->bias = bias.is_null() ? nullptr : tensor(bias, where, {head->rows});
    }

    void check_output(JsonValue value, const Where& where) {
        const Shape& shape = this->shape(program_.output);
        program_.output_shape = integers(value, where, "output_shape", 1, kMaxSide);
        const std::vector<int>& got = program_.output_shape;
        if (version_ >= 3) return check_output(program_.output, got, where);
        if (got != std::vector<int>{shape.c, shape.h, shape.w} &&
            !(got == std::vector<int>{shape.c} && shape.area() == 1))
            where.fail("output_shape must be that of the output buffer, " + list(shape) + ", got " +
                       list(std::vector<int64_t>(got.begin(), got.end())));
        if (program_.output == program_.input) where.fail("output must not be the input");
        for (int buffer : {program_.input, program_.output})
            if (form(buffer).u8()) where.fail("input and output must not be quantised");
    }

    void check_output(int buffer, const std::vector<int>& shape, const Where& where) const {
        int64_t size = 1;
        for (int side : shape) size = size > kMaxBuffer ? size : size * side;
        if (size != this->shape(buffer).size())
            where.fail("output_shape must have as many elements as the output buffer, " + list(this->shape(buffer)) +
                       ", got " + list(std::vector<int64_t>(shape.begin(), shape.end())));
        if (buffer == program_.input) where.fail("output must not be the input");
        if (form(buffer).u8()) where.fail("input and output must not be quantised");
    }

    void read_more_outputs(JsonValue value, const Where& where) {
        const std::vector<JsonValue> found = items(value, where, "more_outputs");
        if (found.size() >= kMaxOutputs)
            wrong(value, where, "more_outputs", "fewer than " + std::to_string(kMaxOutputs));
        for (JsonValue item : found) {
            const auto [number, shape] = fields(item, where, "each of more_outputs", "buffer", "shape");
            Output output{buffer(number, where, "buffer"), integers(shape, where, "shape", 1, kMaxSide)};
            check_output(output.buffer, output.shape, where);
            program_.more_outputs.push_back(std::move(output));
        }
    }

    // Each output has its place, once: a number in nested objects of one key.
    void check_structure(JsonValue value, const Where& where) const {
        std::vector<bool> placed(1 + program_.more_outputs.size(), false);
        if (!value.is_null())
            place_outputs(value, &placed, where);
        else
            placed[0] = true;
        if (std::find(placed.begin(), placed.end(), false) != placed.end())
            wrong(value, where, "structure", "one that has every output once");
    }

    void place_outputs(JsonValue value, std::vector<bool>* placed, const Where& where) const {
        if (value.type() != JsonValue::Type::object) {
            const size_t number = size_t(integer(value, where, "structure", 0, int64_t(placed->size()) - 1));
            if ((*placed)[number]) wrong(value, where, "structure", "one that has every output once");
            (*placed)[number] = true;
            return;
        }
        if (value.members().size() != 1) wrong(value, where, "structure", "objects of one key");
        for (const auto& [key, inner] : value.members()) {
            if (key == "dict" && inner.type() == JsonValue::Type::object)
                for (const auto& [name, part] : inner.members()) place_outputs(part, placed, where);
            else if (key == "tuple" || key == "list")
                for (JsonValue part : items(inner, where, "structure")) place_outputs(part, placed, where);
            else
                wrong(value, where, "structure", "tuple, list or dict, and what it holds");
        }
    }

    void check_complete(const Where& where) const {
        for (size_t i = 0; i < written_.size(); ++i)
            if (!written_[i]) where.fail("buffer " + std::to_string(i) + " must be written by an op");
        for (size_t i = 0; i < decided_.size(); ++i)
            if (!decided_[i]) where.fail("group " + std::to_string(i) + " must be the gate of an op");
        for (const auto& [name, tensor] : file_.tensors())
            if (!tensor.used) where.fail("tensor " + quoted(name) + " must be used by an op");
    }

    void count(size_t got, size_t must, const char* what, const Where& where) const {
        if (got != must)
            where.fail(what + std::string(" must have ") + std::to_string(must) + " entries, got " +
                       std::to_string(got));
    }

    void same_shape(const Shape& got, const Shape& must, const char* what, const Where& where) const {
        if (!(got == must)) where.fail(what + std::string(" must be ") + list(must) + ", got " + list(got));
    }

    int buffer(JsonValue value, const Where& where, const char* what) const {
        return int(integer(value, where, what, 0, int64_t(program_.buffers.size()) - 1));
    }

    const Shape& shape(int buffer) const { return program_.buffers[size_t(buffer)]; }
    const Form& form(int buffer) const { return program_.forms[size_t(buffer)]; }

    // Products of such numbers and sums stay within the normal range of float32.
    float multiplier(JsonValue value, const Where& where, const char* what) const {
        const float got = real(value, where, what);
        if (got < kLeastScale || got > kMostScale) wrong(value, where, what, "from 2^-64 to 2^64");
        return got;
    }

    template <typename T = float>
    const T* tensor(JsonValue name, const Where& where, const std::vector<int64_t>& shape) {
        constexpr Type type = std::is_same_v<T, float> ? Type::f32 : sizeof(T) == 1 ? Type::i8 : Type::i32;
        static constexpr const char* kNames[] = {"F32", "I8", "I32"};
        const auto found = file_.tensors().find(text(name, where, "a tensor's name"));
        if (found == file_.tensors().end()) where.fail("the tensor " + name.describe() + " must be in the file");
        Tensor& tensor = found->second;
        if (tensor.shape != shape)
            where.fail("the tensor " + name.describe() + " must have the shape " + list(shape) + ", got " +
                       list(tensor.shape));
        if (tensor.type != type)
            where.fail("the tensor " + name.describe() + " must be of type " + kNames[size_t(type)]);
        if (tensor.used) where.fail("the tensor " + name.describe() + " must be used only once");
        tensor.used = true;
        const T* values =
            reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(program_.weights.data()) + tensor.begin);
        const T* end = values + (tensor.end - tensor.begin) / sizeof(T);
        if (!std::all_of(values, end, [](T x) { return std::isfinite(float(x)); }))
            where.fail("the tensor " + name.describe() + " must have finite values only");
        return values;
    }

    Safetensors& file_;
    Program program_;
    std::set<std::string_view> names_;  // of ops
    std::vector<bool> written_;         // per buffer
    std::vector<bool> decided_;         // per group
    std::vector<bool> scaled_;          // per group: its head gives factors
    int64_t version_ = kVersion;
};

}  // namespace

Program load_program(const uint8_t* bytes, size_t size) {
    Safetensors file(bytes, size);
    return Loader(&file).load();
}

}  // namespace cofire
