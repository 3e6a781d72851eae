/*
 * Runs a cofire program on one image and prints the five largest outputs and the time.
 *
 *     run_program model.cofire [image.f32 [threads]]
 *
 * image.f32 holds the image as raw float32 in the machine's byte order, channels first: pixels in [0, 1]
 * for a program of `cofire compile`, which normalises by itself, else what the model takes; without it (or for "-") a ramp from -1 to 1 stands in.
 */
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cofire.h"

#define ROUNDS 20
#define SHOWN 5

static int fail(const char* what) {
    fprintf(stderr, "run_program: %s\n", what);
    return EXIT_FAILURE;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void make_ramp(float* image, size_t size) {
    for (size_t i = 0; i < size; ++i) image[i] = size > 1 ? 2.0f * (float)i / (float)(size - 1) - 1.0f : 0.0f;
}

/* Exactly `size` floats, no more and no less: a wrong shape should not go unnoticed. */
static int read_image(const char* path, float* image, size_t size) {
    FILE* file = fopen(path, "rb");
    if (file == NULL) return 0;
    int right = fread(image, sizeof(float), size, file) == size && fgetc(file) == EOF;
    fclose(file);
    return right;
}

static void print_largest(const float* output, size_t size) {
    char* shown = calloc(size, 1);
    for (int rank = 0; shown != NULL && rank < SHOWN && (size_t)rank < size; ++rank) {
        size_t best = size;
        for (size_t i = 0; i < size; ++i)
            if (!shown[i] && (best == size || output[i] > output[best])) best = i;
        shown[best] = 1;
        printf("%8zu  %g\n", best, (double)output[best]);
    }
    free(shown);
}

/* Best of several rounds; negative if a run failed. */
static double measure(const cofire_engine* engine, const float* image, float* output, int threads) {
    double best = -1;
    for (int round = 0; round < ROUNDS; ++round) {
        double start = now();
        if (cofire_run(engine, image, 1, output, threads) != COFIRE_OK) return -1;
        double seconds = now() - start;
        if (best < 0 || seconds < best) best = seconds;
    }
    return best;
}

static int run(const cofire_engine* engine, const char* path, int threads) {
    int shape[3];
    size_t output_size;
    if (cofire_input_shape(engine, shape) != COFIRE_OK || cofire_output_size(engine, &output_size) != COFIRE_OK)
        return fail(cofire_last_error());
    size_t size = (size_t)shape[0] * (size_t)shape[1] * (size_t)shape[2];
    float *image = malloc(size * sizeof(float)), *output = malloc(output_size * sizeof(float));
    int status = EXIT_SUCCESS;
    if (image == NULL || output == NULL) {
        status = fail("out of memory");
    } else if (strcmp(path, "-") != 0 && !read_image(path, image, size)) {
        fprintf(stderr, "run_program: %s must hold %d x %d x %d floats\n", path, shape[0], shape[1], shape[2]);
        status = EXIT_FAILURE;
    } else {
        if (strcmp(path, "-") == 0) make_ramp(image, size);
        double seconds = measure(engine, image, output, threads);
        if (seconds < 0) {
            status = fail(cofire_last_error());
        } else {
            print_largest(output, output_size);
            printf("%.3f ms, best of %d, %d thread(s), cofire %s\n", 1e3 * seconds, ROUNDS, threads, cofire_version());
        }
    }
    free(image);
    free(output);
    return status;
}

int main(int argc, char** argv) {
    if (argc < 2 || argc > 4) return fail("usage: run_program model.cofire [image.f32 | - [threads]]");
    cofire_engine* engine;
    if (cofire_load(argv[1], &engine) != COFIRE_OK) return fail(cofire_last_error());
    int status = run(engine, argc > 2 ? argv[2] : "-", argc > 3 ? atoi(argv[3]) : 1);
    cofire_free(engine);
    return status;
}
