// A strict JSON reader (RFC 8259) for untrusted text: no duplicate keys, no bad UTF-8, nothing after the value, limited
// depth. Linear in time but for sorting the keys of each object; 16 bytes of memory per value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cofire {

class Json;

// One value of a parsed text; cheap to copy, valid as long as the Json it is from. Each accessor is for one type only.
class JsonValue {
   public:
    enum class Type : uint8_t { null, boolean, number, string, array, object };

    JsonValue() = default;

    Type type() const;
    bool is_null() const { return type() == Type::null; }
    bool boolean() const;
    double number() const;
    std::string_view text() const;
    std::vector<JsonValue> items() const;
    std::vector<std::pair<std::string_view, JsonValue>> members() const;

    // If this is a number without fraction and exponent (1, not 1.0 or 1e0) that a double holds exactly, sets `value`.
    bool integer(int64_t* value) const;

    // For error messages: `"relu"`, `3.5`, `a list of 4`, ...
    std::string describe() const;

   private:
    friend class Json;
    JsonValue(const Json* json, size_t index) : json_(json), index_(index) {}

    const Json* json_ = nullptr;
    size_t index_ = 0;
};

// A parsed text. Owns what its values show.
class Json {
   public:
    // Throws std::runtime_error, which says what is wrong and at which byte.
    explicit Json(std::string_view text);
    Json(const Json&) = delete;
    Json& operator=(const Json&) = delete;

    JsonValue root() const { return {this, 0}; }

   private:
    friend class JsonValue;
    friend class JsonParser;

    // Values lie in the order of the text, children right behind their container; an object's children are key, value,
    // key, value.
    struct Node {
        JsonValue::Type type;
        uint32_t count;  // children of an array, members of an object, bytes of a string, 0 or 1 for a boolean; of a number: 1 if digits are all
                         // it has
        union {
            double number;
            size_t start;  // string: offset into strings_
            size_t end;    // array, object: index of the first node behind it
        };
    };

    size_t behind(size_t index) const;

    std::vector<Node> nodes_;
    std::string strings_;
};

// `text` in quotes for an error message: shortened, control characters replaced.
std::string quoted(std::string_view text);

}  // namespace cofire
