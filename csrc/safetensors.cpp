#include "safetensors.h"

#include <algorithm>
#include <cstring>

#include "format.h"
#include "sha256.h"

namespace cofire {

Safetensors::Safetensors(const uint8_t* bytes, size_t size) {
    const std::string_view header = split(bytes, size);
    json_ = parse_json(header, where_);
    bool described = false;
    for (const auto& [name, value] : json_->root().members()) {
        if (name == "__metadata__") {
            program_ = text(fields(value, where_, "__metadata__", "cofire.program")[0], where_, "cofire.program");
            described = true;
        } else {
            tensors_.emplace(name, tensor(name, value));
        }
    }
    if (!described)
        where_.fail(
            "__metadata__ is missing: this safetensors file is not a "
            "cofire program");
    check_contiguous();
}

std::string Safetensors::digest() const { return sha256(data_, data_size_); }

Floats Safetensors::floats() const {
    static_assert(sizeof(float) == 4, "the file holds float32");
#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__)
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file is little-endian");
#endif
    Floats result(int64_t((data_size_ + 3) / 4));
    if (data_size_ > 0) std::memcpy(result.data(), data_, data_size_);
    return result;
}

// Finds the data and returns the header's text.
std::string_view Safetensors::split(const uint8_t* bytes, size_t size) {
    if (bytes == nullptr || size < 8)
        where_.fail("a file must have 8 bytes at least, got " + std::to_string(bytes == nullptr ? 0 : size));
    uint64_t length = 0;
    for (int i = 0; i < 8; ++i) length |= uint64_t(bytes[i]) << 8 * i;
    const uint64_t most = std::min(size - 8, kMaxHeader);
    if (length > most)
        where_.fail("its length must be at most " + std::to_string(most) + ", got " + std::to_string(length));
    data_ = bytes + 8 + length;
    data_size_ = size - 8 - size_t(length);
    const std::string_view header(reinterpret_cast<const char*>(bytes) + 8, size_t(length));
    if (header.substr(0, 1) != "{") where_.fail("must begin with '{'");
    return header;
}

Tensor Safetensors::tensor(std::string_view name, JsonValue value) const {
    const Where where{"tensor " + quoted(name)};
    const auto [dtype, shape, data_offsets] = fields(value, where, "entry", "dtype", "shape", "data_offsets");
    const std::vector<JsonValue> offsets = items(data_offsets, where, "data_offsets");
    if (offsets.size() != 2) wrong(data_offsets, where, "data_offsets", "a list of 2");
    static constexpr std::string_view kTypes[] = {"F32", "I8", "I32"};
    Tensor result;
    result.type = Type(choice(dtype, where, "dtype", kTypes));
    const int64_t each = result.type == Type::i8 ? 1 : 4;
    result.begin = size_t(integer(offsets[0], where, "data_offsets[0]", 0, int64_t(data_size_)));
    result.end = size_t(integer(offsets[1], where, "data_offsets[1]", int64_t(result.begin), int64_t(data_size_)));
    if (result.begin % size_t(each) != 0)
        where.fail("data_offsets must begin at a multiple of " + std::to_string(each) + ", got " +
                   std::to_string(result.begin));
    int64_t count = 1;
    const int64_t most = int64_t(data_size_) / each;
    for (JsonValue item : items(shape, where, "shape")) {
        result.shape.push_back(integer(item, where, "each of shape", 0, most));
        if (result.shape.back() > 0 && count > most / result.shape.back())
            where.fail("shape must fit into the file, got " + list(result.shape));
        count *= result.shape.back();
    }
    if (count * each != int64_t(result.end - result.begin))
        where.fail("data_offsets must span " + std::to_string(count * each) + " bytes for the shape " +
                   list(result.shape) + ", got " + std::to_string(result.end - result.begin));
    return result;
}

// Every byte of the data belongs to exactly one tensor.
void Safetensors::check_contiguous() const {
    std::vector<std::pair<size_t, size_t>> spans;
    for (const auto& [name, tensor] : tensors_) spans.emplace_back(tensor.begin, tensor.end);
    std::sort(spans.begin(), spans.end());
    size_t at = 0;
    for (const auto& [begin, end] : spans) {
        if (begin != at)
            where_.fail("tensors must lie side by side: one ends or should begin at byte " + std::to_string(at) +
                        ", the next begins at " + std::to_string(begin));
        at = end;
    }
    if (at != data_size_)
        where_.fail("tensors must fill the data of " + std::to_string(data_size_) + " bytes, got " +
                    std::to_string(at));
}

}  // namespace cofire
