#!/bin/sh
# The C++ side and its tests under the sanitizers: csrc/tests/sanitize.sh [cases for the fuzzer]
# Builds in build/asan (addresses and undefined behaviour) and build/tsan (threads). Part of `make test`, so it has to be
# quick: two minutes on two cores; no run may take more than four. A long fuzz: csrc/tests/sanitize.sh 1000000, with
# COFIRE_SANITIZE_SECONDS for its time.
set -eu
cd "$(dirname "$0")/../.."
cases=${1:-20000}
PATH="$PWD/.venv/bin:$PATH" # cmake and ninja, if they are not the system's
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

build() { # directory, sanitizers, targets; lightly optimised, for compiling takes longer than running
    directory=build/$1 sanitizers=$2
    shift 2
    cmake -S . -B "$directory" -G Ninja -DCOFIRE_PYTHON=OFF -DCOFIRE_TESTS=ON -DCMAKE_BUILD_TYPE=Sanitize \
        -DCOFIRE_KERNEL_OPTIMISATION=-O1 \
        -DCMAKE_CXX_FLAGS="-O1 -g1 -fsanitize=$sanitizers -fno-sanitize-recover=all -fno-omit-frame-pointer" \
        > "$directory.log"
    cmake --build "$directory" --target "$@" >> "$directory.log" || { cat "$directory.log"; exit 1; }
}

run() { # program and its arguments
    echo "$*"
    timeout "${COFIRE_SANITIZE_SECONDS:-240}" "$@"
}

mkdir -p build
build asan address,undefined test_cpu test_json test_program test_ops test_conv8 test_capi test_engine fuzz_program
run build/asan/csrc/tests/test_cpu
run build/asan/csrc/tests/test_json
run build/asan/csrc/tests/test_program
run build/asan/csrc/tests/test_ops
run build/asan/csrc/tests/test_conv8 40 0.1
run build/asan/csrc/tests/test_capi
run build/asan/csrc/tests/test_engine
run build/asan/csrc/tests/fuzz_program "$cases" 1
build tsan thread test_conv8 test_capi test_engine
run build/tsan/csrc/tests/test_conv8 20 0
run build/tsan/csrc/tests/test_capi
run build/tsan/csrc/tests/test_engine
