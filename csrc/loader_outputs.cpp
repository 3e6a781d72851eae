// What a caller gets: buffers in shapes of their own, and the structure they stand in.
#include <algorithm>

#include "loader.h"

namespace cofire {

void Loader::check_output(JsonValue value, const Where& where) {
    const Shape& shape = this->shape(program_.output);
    program_.output_shape = integers(value, where, "output_shape", 1, kMaxSide);
    const std::vector<int>& got = program_.output_shape;
    if (version_ >= 3) return check_output(program_.output, got, where);
    if (got != std::vector<int>{shape.c, shape.h, shape.w} && !(got == std::vector<int>{shape.c} && shape.area() == 1))
        where.fail("output_shape must be that of the output buffer, " + list(shape) + ", got " +
                   list(std::vector<int64_t>(got.begin(), got.end())));
    if (program_.output == program_.input) where.fail("output must not be the input");
    for (int buffer : {program_.input, program_.output})
        if (form(buffer).u8()) where.fail("input and output must not be quantised");
}

void Loader::check_output(int buffer, const std::vector<int>& shape, const Where& where) const {
    int64_t size = 1;
    for (int side : shape) size = size > kMaxBuffer ? size : size * side;
    if (size != this->shape(buffer).size())
        where.fail("output_shape must have as many elements as the output buffer, " + list(this->shape(buffer)) +
                   ", got " + list(std::vector<int64_t>(shape.begin(), shape.end())));
    if (buffer == program_.input) where.fail("output must not be the input");
    if (form(buffer).u8()) where.fail("input and output must not be quantised");
}

void Loader::read_more_outputs(JsonValue value, const Where& where) {
    const std::vector<JsonValue> found = items(value, where, "more_outputs");
    if (found.size() >= kMaxOutputs) wrong(value, where, "more_outputs", "fewer than " + std::to_string(kMaxOutputs));
    for (JsonValue item : found) {
        const auto [number, shape] = fields(item, where, "each of more_outputs", "buffer", "shape");
        Output output{buffer(number, where, "buffer"), integers(shape, where, "shape", 1, kMaxSide)};
        check_output(output.buffer, output.shape, where);
        program_.more_outputs.push_back(std::move(output));
    }
}

// Each output has its place, once: a number in nested objects of one key.
void Loader::check_structure(JsonValue value, const Where& where) const {
    std::vector<bool> placed(1 + program_.more_outputs.size(), false);
    if (!value.is_null())
        place_outputs(value, &placed, where);
    else
        placed[0] = true;
    if (std::find(placed.begin(), placed.end(), false) != placed.end())
        wrong(value, where, "structure", "one that has every output once");
}

void Loader::place_outputs(JsonValue value, std::vector<bool>* placed, const Where& where) const {
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

}  // namespace cofire
