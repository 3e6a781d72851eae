// cofire.h on top of Engine: checks arguments, turns exceptions into statuses; no arithmetic.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cofire.h"
#include "cpu.h"
#include "engine.h"
#include "program.h"

#ifndef COFIRE_VERSION
#define COFIRE_VERSION "unknown"  // the build says, from pyproject.toml
#endif

struct cofire_engine {
    cofire_engine(cofire::Program program, const std::string& tuning, const cofire::Limits& limits)
        : engine(std::move(program), "", tuning, limits), threshold(engine.program().threshold) {}

    cofire::Engine engine;
    std::atomic<float> threshold;  // may be set while other threads run
};

namespace {

// An array, so that even a failed allocation can be reported.
thread_local char last_error[1024] = "";

cofire_status fail(cofire_status status, const char* why) {
    std::snprintf(last_error, sizeof last_error, "%s", why);
    return status;
}

// Runs `body`, which returns a status. Exceptions become statuses; `otherwise` is that of an ordinary one.
template <typename Body>
cofire_status guarded(cofire_status otherwise, Body body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return fail(COFIRE_OUT_OF_MEMORY, "out of memory");
    } catch (const cofire::TooCostly& error) {
        return fail(COFIRE_TOO_COSTLY, error.what());
    } catch (const std::exception& error) {
        return fail(otherwise, error.what());
    } catch (...) {
        return fail(COFIRE_FAILED, "unknown error");
    }
}

cofire_status null(const char* name) {
    return fail(COFIRE_BAD_ARGUMENT, (std::string(name) + " must not be null").c_str());
}

// Reads to the end instead of asking for the size, which not every file has.
cofire_status read_file(const char* path, std::vector<uint8_t>* bytes) {
    const auto close = [](std::FILE* file) { std::fclose(file); };
    errno = 0;
    const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path, "rb"), close);
    const auto cannot = [&] {
        const std::string why = std::string("cannot read ") + path + ": " + std::strerror(errno);
        return fail(COFIRE_CANNOT_READ, why.c_str());
    };
    if (!file) return cannot();
    size_t done = 0, got = 0;
    do {
        done += got;
        if (done == bytes->size()) bytes->resize(done < 4096 ? 65536 : 2 * done);
        got = std::fread(bytes->data() + done, 1, bytes->size() - done, file.get());
    } while (got > 0);
    if (std::ferror(file.get())) return cannot();
    bytes->resize(done);
    return COFIRE_OK;
}

// The algorithms that were found on this kind of machine and kept beside a program; empty if there are none.
std::string tuning_beside(const char* path) {
    std::ifstream file(std::string(path) + ".tuning");
    std::string machine, words;
    std::getline(file, machine);
    std::getline(file, words);
    return machine == cofire::machine() ? words : "";
}

cofire::Limits limits_of(const cofire_limits* given) {
    cofire::Limits limits;
    if (given == nullptr) return limits;
    if (given->memory > 0) limits.memory = int64_t(std::min(given->memory, size_t(INT64_MAX)));
    if (given->work > 0) limits.work = given->work;
    if (given->tuning_seconds != 0) limits.tuning_seconds = std::max(given->tuning_seconds, 0.0);
    return limits;
}

cofire_status load(const uint8_t* bytes, size_t size, const std::string& tuning, const cofire_limits* limits,
                   cofire_engine** engine) {
    cofire::Program program;
    const cofire_status status = guarded(COFIRE_BAD_PROGRAM, [&] {
        program = cofire::load_program(bytes, size);
        return COFIRE_OK;
    });
    if (status != COFIRE_OK) return status;
    *engine = new cofire_engine(std::move(program), tuning, limits_of(limits));
    return COFIRE_OK;
}

}  // namespace

const char* cofire_version(void) { return COFIRE_VERSION; }

const char* cofire_last_error(void) { return last_error; }

cofire_status cofire_load(const char* path, cofire_engine** engine) {
    return cofire_load_within(nullptr, path, engine);
}

cofire_status cofire_load_memory(const void* bytes, size_t size, cofire_engine** engine) {
    return cofire_load_memory_within(nullptr, bytes, size, engine);
}

