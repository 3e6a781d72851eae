// Tests of what load_program stands on: JSON and SHA-256. Prints the failures; exit code 0 if none.
#include <string>

#include "../json.h"
#include "../sha256.h"
#include "checking.h"

namespace cofire::test {
namespace {

#define BAD_JSON(text, part) check_refused([&] { Json json(text); }, (part), __LINE__)

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

}  // namespace
}  // namespace cofire::test

int main() {
    cofire::test::test_sha256();
    cofire::test::test_json_values();
    cofire::test::test_json_strings();
    cofire::test::test_json_numbers();
    cofire::test::test_json_structure();
    return cofire::test::summary();
}
