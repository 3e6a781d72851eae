#!/bin/sh
# Coverage-guided fuzz of the loader and the engine through the C interface, under ASan and UBSan:
#     csrc/tests/fuzz.sh SECONDS [RUNS]
# Needs clang 16 and its fuzzer: on Debian, apt-get install clang-16 libclang-rt-16-dev. Builds in build/fuzz, begins with
# attacks/program and the seeds of build_program.h, keeps its corpus in build/fuzz/corpus; what crashes, takes more than
# 2 seconds of CPU or more than 1 GB is written to build/fuzz/found and ends the run.
set -eu
cd "$(dirname "$0")/../.."
seconds=$1 runs=${2:--1}
PATH="$PWD/.venv/bin:$PATH" # cmake and ninja, if they are not the system's
command -v clang++-16 > /dev/null || { echo "make fuzz needs clang 16: on Debian, apt-get install clang-16 libclang-rt-16-dev"; exit 1; }
mkdir -p build/fuzz/corpus build/fuzz/found
cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++-16 -DCOFIRE_PYTHON=OFF -DCOFIRE_TESTS=ON -DCOFIRE_LIBFUZZER=ON \
    -DCMAKE_BUILD_TYPE=Sanitize -DCOFIRE_KERNEL_OPTIMISATION=-O1 \
    -DCMAKE_CXX_FLAGS="-O1 -g1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all" > build/fuzz.log
cmake --build build/fuzz --target fuzz_capi write_seeds >> build/fuzz.log || { cat build/fuzz.log; exit 1; }
build/fuzz/csrc/tests/write_seeds build/fuzz/corpus
build/fuzz/csrc/tests/fuzz_capi build/fuzz/corpus attacks/program -dict=csrc/tests/program.dict -max_len=8192 -timeout=60 \
    -rss_limit_mb=1024 -max_total_time="$seconds" -runs="$runs" -artifact_prefix=build/fuzz/found/ -print_final_stats=1
