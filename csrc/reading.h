// A file's JSON as values of one type each, or an error that says where, what must be how, and what was got.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "json.h"
#include "program.h"

namespace cofire {

// The part of the file that is being read; begins every message.
struct Where {
    std::string text;

    [[noreturn]] void fail(const std::string& what) const {
        throw std::runtime_error("invalid program file: " + text + ": " + what);
    }
};

std::string list(const std::vector<int64_t>& values);
std::string list(const Shape& shape);

[[noreturn]] void wrong(JsonValue value, const Where& where, const std::string& what, const std::string& must);

std::unique_ptr<Json> parse_json(std::string_view text, const Where& where);
int64_t integer(JsonValue value, const Where& where, const std::string& what, int64_t low, int64_t high);
bool boolean(JsonValue value, const Where& where, const char* what);
float real(JsonValue value, const Where& where, const char* what);
std::string_view text(JsonValue value, const Where& where, const char* what);
std::vector<JsonValue> items(JsonValue value, const Where& where, const char* what);
std::vector<int> integers(JsonValue value, const Where& where, const char* what, int64_t low, int64_t high);
std::vector<int> integers(JsonValue value, const Where& where, const char* what, int64_t low, int64_t high,
                          size_t count);
Pair pair(JsonValue value, const Where& where, const char* what, int64_t low = 1);
Padding padding(JsonValue value, const Where& where);

// The place of a word in a list of words.
template <size_t N>
int choice(JsonValue value, const Where& where, const char* what, const std::string_view (&words)[N]) {
    const auto found = value.type() == JsonValue::Type::string ? std::find(words, words + N, value.text()) : words + N;
    if (found == words + N) {
        std::string must = "one of";
        for (std::string_view word : words) must.append(" ").append(word);
        wrong(value, where, what, must);
    }
    return int(found - words);
}

// The values of an object that has exactly these keys, in the order of the names.
template <typename... Names>
std::array<JsonValue, sizeof...(Names)> fields(JsonValue object, const Where& where, const char* what, Names... names) {
    constexpr size_t kCount = sizeof...(Names);
    const std::array<std::string_view, kCount> keys{names...};
    if (object.type() != JsonValue::Type::object) wrong(object, where, what, "an object");
    std::array<JsonValue, kCount> values;
    std::array<bool, kCount> found{};
    for (const auto& [key, value] : object.members()) {
        const size_t place = size_t(std::find(keys.begin(), keys.end(), key) - keys.begin());
        if (place == kCount) where.fail(what + std::string(" has the unknown key ") + quoted(key));
        values[place] = value;
        found[place] = true;
    }
    for (size_t i = 0; i < kCount; ++i)
        if (!found[i]) where.fail(what + std::string(" lacks the key ") + quoted(keys[i]));
    return values;
}

}  // namespace cofire
