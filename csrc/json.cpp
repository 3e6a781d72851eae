#include "json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <locale>
#include <sstream>
#include <stdexcept>

namespace cofire {

namespace {

constexpr int kMaxDepth = 32;

bool is_digit(int c) { return c >= '0' && c <= '9'; }

// Correctly rounded and without regard to the locale. False if out of range.
bool parse_double(const char* begin, const char* end, double* value) {
#if defined(__cpp_lib_to_chars)
    return std::from_chars(begin, end, *value).ec == std::errc();
#else
    std::istringstream stream(std::string(begin, end));
    stream.imbue(std::locale::classic());
    return bool(stream >> *value);
#endif
}

// Bytes of the UTF-8 character that starts here, 0 if it is none: no overlong forms, no surrogates, none above
// U+10FFFF.
size_t utf8_length(std::string_view text) {
    auto byte = [&](size_t i) { return i < text.size() ? uint8_t(text[i]) : 0; };
    auto follows = [&](size_t i, int low, int high) { return byte(i) >= low && byte(i) <= high; };
    auto tail = [&](size_t i) { return follows(i, 0x80, 0xBF); };
    const int first = byte(0);
    if (first < 0x80) return 1;
    if (first < 0xC2) return 0;
    if (first < 0xE0) return tail(1) ? 2 : 0;
    if (first < 0xF0) {
        const int low = first == 0xE0 ? 0xA0 : 0x80, high = first == 0xED ? 0x9F : 0xBF;
        return follows(1, low, high) && tail(2) ? 3 : 0;
    }
    if (first > 0xF4) return 0;
    const int low = first == 0xF0 ? 0x90 : 0x80, high = first == 0xF4 ? 0x8F : 0xBF;
    return follows(1, low, high) && tail(2) && tail(3) ? 4 : 0;
}

void append_utf8(std::string* out, uint32_t code) {
    auto put = [&](uint32_t byte) { out->push_back(char(byte)); };
    if (code < 0x80) {
        put(code);
    } else if (code < 0x800) {
        put(0xC0 | code >> 6);
        put(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        put(0xE0 | code >> 12);
        put(0x80 | (code >> 6 & 0x3F));
        put(0x80 | (code & 0x3F));
    } else {
        put(0xF0 | code >> 18);
        put(0x80 | (code >> 12 & 0x3F));
        put(0x80 | (code >> 6 & 0x3F));
        put(0x80 | (code & 0x3F));
    }
}

}  // namespace

class JsonParser {
   public:
    JsonParser(Json* json, std::string_view text) : json_(*json), text_(text) {}

    void parse() {
        if (text_.size() > std::numeric_limits<uint32_t>::max()) fail("text is too long");  // counts have 32 bits
        skip_space();
        value(0);
        skip_space();
        if (at_ != text_.size()) fail("unexpected text after the value");
    }

   private:
    using Type = JsonValue::Type;

    [[noreturn]] void fail(const std::string& what) const {
        throw std::runtime_error("invalid JSON at byte " + std::to_string(at_) + ": " + what);
    }

    int peek() const { return at_ < text_.size() ? uint8_t(text_[at_]) : -1; }

    bool accept(char c) {
        if (peek() != c) return false;
        ++at_;
        return true;
    }

    void skip_space() {
        for (int c = peek(); c == ' ' || c == '\t' || c == '\n' || c == '\r'; c = peek()) ++at_;
    }

    size_t add(Type type, uint32_t count = 0) {
        Json::Node node;
        node.type = type;
        node.count = count;
        node.number = 0;
        json_.nodes_.push_back(node);
        return json_.nodes_.size() - 1;
    }

    void value(int depth) {
        if (depth > kMaxDepth) fail("nested too deeply");
        switch (peek()) {
            case '{':
                return object(depth);
            case '[':
                return array(depth);
            case '"':
                return string();
            case 't':
                return word("true", Type::boolean, 1);
            case 'f':
                return word("false", Type::boolean, 0);
            case 'n':
                return word("null", Type::null, 0);
            default:
                return number();
        }
    }

