#include "sha256.h"

#include <cstring>

namespace cofire {

namespace {

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr size_t kBlock = 64;

uint32_t rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

uint32_t load_big_endian(const uint8_t* p) {
    return uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | uint32_t(p[3]);
}

// One round. The caller turns the roles of the eight words instead of moving them, which is what makes this fast.
inline void round(uint32_t a, uint32_t b, uint32_t c, uint32_t& d, uint32_t e, uint32_t f, uint32_t g, uint32_t& h,
                  uint32_t input) {
    h += (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + (g ^ (e & (f ^ g))) + input;
    d += h;
    h += (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) | (c & (a | b)));
}

void hash_block(uint32_t* state, const uint8_t* block) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = load_big_endian(block + 4 * i);
    for (int i = 16; i < 64; ++i) {
        const uint32_t x = w[i - 15], y = w[i - 2];
        w[i] =
            w[i - 16] + (rotate(x, 7) ^ rotate(x, 18) ^ x >> 3) + w[i - 7] + (rotate(y, 17) ^ rotate(y, 19) ^ y >> 10);
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; i += 8) {
        round(a, b, c, d, e, f, g, h, kRound[i] + w[i]);
        round(h, a, b, c, d, e, f, g, kRound[i + 1] + w[i + 1]);
        round(g, h, a, b, c, d, e, f, kRound[i + 2] + w[i + 2]);
        round(f, g, h, a, b, c, d, e, kRound[i + 3] + w[i + 3]);
        round(e, f, g, h, a, b, c, d, kRound[i + 4] + w[i + 4]);
        round(d, e, f, g, h, a, b, c, kRound[i + 5] + w[i + 5]);
        round(c, d, e, f, g, h, a, b, kRound[i + 6] + w[i + 6]);
        round(b, c, d, e, f, g, h, a, kRound[i + 7] + w[i + 7]);
    }
    const uint32_t added[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += added[i];
}

}  // namespace

std::string sha256(const uint8_t* bytes, size_t size) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    size_t done = 0;
    for (; size - done >= kBlock; done += kBlock) hash_block(state, bytes + done);

    // What is left, a 1 bit, zeros, and the length in bits, big-endian, at the end of the last block.
    uint8_t tail[2 * kBlock] = {};
    const size_t left = size - done;
    if (left > 0) std::memcpy(tail, bytes + done, left);
    tail[left] = 0x80;
    const size_t tail_size = left + 9 <= kBlock ? kBlock : 2 * kBlock;
    for (int i = 0; i < 8; ++i) tail[tail_size - 1 - i] = uint8_t(uint64_t(size) * 8 >> 8 * i);
    for (size_t i = 0; i < tail_size; i += kBlock) hash_block(state, tail + i);

    std::string hex;
    for (uint32_t word : state)
        for (int shift = 28; shift >= 0; shift -= 4) hex.push_back("0123456789abcdef"[word >> shift & 15]);
    return hex;
}

}  // namespace cofire
