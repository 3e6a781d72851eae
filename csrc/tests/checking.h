// Checks that print what failed, and go on.
#pragma once

#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>

namespace cofire::test {

inline int failures = 0, checks = 0;

inline void check(bool ok, const char* text, int line) {
    ++checks;
    if (ok) return;
    ++failures;
    std::printf("line %d: %s\n", line, text);
}

// The message must contain `part`; an unexpected success or another message is a failure.
inline void check_refused(const std::function<void()>& action, const std::string& part, int line) {
    try {
        action();
        check(false, ("not refused, expected: " + part).c_str(), line);
    } catch (const std::runtime_error& error) {
        const std::string message = error.what();
        check(message.find(part) != std::string::npos, ("expected: " + part + "\n     got: " + message).c_str(), line);
    }
}

#define CHECK(condition) check((condition), #condition, __LINE__)

// For `main` to return: 0 if nothing failed.
inline int summary() {
    std::printf("%d checks, %d failures\n", checks, failures);
    return failures > 0;
}

}  // namespace cofire::test