    void word(std::string_view expected, Type type, uint32_t count) {
        if (text_.substr(at_, expected.size()) != expected) fail("expected a value");
        at_ += expected.size();
        add(type, count);
    }

    void number() {
        const size_t begin = at_;
        accept('-');
        if (!is_digit(peek())) fail("expected a value");
        if (!accept('0')) digits();
        const size_t whole = at_;
        if (accept('.')) digits();
        if (accept('e') || accept('E')) {
            if (!accept('+')) accept('-');
            digits();
        }
        double parsed = 0;
        if (!parse_double(text_.data() + begin, text_.data() + at_, &parsed)) fail("number is out of range");
        json_.nodes_[add(Type::number, at_ == whole)].number = parsed;
    }

    void digits() {
        if (!is_digit(peek())) fail("expected a digit");
        while (is_digit(peek())) ++at_;
    }

    void string() {
        ++at_;  // the opening quote
        std::string& out = json_.strings_;
        const size_t start = out.size();
        while (!accept('"')) {
            const size_t plain = at_;
            while (at_ < text_.size() && text_[at_] >= 0x20 && text_[at_] < 0x7F && text_[at_] != '"' &&
                   text_[at_] != '\\')
                ++at_;
            out.append(text_, plain, at_ - plain);
            if (at_ == text_.size()) fail("string has no end");
            if (at_ == plain) special(&out);
        }
        json_.nodes_[add(Type::string, uint32_t(out.size() - start))].start = start;
    }

    // An escape or a character that is not printable ASCII; nothing at a closing quote.
    void special(std::string* out) {
        const int c = peek();
        if (c == '"') return;
        if (c == '\\') {
            ++at_;
            return escape(out);
        }
        if (c < 0x20) fail("control character in a string");
        const size_t length = utf8_length(text_.substr(at_));
        if (length == 0) fail("string is not UTF-8");
        out->append(text_, at_, length);
        at_ += length;
    }

    void escape(std::string* out) {
        static constexpr std::string_view kLetters = "\"\\/bfnrt", kMeaning = "\"\\/\b\f\n\r\t";
        if (accept('u')) return append_utf8(out, unicode());
        const size_t which = peek() < 0 ? std::string_view::npos : kLetters.find(char(peek()));
        if (which == std::string_view::npos) fail("unknown escape");
        ++at_;
        out->push_back(kMeaning[which]);
    }

    uint32_t unicode() {
        const uint32_t first = hex4();
        if (first < 0xD800 || first > 0xDFFF) return first;
        if (first > 0xDBFF || !accept('\\') || !accept('u')) fail("half of a surrogate pair");
        const uint32_t second = hex4();
        if (second < 0xDC00 || second > 0xDFFF) fail("half of a surrogate pair");
        return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
    }

    uint32_t hex4() {
        uint32_t code = 0;
        for (int i = 0; i < 4; ++i, ++at_) {
            const int c = peek(), lower = c | 0x20;
            if (!is_digit(c) && !(lower >= 'a' && lower <= 'f')) fail("expected four hexadecimal digits");
            code = code << 4 | uint32_t(is_digit(c) ? c - '0' : lower - 'a' + 10);
        }
        return code;
    }

    void array(int depth) {
        const size_t index = add(Type::array);
        uint32_t count = 0;
        ++at_;
        skip_space();
        if (!accept(']')) {
            do {
                skip_space();
                value(depth + 1);
                ++count;
                skip_space();
            } while (accept(','));
            if (!accept(']')) fail("expected ',' or ']'");
        }
        close(index, count);
    }

    void object(int depth) {
        const size_t index = add(Type::object);
        uint32_t count = 0;
        ++at_;
        skip_space();
        if (!accept('}')) {
            do {
                skip_space();
                if (peek() != '"') fail("expected a key");
                string();
                skip_space();
                if (!accept(':')) fail("expected ':'");
                skip_space();
                value(depth + 1);
                ++count;
                skip_space();
            } while (accept(','));
            if (!accept('}')) fail("expected ',' or '}'");
        }
        close(index, count);
        refuse_duplicates(index);
    }

