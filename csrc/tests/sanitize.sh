#!/bin/sh
# The C++ side and its tests under the sanitizers: csrc/tests/sanitize.sh [cases for the fuzzer]
# Builds in build/asan (addresses and undefined behaviour) and build/tsan (threads). Ten minutes at most for each run.
set -eu
cd "$(dirname "$0")/../.."
cases=${1:-20000}
PATH="$PWD/.venv/bin:$PATH" # cmake and ninja, if they are not the system's
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

build() { # directory, sanitizers
    cmake -S . -B "build/$1" -G Ninja -DCOFIRE_PYTHON=OFF -DCOFIRE_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DCMAKE_CXX_FLAGS="-fsanitize=$2 -fno-sanitize-recover=all -fno-omit-frame-pointer" > "build/$1.log"
    cmake --build "build/$1" >> "build/$1.log"
}

run() { # program and its arguments
    echo "$*"
    timeout 600 "$@"
}

mkdir -p build
build asan address,undefined
run build/asan/csrc/tests/test_program
run build/asan/csrc/tests/test_capi
run build/asan/csrc/tests/test_engine
run build/asan/csrc/tests/fuzz_program "$cases" 1
build tsan thread
run build/tsan/csrc/tests/test_capi
run build/tsan/csrc/tests/test_engine
