// libFuzzer's entry: bytes -> cofire_load_memory_within -> cofire_run, through the C interface alone. `make fuzz`
// builds and runs it with clang's sanitizers; fuzz_program.cpp is the same idea for a compiler without libFuzzer.
//
// The mutator knows the file's structure: most mutants keep a right length of the header and a right digest, so that
// what is wrong lies deeper. Whatever the bytes are, a case may take 2 seconds of CPU and 1 GB at most.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "../cofire.h"
#include "../sha256.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

namespace {

// Small enough for thousands of cases in a second; one file in 64, by its bytes, may cost more. The default limits are
// tested elsewhere.
constexpr cofire_limits kTight = {size_t(16) << 20, 1 << 21, -1};
constexpr cofire_limits kWide = {size_t(64) << 20, 1 << 26, -1};

cofire_limits limits_for(const uint8_t* data, size_t size) {
    uint32_t mixed = 1;
    for (size_t i = 0; i < size; ++i) mixed = mixed * 31 + data[i];
    return (mixed >> 16) % 64 == 0 ? kWide : kTight;
}

constexpr size_t kDigest = 64;  // characters

struct Parts {
    std::string header, data;
};

Parts split(const uint8_t* bytes, size_t size) {
    uint64_t length = 0;
    for (size_t i = 0; i < 8 && i < size; ++i) length |= uint64_t(bytes[i]) << 8 * i;
    const char* text = reinterpret_cast<const char*>(bytes);
    if (size < 8 || length > size - 8) return {std::string(text, size), ""};
    return {std::string(text + 8, size_t(length)), std::string(text + 8 + length, size - 8 - size_t(length))};
}

std::string joined(Parts parts) {
    const size_t at = parts.header.find("sha256");
    if (at != std::string::npos) {
        const size_t hex = parts.header.find_first_of("0123456789abcdef", at + 6);
        if (hex != std::string::npos && hex + kDigest <= parts.header.size())
            parts.header.replace(
                hex, kDigest, cofire::sha256(reinterpret_cast<const uint8_t*>(parts.data.data()), parts.data.size()));
    }
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes.push_back(char(uint64_t(parts.header.size()) >> 8 * i));
    return bytes + parts.header + parts.data;
}

void mutate(std::string* text, size_t most) {
    std::vector<uint8_t> buffer(text->begin(), text->end());
    const size_t size = buffer.size();
    buffer.resize(std::max(size, most));
    buffer.resize(LLVMFuzzerMutate(buffer.data(), size, buffer.size()));
    text->assign(buffer.begin(), buffer.end());
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
    if (seed % 8 == 0) return LLVMFuzzerMutate(data, size, most);  // any byte, digest and length too
    Parts parts = split(data, size);
    mutate(seed % 8 == 1 ? &parts.data : &parts.header, most);
    const std::string bytes = joined(parts);
    if (bytes.size() > most) return LLVMFuzzerMutate(data, size, most);
    std::memcpy(data, bytes.data(), bytes.size());
    return bytes.size();
}

static void run(const uint8_t* data, size_t size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::clock_t begin = std::clock();
    run(data, size);
    const double seconds = double(std::clock() - begin) / CLOCKS_PER_SEC;
    if (seconds > 2) {
        std::fprintf(stderr, "%.1f seconds\n", seconds);
        __builtin_trap();
    }
    return 0;
}

static void run(const uint8_t* data, size_t size) {
    cofire_engine* engine = nullptr;
    const cofire_limits limits = limits_for(data, size);
    const cofire_status status = cofire_load_memory_within(&limits, data, size, &engine);
    if (status != COFIRE_OK) {
        if (engine != nullptr || cofire_last_error()[0] == '\0') __builtin_trap();
        if (status != COFIRE_BAD_PROGRAM && status != COFIRE_TOO_COSTLY && status != COFIRE_BAD_ARGUMENT) {
            std::fprintf(stderr, "status %d: %s\n", int(status), cofire_last_error());
            __builtin_trap();
        }
        return;
    }
    int shape[3];
    size_t outputs = 0;
    if (cofire_input_shape(engine, shape) != COFIRE_OK || cofire_output_size(engine, &outputs) != COFIRE_OK)
        __builtin_trap();
    std::vector<float> input(size_t(shape[0]) * size_t(shape[1]) * size_t(shape[2])), output(outputs);
    for (size_t i = 0; i < input.size(); ++i) input[i] = float(i % 7) - 3;
    if (cofire_run(engine, input.data(), 1, output.data(), 1) != COFIRE_OK) __builtin_trap();
    cofire_free(engine);
}