    void close(size_t index, uint32_t count) {
        json_.nodes_[index].count = count;
        json_.nodes_[index].end = json_.nodes_.size();
    }

    void refuse_duplicates(size_t index) {
        keys_.clear();
        const size_t end = json_.behind(index);
        for (size_t key = index + 1; key < end; key = json_.behind(key + 1)) {
            const Json::Node& node = json_.nodes_[key];
            keys_.push_back(std::string_view(json_.strings_).substr(node.start, node.count));
        }
        std::sort(keys_.begin(), keys_.end());
        const auto twice = std::adjacent_find(keys_.begin(), keys_.end());
        if (twice != keys_.end()) fail("the object that ends here has the key " + quoted(*twice) + " twice");
    }

    Json& json_;
    std::string_view text_;
    size_t at_ = 0;
    std::vector<std::string_view> keys_;  // of one object at a time; a member only to save allocations
};

Json::Json(std::string_view text) { JsonParser(this, text).parse(); }

size_t Json::behind(size_t index) const {
    const Node& node = nodes_[index];
    return node.type == JsonValue::Type::array || node.type == JsonValue::Type::object ? node.end : index + 1;
}

JsonValue::Type JsonValue::type() const { return json_->nodes_[index_].type; }

bool JsonValue::boolean() const { return json_->nodes_[index_].count != 0; }

double JsonValue::number() const { return json_->nodes_[index_].number; }

std::string_view JsonValue::text() const {
    const Json::Node& node = json_->nodes_[index_];
    return std::string_view(json_->strings_).substr(node.start, node.count);
}

std::vector<JsonValue> JsonValue::items() const {
    const Json::Node& node = json_->nodes_[index_];
    std::vector<JsonValue> result;
    result.reserve(node.count);
    for (size_t i = index_ + 1; i < node.end; i = json_->behind(i)) result.push_back({json_, i});
    return result;
}

std::vector<std::pair<std::string_view, JsonValue>> JsonValue::members() const {
    const Json::Node& node = json_->nodes_[index_];
    std::vector<std::pair<std::string_view, JsonValue>> result;
    result.reserve(node.count);
    for (size_t i = index_ + 1; i < node.end; i = json_->behind(i + 1))
        result.emplace_back(JsonValue(json_, i).text(), JsonValue(json_, i + 1));
    return result;
}

bool JsonValue::integer(int64_t* value) const {
    constexpr double kExact = 9007199254740992.0;  // 2^53: above it, neighbours share one double
    if (type() != Type::number || json_->nodes_[index_].count == 0) return false;
    const double x = number();
    if (x <= -kExact || x >= kExact) return false;
    *value = int64_t(x);
    return true;
}

std::string JsonValue::describe() const {
    const uint32_t count = json_->nodes_[index_].count;
    switch (type()) {
        case Type::null:
            return "null";
        case Type::boolean:
            return boolean() ? "true" : "false";
        case Type::string:
            return quoted(text());
        case Type::array:
            return "a list of " + std::to_string(count);
        case Type::object:
            return "an object of " + std::to_string(count);
        case Type::number:
            break;
    }
    int64_t whole = 0;
    if (integer(&whole)) return std::to_string(whole);
    std::ostringstream stream;
    stream.imbue(std::locale::classic());
    stream.precision(15);
    stream << number();
    if (number() == std::trunc(number()) && std::abs(number()) < 1e15) stream << ".0";
    return stream.str();
}

std::string quoted(std::string_view text) {
    constexpr size_t kShown = 80;
    size_t shown = std::min(text.size(), kShown);
    while (shown < text.size() && shown > 0 && (uint8_t(text[shown]) & 0xC0) == 0x80) --shown;  // no half character
    std::string result(text.substr(0, shown));
    for (char& c : result)
        if (uint8_t(c) < 0x20 || c == 0x7F) c = '?';
    return '"' + result + (shown < text.size() ? "..." : "") + '"';
}

}  // namespace cofire