cofire_status cofire_load_within(const cofire_limits* limits, const char* path, cofire_engine** engine) {
    return guarded(COFIRE_FAILED, [&] {
        if (engine == nullptr) return null("engine");
        *engine = nullptr;
        if (path == nullptr) return null("path");
        std::vector<uint8_t> bytes;
        const cofire_status status = read_file(path, &bytes);
        return status != COFIRE_OK ? status : load(bytes.data(), bytes.size(), tuning_beside(path), limits, engine);
    });
}

cofire_status cofire_load_memory_within(const cofire_limits* limits, const void* bytes, size_t size,
                                        cofire_engine** engine) {
    return guarded(COFIRE_FAILED, [&] {
        if (engine == nullptr) return null("engine");
        *engine = nullptr;
        if (bytes == nullptr) return null("bytes");
        return load(static_cast<const uint8_t*>(bytes), size, "", limits, engine);
    });
}

void cofire_free(cofire_engine* engine) { delete engine; }

cofire_status cofire_input_shape(const cofire_engine* engine, int shape[3]) {
    return guarded(COFIRE_FAILED, [&] {
        if (engine == nullptr) return null("engine");
        if (shape == nullptr) return null("shape");
        const cofire::Program& program = engine->engine.program();
        const cofire::Shape& input = program.buffers[size_t(program.input)];
        shape[0] = input.c;
        shape[1] = input.h;
        shape[2] = input.w;
        return COFIRE_OK;
    });
}

cofire_status cofire_output_size(const cofire_engine* engine, size_t* size) {
    return guarded(COFIRE_FAILED, [&] {
        if (engine == nullptr) return null("engine");
        if (size == nullptr) return null("size");
        const cofire::Program& program = engine->engine.program();
        *size = size_t(program.output_size());
        return COFIRE_OK;
    });
}

cofire_status cofire_output_count(const cofire_engine* engine, int* count) {
    return guarded(COFIRE_FAILED, [&] {
        if (engine == nullptr) return null("engine");
        if (count == nullptr) return null("count");
        *count = 1 + int(engine->engine.program().more_outputs.size());
        return COFIRE_OK;
    });
}

cofire_status cofire_output_shape(const cofire_engine* engine, int number, int shape[3]) {
    return guarded(COFIRE_FAILED, [&] {
        if (engine == nullptr) return null("engine");
        if (shape == nullptr) return null("shape");
        const cofire::Program& program = engine->engine.program();
        const int last = int(program.more_outputs.size());
        if (number < 0 || number > last) {
            const std::string why = "number must be 0 to " + std::to_string(last) + ", got " + std::to_string(number);
            return fail(COFIRE_BAD_ARGUMENT, why.c_str());
        }
        const int buffer = number == 0 ? program.output : program.more_outputs[size_t(number) - 1].buffer;
        const cofire::Shape& found = program.buffers[size_t(buffer)];
        shape[0] = found.c;
        shape[1] = found.h;
        shape[2] = found.w;
        return COFIRE_OK;
    });
}

cofire_status cofire_set_threshold(cofire_engine* engine, float threshold) {
    return guarded(COFIRE_FAILED, [&] {
        if (engine == nullptr) return null("engine");
        if (std::isnan(threshold)) return fail(COFIRE_BAD_ARGUMENT, "threshold must be a number, got NaN");
        engine->threshold = threshold;
        return COFIRE_OK;
    });
}

cofire_status cofire_get_threshold(const cofire_engine* engine, float* threshold) {
    return guarded(COFIRE_FAILED, [&] {
        if (engine == nullptr) return null("engine");
        if (threshold == nullptr) return null("threshold");
        *threshold = engine->threshold;
        return COFIRE_OK;
    });
}

cofire_status cofire_run(const cofire_engine* engine, const float* input, int batch, float* output, int threads) {
    return guarded(COFIRE_FAILED, [&] {
        if (engine == nullptr) return null("engine");
        if (input == nullptr) return null("input");
        if (output == nullptr) return null("output");
        const auto positive = [](const char* name, int got) {
            const std::string why = std::string(name) + " must be 1 or more, got " + std::to_string(got);
            return fail(COFIRE_BAD_ARGUMENT, why.c_str());
        };
        if (batch < 1) return positive("batch", batch);
        if (threads < 1) return positive("threads", threads);
        cofire::Call call{};
        call.input = input;
        call.output = output;
        call.batch = batch;
        call.threads = threads;
        call.threshold = engine->threshold;
        engine->engine.run(call);
        return COFIRE_OK;
    });
}
