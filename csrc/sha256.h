// SHA-256 (FIPS 180-4).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace cofire {

// The digest as 64 lower-case hexadecimal digits.
std::string sha256(const uint8_t* bytes, size_t size);

}  // namespace cofire
