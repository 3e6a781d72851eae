// The Python face of csrc/: checks, converts, calls; no arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "The compiled side of cofire.";
    m.def("cpu_features", &cofire::cpu_features, "Instruction sets of this machine that kernels can use.");
}
