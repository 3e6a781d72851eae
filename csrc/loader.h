// Builds a program from its file, part by part; each checks what it reads. load_program in program.h is its door.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string_view>
#include <type_traits>
#include <vector>

#include "format.h"
#include "program.h"
#include "reading.h"
#include "safetensors.h"

namespace cofire {

class Loader {
   public:
    explicit Loader(Safetensors* file) : file_(*file) {}
    Program load();

   private:
    // program.cpp
    static std::array<JsonValue, 13> with_nothing(const std::array<JsonValue, 9>& old);
    void check_version(JsonValue root, const Where& where);
    void read_buffers(JsonValue value, const Where& where);
    void read_quants(JsonValue value, const Where& where);
    void read_groups(JsonValue value, const Where& where);
    void check_complete(const Where& where) const;

    // loader_ops.cpp
    void read_ops(JsonValue value, const Where& where);
    Op read_op(JsonValue value);
    void read_kind(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    void affine(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    void rescale(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    void conversion(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    void elementwise(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    void cat(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    void move(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    void flatten(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    void resample(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    int64_t taps(const std::vector<int>& places, int outputs, const char* what, const Where& where) const;
    void norm(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    const Shape& one_source(const Op& op, const Where& where) const;
    void read_act(Op* op, JsonValue act, JsonValue slope, const Where& where) const;
    void check_dst(const Op& op, const Where& where) const;
    void check_forms(const Op& op, const Where& where) const;
    void count(size_t got, size_t must, const char* what, const Where& where) const;
    void same_shape(const Shape& got, const Shape& must, const char* what, const Where& where) const;
    float multiplier(JsonValue value, const Where& where, const char* what) const;

    // loader_windows.cpp
    void conv(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    void conv8(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    void deconv(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    void pool(Op* op, JsonValue attrs, const std::vector<JsonValue>& weights, const Where& where);
    void read_window(Op* op, const std::array<JsonValue, 6>& values, const Where& where);
    std::vector<int64_t> weight_shape(const Op& op) const;
    void check_sums(const Op& op, const Where& where) const;
    void check_groups(const Op& op, const Shape& src, const Shape& dst, const Where& where) const;

    // loader_gates.cpp
    void read_gate(Op* op, JsonValue value, const Where& where);
    void read_old_head(Op* op, JsonValue value, int filters, const Where& where);
    void read_head(Op* op, JsonValue value, int filters, const Where& where);
    bool is_one_row(JsonValue weight, const Where& where);
    void read_head_weights(Head* head, JsonValue weight, JsonValue bias, const Where& where);

    // loader_outputs.cpp
    void check_output(JsonValue value, const Where& where);
    void check_output(int buffer, const std::vector<int>& shape, const Where& where) const;
    void read_more_outputs(JsonValue value, const Where& where);
    void check_structure(JsonValue value, const Where& where) const;
    void place_outputs(JsonValue value, std::vector<bool>* placed, const Where& where) const;

    int buffer(JsonValue value, const Where& where, const char* what) const {
        return int(integer(value, where, what, 0, int64_t(program_.buffers.size()) - 1));
    }

    const Shape& shape(int buffer) const { return program_.buffers[size_t(buffer)]; }
    const Form& form(int buffer) const { return program_.forms[size_t(buffer)]; }

    template <typename T = float>
    const T* tensor(JsonValue name, const Where& where, const std::vector<int64_t>& shape) {
        constexpr Type type = std::is_same_v<T, float> ? Type::f32 : sizeof(T) == 1 ? Type::i8 : Type::i32;
        static constexpr const char* kNames[] = {"F32", "I8", "I32"};
        const auto found = file_.tensors().find(text(name, where, "a tensor's name"));
        if (found == file_.tensors().end()) where.fail("the tensor " + name.describe() + " must be in the file");
        Tensor& tensor = found->second;
        if (tensor.shape != shape)
            where.fail("the tensor " + name.describe() + " must have the shape " + list(shape) + ", got " +
                       list(tensor.shape));
        if (tensor.type != type)
            where.fail("the tensor " + name.describe() + " must be of type " + kNames[size_t(type)]);
        if (tensor.used) where.fail("the tensor " + name.describe() + " must be used only once");
        tensor.used = true;
        const T* values =
            reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(program_.weights.data()) + tensor.begin);
        const T* end = values + (tensor.end - tensor.begin) / sizeof(T);
        if (!std::all_of(values, end, [](T x) { return std::isfinite(float(x)); }))
            where.fail("the tensor " + name.describe() + " must have finite values only");
        return values;
    }

    Safetensors& file_;
    Program program_;
    std::set<std::string_view> names_;  // of ops
    std::vector<bool> written_;         // per buffer
    std::vector<bool> decided_;         // per group
    std::vector<bool> scaled_;          // per group: its head gives factors
    int64_t version_ = kVersion;
};

}  // namespace cofire
