/*
 * The C interface of cofire: runs a program file (docs/program.md) without Python. Plain C99.
 *
 *     cofire_engine* engine;
 *     if (cofire_load("model.cofire", &engine) != COFIRE_OK) { puts(cofire_last_error()); return 1; }
 *     cofire_run(engine, input, 1, output, 1);
 *     cofire_free(engine);
 *
 * Every function that can fail returns a status; the reason is in cofire_last_error(). A null pointer where one is
 * needed, or a number out of its range, is COFIRE_BAD_ARGUMENT: nothing happens. No C++ exception leaves this
 * interface.
 */
#ifndef COFIRE_H
#define COFIRE_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define COFIRE_API
#else
#define COFIRE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cofire_engine cofire_engine;

typedef enum cofire_status {
    COFIRE_OK = 0,
    COFIRE_BAD_ARGUMENT = 1,
    COFIRE_CANNOT_READ = 2, /* the file is not there, or reading it failed */
    COFIRE_BAD_PROGRAM = 3, /* the bytes are not a program that this version can run */
    COFIRE_OUT_OF_MEMORY = 4,
    COFIRE_FAILED = 5,    /* anything else */
    COFIRE_TOO_COSTLY = 6 /* the program would take more memory or work than the limits allow */
} cofire_status;

/* Version of the library, such as "0.1.0". Never null. */
COFIRE_API const char* cofire_version(void);

/*
 * Why the last call on this thread that failed did so: one line of UTF-8, empty if none has failed. Valid until the
 * next call on this thread; a call that succeeds leaves it as it is.
 */
COFIRE_API const char* cofire_last_error(void);

/*
 * Loads a program and prepares its weights for this CPU, which may take seconds. The file is checked as a whole; it may
 * come from anywhere. On failure *engine is null.
 */
COFIRE_API cofire_status cofire_load(const char* path, cofire_engine** engine);

/* The same from the bytes of a program file, which are not needed afterwards. */
COFIRE_API cofire_status cofire_load_memory(const void* bytes, size_t size, cofire_engine** engine);

/*
 * What a program may cost; a program that would cost more is COFIRE_TOO_COSTLY. docs/program.md says how it is counted.
 * 0 stands for the default, which cofire_load has too.
 */
typedef struct cofire_limits {
    size_t memory;         /* bytes that one image takes on one thread; default 2^29 */
    double work;           /* steps that one image takes; default 2^34 and 2^16 for each weight */
    double tuning_seconds; /* for finding the fastest algorithms; negative: none, the likely best are taken */
} cofire_limits;

/* cofire_load and cofire_load_memory with limits of one's own; null: the defaults. */
COFIRE_API cofire_status cofire_load_within(const cofire_limits* limits, const char* path, cofire_engine** engine);
COFIRE_API cofire_status cofire_load_memory_within(const cofire_limits* limits, const void* bytes, size_t size,
                                                   cofire_engine** engine);

/* Ends an engine that no thread is using. Null is allowed. */
COFIRE_API void cofire_free(cofire_engine* engine);

/* Shape of one image: channels, height, width. */
COFIRE_API cofire_status cofire_input_shape(const cofire_engine* engine, int shape[3]);

/* Floats of the output for one image; of all outputs together where there are several. */
COFIRE_API cofire_status cofire_output_size(const cofire_engine* engine, size_t* size);

/* How many outputs the program has, 1 or more, and the shape of one of them: channels, height, width. */
COFIRE_API cofire_status cofire_output_count(const cofire_engine* engine, int* count);
COFIRE_API cofire_status cofire_output_shape(const cofire_engine* engine, int number, int shape[3]);

/*
 * A filter runs if its head's logit is above the threshold; it begins as the program says. Lower: more filters, slower
 * and closer to the dense network. Infinite values are allowed (all or none), NaN is not. Holds for calls of cofire_run
 * that begin afterwards.
 */
COFIRE_API cofire_status cofire_set_threshold(cofire_engine* engine, float threshold);
COFIRE_API cofire_status cofire_get_threshold(const cofire_engine* engine, float* threshold);

/*
 * Runs `batch` (1 or more) images on `threads` (1 or more) threads. `input` holds batch * channels * height * width
 * floats, `output` gets batch * output size: of several outputs the first for all images, then the next. They must not
 * overlap. Several threads may run one engine at the same time.
 */
COFIRE_API cofire_status cofire_run(const cofire_engine* engine, const float* input, int batch, float* output,
                                    int threads);

#ifdef __cplusplus
}
#endif

#endif
