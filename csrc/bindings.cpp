// The Python face of csrc/: checks, converts, calls; no arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>

#include "conv.h"
#include "cpu.h"
#include "engine.h"
#include "speeds.h"

namespace nb = nanobind;

namespace {

template <class T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
template <class T>
using Maybe = std::optional<Array<T>>;

template <class T>
T* sized(const Maybe<T>& array, size_t size, const char* name) {
    if (!array) return nullptr;
    if (array->size() != size)
        throw std::invalid_argument(std::string(name) + " must have " + std::to_string(size) + " elements, got " +
                                    std::to_string(array->size()));
    return array->data();
}

// The calls that run without the GIL. A daemon thread that asks for the GIL after the interpreter has begun to exit is
// ended by Python in the middle of our frames, which ends the process with an error. So the exit waits for the calls in
// flight, and later ones keep the GIL. Both numbers belong to the holder of the GIL.
int in_flight = 0;
bool exiting = false;

void wait_for_calls() {
    exiting = true;
    while (in_flight > 0) {
        nb::gil_scoped_release release;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

template <class Work>
auto without_gil(Work work) {
    struct Flight {
        Flight() { ++in_flight; }
        ~Flight() { --in_flight; }
    };
    if (exiting) return work();
    const Flight flight;
    nb::gil_scoped_release release;
    return work();
}

cofire::Engine* make_engine(nb::bytes file, const std::string& kernel, const std::string& tuning, int64_t memory,
                            double work, double tuning_seconds) {
    const auto* data = static_cast<const uint8_t*>(file.data());
    const size_t size = file.size();
    return without_gil([&] {
        return new cofire::Engine(cofire::load_program(data, size), kernel, tuning, {memory, work, tuning_seconds});
    });
}

void check(nb::bytes file) {
    const auto* data = static_cast<const uint8_t*>(file.data());
    const size_t size = file.size();
    without_gil([&] { cofire::load_program(data, size); });
}

std::vector<std::string> conv_algorithms() {
    std::vector<std::string> names;
    for (const cofire::ConvAlgorithm& algorithm : cofire::conv_algorithms()) names.emplace_back(algorithm.name);
    return names;
}

std::tuple<double, double, double, double> speeds(const std::string& kernel, int64_t bytes) {
    const cofire::Speeds found = without_gil([&] { return cofire::measured_speeds(kernel, bytes); });
    return {found.macs, found.macs8, found.macs16, found.bytes};
}

// Arrays over groups (masks, logits, forced) hold the groups one after the other, each (batch, filters).
template <class T>
std::vector<T*> by_group(T* data, const cofire::Program& program, int batch) {
    std::vector<T*> pointers;
    for (const cofire::Group& group : program.groups) {
        pointers.push_back(data);
        data += int64_t(batch) * group.filters;
    }
    return pointers;
}

void run(const cofire::Engine& engine, Array<const float> x, Array<float> output, int threads, float threshold,
         bool heads, Maybe<uint8_t> masks, Maybe<int64_t> macs, Maybe<float> logits, Maybe<double> seconds,
         Maybe<const uint8_t> forced, const std::vector<bool>& is_forced) {
    const cofire::Program& program = engine.program();
    const int64_t image = program.buffers[program.input].size(), batch = x.size() / image;
    size_t filters = 0;
    for (const cofire::Group& group : program.groups) filters += batch * group.filters;
    if (x.size() != size_t(batch * image)) throw std::invalid_argument("x must hold whole images");
    if (output.size() != size_t(batch * program.output_size()))
        throw std::invalid_argument("output has the wrong size");
    cofire::Call call{};
    call.input = x.data(), call.output = output.data();
    call.batch = int(batch), call.threads = threads, call.threshold = threshold, call.heads = heads;
    call.macs = sized(macs, batch * program.ops.size(), "macs");
    call.seconds = sized(seconds, program.ops.size(), "seconds");
    std::vector<uint8_t*> mask_of;
    std::vector<float*> logits_of;
    std::vector<const uint8_t*> forced_of;
    if (auto* data = sized(masks, filters, "masks"))
        mask_of = by_group(data, program, int(batch)), call.masks = mask_of.data();
    if (auto* data = sized(logits, filters, "logits"))
        logits_of = by_group(data, program, int(batch)), call.logits = logits_of.data();
    if (const auto* data = sized(forced, filters, "forced")) {
        if (is_forced.size() != program.groups.size())
            throw std::invalid_argument("is_forced must have one entry per group");
        forced_of = by_group(data, program, int(batch)), call.forced = forced_of.data();
        for (size_t g = 0; g < is_forced.size(); ++g)
            if (!is_forced[g]) forced_of[g] = nullptr;
    }
    without_gil([&] { engine.run(call); });
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The compiled side of cofire.";
    nb::module_::import_("atexit").attr("register")(nb::cpp_function(&wait_for_calls));
    m.def("cpu_features", &cofire::cpu_features, "Instruction sets of this machine that kernels can use.");
    m.def("machine", &cofire::machine, "The CPU's model and instruction sets: what a tuning holds for.");
    m.def("check", &check, nb::arg("file"), "Raises RuntimeError unless the bytes are a program file.");
    m.def("speeds", &speeds, nb::arg("kernel"), nb::arg("bytes"),
          "MACs of floats, of bytes, of 16 bits, and bytes read of so much memory, each per second at best.");
    nb::exception<cofire::TooCostly>(m, "TooCostly", PyExc_RuntimeError);
    m.def("conv_algorithms", &conv_algorithms, "Names of all algorithms for convs; the last is the reference.");
    nb::class_<cofire::Engine>(m, "Engine", "A program, ready to run. Calls may come from several threads.")
        .def(nb::new_(&make_engine), nb::arg("file"), nb::arg("kernel") = "", nb::arg("tuning") = "",
             nb::arg("memory") = cofire::Limits().memory, nb::arg("work") = 0.0, nb::arg("tuning_seconds") = -1.0)
        .def("run", &run, nb::arg("x"), nb::arg("output"), nb::arg("threads"), nb::arg("threshold"), nb::arg("heads"),
             nb::arg("masks").none(), nb::arg("macs").none(), nb::arg("logits").none(), nb::arg("seconds").none(),
             nb::arg("forced").none(), nb::arg("is_forced"))
        .def_prop_ro("kernel", &cofire::Engine::kernel)
        .def_prop_ro("tuning", &cofire::Engine::tuning);
}
