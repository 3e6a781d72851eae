#include "reading.h"

#include <cmath>

#include "format.h"

namespace cofire {

std::string list(const std::vector<int64_t>& values) {
    std::string text = "[";
    for (size_t i = 0; i < values.size() && i < 8; ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
    return text + (values.size() > 8 ? ", ...]" : "]");
}

std::string list(const Shape& shape) { return list(std::vector<int64_t>{shape.c, shape.h, shape.w}); }

[[noreturn]] void wrong(JsonValue value, const Where& where, const std::string& what, const std::string& must) {
    where.fail(what + " must be " + must + ", got " + value.describe());
}

int64_t integer(JsonValue value, const Where& where, const std::string& what, int64_t low, int64_t high) {
    int64_t result = 0;
    if (!value.integer(&result) || result < low || result > high)
        wrong(value, where, what, "an integer from " + std::to_string(low) + " to " + std::to_string(high));
    return result;
}

bool boolean(JsonValue value, const Where& where, const char* what) {
    if (value.type() != JsonValue::Type::boolean) wrong(value, where, what, "true or false");
    return value.boolean();
}

float real(JsonValue value, const Where& where, const char* what) {
    if (value.type() != JsonValue::Type::number || std::abs(value.number()) > 3.4e38)
        wrong(value, where, what, "a float32 number");
    return float(value.number());
}

std::string_view text(JsonValue value, const Where& where, const char* what) {
    if (value.type() != JsonValue::Type::string) wrong(value, where, what, "a string");
    return value.text();
}

std::vector<JsonValue> items(JsonValue value, const Where& where, const char* what) {
    if (value.type() != JsonValue::Type::array) wrong(value, where, what, "a list");
    return value.items();
}

std::vector<int> integers(JsonValue value, const Where& where, const char* what, int64_t low, int64_t high) {
    const std::string each = std::string("each of ") + what;
    std::vector<int> result;
    for (JsonValue item : items(value, where, what)) result.push_back(int(integer(item, where, each, low, high)));
    return result;
}

std::vector<int> integers(JsonValue value, const Where& where, const char* what, int64_t low, int64_t high,
                          size_t count) {
    std::vector<int> result = integers(value, where, what, low, high);
    if (result.size() != count) wrong(value, where, what, "a list of " + std::to_string(count));
    return result;
}

Pair pair(JsonValue value, const Where& where, const char* what, int64_t low) {
    const std::vector<int> sides = integers(value, where, what, low, kMaxSide, 2);
    return {sides[0], sides[1]};
}

Padding padding(JsonValue value, const Where& where) {
    const std::vector<int> sides = integers(value, where, "padding", 0, kMaxSide - 1, 4);
    return {sides[0], sides[1], sides[2], sides[3]};
}

std::unique_ptr<Json> parse_json(std::string_view text, const Where& where) {
    try {
        return std::make_unique<Json>(text);
    } catch (const std::runtime_error& error) {
        where.fail(error.what());
    }
}

}  // namespace cofire
