// A safetensors file of numbers of a few types with a program's text in it, checked but not yet understood.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "floats.h"
#include "json.h"
#include "reading.h"

namespace cofire {

enum class Type { f32, i8, i32 };

struct Tensor {
    Type type;
    std::vector<int64_t> shape;
    size_t begin, end;  // bytes, from the end of the header
    bool used = false;
};

class Safetensors {
   public:
    Safetensors(const uint8_t* bytes, size_t size);  // the bytes must outlive it

    std::string_view program() const { return program_; }  // its JSON text
    std::string digest() const;
    std::map<std::string_view, Tensor>& tensors() { return tensors_; }
    Floats floats() const;  // the data as they are

   private:
    std::string_view split(const uint8_t* bytes, size_t size);
    Tensor tensor(std::string_view name, JsonValue value) const;
    void check_contiguous() const;

    const Where where_{"safetensors header"};
    std::unique_ptr<Json> json_;  // owns the names and the program's text
    std::string_view program_;
    std::map<std::string_view, Tensor> tensors_;
    const uint8_t* data_ = nullptr;
    size_t data_size_ = 0;
};

}  // namespace cofire
