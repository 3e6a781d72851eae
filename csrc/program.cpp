// Reads a program. The file is untrusted: everything the engine relies on is checked here and in the files that this
// one calls, and nowhere else.
#include "program.h"

#include <algorithm>
#include <set>

#include "format.h"
#include "loader.h"

namespace cofire {

Program Loader::load() {
    const Where where{"cofire.program"};
    const std::unique_ptr<Json> json = parse_json(file_.program(), where);
    check_version(json->root(), where);
    const auto [version, input, output, output_shape, buffers, groups, threshold, ops, digest, more, structure, card,
                quants] =
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

// Of versions that have nothing of what version 3 adds.
std::array<JsonValue, 13> Loader::with_nothing(const std::array<JsonValue, 9>& old) {
    std::array<JsonValue, 13> all{};
    std::copy(old.begin(), old.end(), all.begin());
    return all;
}

void Loader::check_version(JsonValue root, const Where& where) {
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

void Loader::read_buffers(JsonValue value, const Where& where) {
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

void Loader::read_quants(JsonValue value, const Where& where) {
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

void Loader::read_groups(JsonValue value, const Where& where) {
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

void Loader::check_complete(const Where& where) const {
    for (size_t i = 0; i < written_.size(); ++i)
        if (!written_[i]) where.fail("buffer " + std::to_string(i) + " must be written by an op");
    for (size_t i = 0; i < decided_.size(); ++i)
        if (!decided_[i]) where.fail("group " + std::to_string(i) + " must be the gate of an op");
    for (const auto& [name, tensor] : file_.tensors())
        if (!tensor.used) where.fail("tensor " + quoted(name) + " must be used by an op");
}

Program load_program(const uint8_t* bytes, size_t size) {
    Safetensors file(bytes, size);
    return Loader(&file).load();
}

}  // namespace cofire
