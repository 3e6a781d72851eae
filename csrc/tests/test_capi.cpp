// Tests of cofire.h: what it returns for every kind of wrong argument, and that it runs a program. Exit code 0 if all
// pass.
#include <stdio.h>   // fdopen
#include <stdlib.h>  // mkstemp

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <thread>

#include "../cofire.h"
#include "build_program.h"

namespace cofire::test {
namespace {

int failures = 0, checks = 0;

void check(bool ok, const char* text, int line) {
    ++checks;
    if (ok) return;
    ++failures;
    std::printf("line %d: %s (last error: %s)\n", line, text, cofire_last_error());
}

#define CHECK(condition) check((condition), #condition, __LINE__)

bool says(const char* part) { return std::string(cofire_last_error()).find(part) != std::string::npos; }

cofire_engine* loaded(const Source& source) {
    const std::vector<uint8_t> bytes = file_of(source);
    cofire_engine* engine = nullptr;
    CHECK(cofire_load_memory(bytes.data(), bytes.size(), &engine) == COFIRE_OK);
    return engine;
}

// Run first, while nothing has failed.
void test_version_and_error() {
    CHECK(cofire_version() != nullptr && cofire_version()[0] != 0);
    CHECK(cofire_last_error() != nullptr && cofire_last_error()[0] == 0);
}

void test_load_refuses() {
    int place = 0;
    auto* const anything = reinterpret_cast<cofire_engine*>(&place);
    cofire_engine* engine = anything;
    CHECK(cofire_load(nullptr, &engine) == COFIRE_BAD_ARGUMENT && engine == nullptr && says("path must not be null"));
    CHECK(cofire_load("x", nullptr) == COFIRE_BAD_ARGUMENT && says("engine must not be null"));
    engine = anything;
    CHECK(cofire_load("/no/such.cofire", &engine) == COFIRE_CANNOT_READ && engine == nullptr);
    CHECK(says("cannot read /no/such.cofire: No such file"));
    CHECK(cofire_load("/", &engine) == COFIRE_CANNOT_READ);
    CHECK(cofire_load("/dev/null", &engine) == COFIRE_BAD_PROGRAM && says("8 bytes at least, got 0"));
    CHECK(cofire_load_memory(nullptr, 8, &engine) == COFIRE_BAD_ARGUMENT && says("bytes must not be null"));
    CHECK(cofire_load_memory("", 0, &engine) == COFIRE_BAD_PROGRAM && says("8 bytes at least, got 0"));
    CHECK(cofire_load_memory("", 0, nullptr) == COFIRE_BAD_ARGUMENT);
    engine = anything;
    CHECK(cofire_load_memory("0123456789", 10, &engine) == COFIRE_BAD_PROGRAM && engine == nullptr);
    const std::string path(2000, 'x');
    CHECK(cofire_load(path.c_str(), &engine) == COFIRE_CANNOT_READ && std::string(cofire_last_error()).size() == 1023);
    cofire_free(nullptr);
}

void test_load_from_file() {
    const std::vector<uint8_t> bytes = file_of(depthwise_net());
    char path[] = "/tmp/cofire_capi_XXXXXX";
    std::FILE* file = fdopen(mkstemp(path), "wb");
    std::fwrite(bytes.data(), 1, bytes.size(), file);
    std::fclose(file);
    cofire_engine* engine = nullptr;
    CHECK(cofire_load(path, &engine) == COFIRE_OK && engine != nullptr);
    cofire_free(engine);
    std::remove(path);
}

void test_sizes() {
    cofire_engine* engine = loaded(elementwise_net());
    int shape[3] = {};
    size_t size = 0;
    CHECK(cofire_input_shape(engine, shape) == COFIRE_OK && shape[0] == 2 && shape[1] == 6 && shape[2] == 5);
    CHECK(cofire_output_size(engine, &size) == COFIRE_OK && size == 36);
    CHECK(cofire_input_shape(nullptr, shape) == COFIRE_BAD_ARGUMENT && says("engine must not be null"));
    CHECK(cofire_input_shape(engine, nullptr) == COFIRE_BAD_ARGUMENT && says("shape must not be null"));
    CHECK(cofire_output_size(nullptr, &size) == COFIRE_BAD_ARGUMENT);
    CHECK(cofire_output_size(engine, nullptr) == COFIRE_BAD_ARGUMENT && says("size must not be null"));
    cofire_free(engine);
}

void test_threshold() {
    const float infinity = std::numeric_limits<float>::infinity();
    cofire_engine* engine = loaded(depthwise_net());
    float threshold = 0;
    CHECK(cofire_get_threshold(engine, &threshold) == COFIRE_OK && threshold == 0.5f);  // the program's
    CHECK(cofire_set_threshold(engine, -1.5f) == COFIRE_OK);
    CHECK(cofire_set_threshold(engine, NAN) == COFIRE_BAD_ARGUMENT && says("must be a number, got NaN"));
    CHECK(cofire_get_threshold(engine, &threshold) == COFIRE_OK && threshold == -1.5f);
    CHECK(cofire_set_threshold(engine, infinity) == COFIRE_OK && cofire_set_threshold(engine, -infinity) == COFIRE_OK);
    CHECK(cofire_set_threshold(nullptr, 0) == COFIRE_BAD_ARGUMENT);
    CHECK(cofire_get_threshold(nullptr, &threshold) == COFIRE_BAD_ARGUMENT);
    CHECK(cofire_get_threshold(engine, nullptr) == COFIRE_BAD_ARGUMENT);
    cofire_free(engine);
}

void test_run() {
    cofire_engine* engine = loaded(residual_net());
    constexpr int kImage = 3 * 8 * 8, kOutput = 5;
    std::vector<float> input(2 * kImage), one(kOutput), both(2 * kOutput), open(kOutput), closed(kOutput);
    for (size_t i = 0; i < input.size(); ++i) input[i] = float(i % 17) / 8 - 1;
    CHECK(cofire_run(engine, input.data() + kImage, 1, one.data(), 1) == COFIRE_OK);
    CHECK(cofire_run(engine, input.data(), 2, both.data(), 2) == COFIRE_OK);
    for (int i = 0; i < kOutput; ++i)
        CHECK(std::isfinite(one[size_t(i)]) && std::abs(one[size_t(i)] - both[size_t(kOutput + i)]) < 1e-4f);
    // The threshold matters: with all filters off, other logits come out than with all on.
    cofire_set_threshold(engine, -std::numeric_limits<float>::infinity());
    CHECK(cofire_run(engine, input.data(), 1, open.data(), 1) == COFIRE_OK);
    cofire_set_threshold(engine, std::numeric_limits<float>::infinity());
    CHECK(cofire_run(engine, input.data(), 1, closed.data(), 1) == COFIRE_OK);
    CHECK(open != closed);

    CHECK(cofire_run(nullptr, input.data(), 1, one.data(), 1) == COFIRE_BAD_ARGUMENT &&
          says("engine must not be null"));
    CHECK(cofire_run(engine, nullptr, 1, one.data(), 1) == COFIRE_BAD_ARGUMENT && says("input must not be null"));
    CHECK(cofire_run(engine, input.data(), 1, nullptr, 1) == COFIRE_BAD_ARGUMENT && says("output must not be null"));
    CHECK(cofire_run(engine, input.data(), 0, one.data(), 1) == COFIRE_BAD_ARGUMENT &&
          says("batch must be 1 or more, got 0"));
    CHECK(cofire_run(engine, input.data(), -3, one.data(), 1) == COFIRE_BAD_ARGUMENT);
    CHECK(cofire_run(engine, input.data(), 1, one.data(), 0) == COFIRE_BAD_ARGUMENT &&
          says("threads must be 1 or more, got 0"));
    CHECK(cofire_run(engine, input.data(), 1, one.data(), -1) == COFIRE_BAD_ARGUMENT);
    cofire_free(engine);
}

void test_several_outputs() {
    cofire_engine* engine = loaded(maps_net());
    int count = 0, shape[3] = {0, 0, 0};
    size_t size = 0;
    CHECK(cofire_output_count(engine, &count) == COFIRE_OK && count == 3);
    CHECK(cofire_output_size(engine, &size) == COFIRE_OK && size == 30 + 144 + 90);
    CHECK(cofire_output_shape(engine, 1, shape) == COFIRE_OK && shape[0] == 6 && shape[1] == 4 && shape[2] == 6);
    CHECK(cofire_output_shape(engine, 3, shape) == COFIRE_BAD_ARGUMENT && says("number must be 0 to 2, got 3"));
    CHECK(cofire_output_shape(engine, -1, shape) == COFIRE_BAD_ARGUMENT);
    CHECK(cofire_output_shape(nullptr, 0, shape) == COFIRE_BAD_ARGUMENT);
    CHECK(cofire_output_count(engine, nullptr) == COFIRE_BAD_ARGUMENT);
    std::vector<float> input(2 * 24), one(size), both(2 * size);
    for (size_t i = 0; i < input.size(); ++i) input[i] = float(i % 7) / 4 - 1;
    CHECK(cofire_run(engine, input.data() + 24, 1, one.data(), 1) == COFIRE_OK);
    CHECK(cofire_run(engine, input.data(), 2, both.data(), 1) == COFIRE_OK);
    // Each output for both images, one after the other.
    for (size_t i = 0; i < 30; ++i) CHECK(one[i] == both[30 + i]);
    for (size_t i = 0; i < 144; ++i) CHECK(one[30 + i] == both[60 + 144 + i]);
    for (size_t i = 0; i < 90; ++i) CHECK(one[174 + i] == both[348 + 90 + i]);
    cofire_free(engine);
}

// Bytes come out the same whatever the batch and the threads; the threshold decides; outputs are float32.
void test_bytes() {
    cofire_engine* engine = loaded(quantized_net());
    constexpr int kImage = 3 * 8 * 8, kOutput = 5;
    size_t size = 0;
    CHECK(cofire_output_size(engine, &size) == COFIRE_OK && size == kOutput);
    std::vector<float> input(3 * kImage), one(kOutput), all(3 * kOutput), open(kOutput), closed(kOutput);
    for (size_t i = 0; i < input.size(); ++i) input[i] = float(i % 23) / 4 - 3;
    CHECK(cofire_run(engine, input.data(), 3, all.data(), 2) == COFIRE_OK);
    for (int image = 0; image < 3; ++image)
        for (int threads = 1; threads <= 2; ++threads) {
            CHECK(cofire_run(engine, input.data() + image * kImage, 1, one.data(), threads) == COFIRE_OK);
            CHECK(std::memcmp(one.data(), all.data() + image * kOutput, sizeof(float) * kOutput) == 0);
        }
    cofire_set_threshold(engine, -std::numeric_limits<float>::infinity());
    CHECK(cofire_run(engine, input.data(), 1, open.data(), 1) == COFIRE_OK);
    cofire_set_threshold(engine, std::numeric_limits<float>::infinity());
    CHECK(cofire_run(engine, input.data(), 1, closed.data(), 1) == COFIRE_OK);
    CHECK(open != closed);
    for (float& value : input) value = NAN;  // counts as 0
    CHECK(cofire_run(engine, input.data(), 1, one.data(), 1) == COFIRE_OK);
    for (float value : one) CHECK(std::isfinite(value));
    cofire_free(engine);
}

void test_limits() {
    for (const Source& source : {residual_net(), quantized_net()}) {
        const std::vector<uint8_t> bytes = file_of(source);
        cofire_engine* engine = nullptr;
        const cofire_limits little_memory{100, 0, 0}, little_work{0, 1000, 0}, enough{1 << 20, 1e9, -1};
        CHECK(cofire_load_memory_within(&little_memory, bytes.data(), bytes.size(), &engine) == COFIRE_TOO_COSTLY);
        CHECK(engine == nullptr && says("at most 100 bytes of memory"));
        CHECK(cofire_load_memory_within(&little_work, bytes.data(), bytes.size(), &engine) == COFIRE_TOO_COSTLY);
        CHECK(engine == nullptr && says("at most 1000 steps of work"));
        CHECK(cofire_load_memory_within(&enough, bytes.data(), bytes.size(), &engine) == COFIRE_OK);
        cofire_free(engine);
    }
}

// The text belongs to the thread whose call failed.
void test_errors_are_per_thread() {
    CHECK(cofire_output_size(nullptr, nullptr) == COFIRE_BAD_ARGUMENT);
    const std::string before = cofire_last_error();
    std::string elsewhere = "not run";
    std::thread([&] { elsewhere = cofire_last_error(); }).join();
    CHECK(elsewhere.empty() && before == cofire_last_error() && !before.empty());
}

}  // namespace
}  // namespace cofire::test

int main() {
    using namespace cofire::test;
    test_version_and_error();
    test_load_refuses();
    test_load_from_file();
    test_sizes();
    test_threshold();
    test_run();
    test_several_outputs();
    test_bytes();
    test_limits();
    test_errors_are_per_thread();
    std::printf("%d checks, %d failures\n", checks, failures);
    return failures == 0 ? 0 : 1;
}
