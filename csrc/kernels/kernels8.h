// The inner loops on bytes. The rules of kernels.h hold here too.
//
// Sums take neighbouring channels together, in words of 32 bits: four bytes where the instruction set multiplies bytes,
// else two of 16 bits.
#pragma once

#include <cstdint>

namespace cofire {

constexpr int kSlack8 = 64;     // bytes of room after every array that a kernel walks
constexpr int kMaxRows8 = 8;    // the most that Kernels8::tall_rows is
constexpr int kDotPixels8 = 4;  // that Kernels8::dot takes at a time
constexpr int kFilters8 = 64;   // that a line of weights of Kernels8::filters has

// Where the sums of some filters go: Quantized in conv8.h has the formula. Pointers are null where there is nothing.
struct Ending8 {
    int zero_out, low, high, zero_residual;
    float residual_multiplier;
    // of each filter
    int32_t start[kMaxRows8];  // added to the sum
    float multiplier[kMaxRows8];
    const uint8_t* residual[kMaxRows8];
    uint8_t* y[kMaxRows8];
    float* y_float[kMaxRows8];  // instead of y
    uint8_t* peak[kMaxRows8];
    int64_t* sum[kMaxRows8];
};

// The inputs of a gemm: word k of tap t of pixel i is x[at[t] + k * pitch + i]. The last few pixels, which would fill a
// vector badly, may lie in columns instead: word t * words + k of the first of these is columns[t * words + k], the
// next begins column_pitch further on. Columns end on whole vectors, with zeros.
// In pairs, see Kernels8::pair, word k of tap t of pixel i is x[2 * at[t] + 2 * (k / 2) * pitch + 2 * i + k % 2], and i
// fills no more than a vector.
struct Walk8 {
    const uint32_t* x;
    const int64_t* at;
    int taps, words;
    int64_t pitch;
    bool pairs = false;
    const uint32_t* columns = nullptr;
    int64_t column_pitch = 0;
    int column_count = 0;
};

// The weights that the next call will read: so many bytes of each tap of so many filters.
struct Ahead8 {
    const int8_t* rows[kMaxRows8];
    int64_t pitch;
};

// Weights that a call to come will read.
struct Stretch8 {
    const int8_t* from = nullptr;
    int64_t bytes = 0;
};

// A pixel of an output, and the one of an input that a tap of it reads.
struct Pixel8 {
    int from, to;
};

// Neighbouring taps that meet neighbouring pixels: tap + t meets the pixel at x + pixel + t, t < taps.
struct Run8 {
    int tap, pixel, taps;
};

// Where the taps of a depthwise conv lie. Vectors of pixels are `rows` output lines of a strip of `width` columns. Each
// line of the kernel has for each vector a table of up to 64 bytes: those of the plane from `at` on fill the places of
// the ones in `inside`, the others are paddings.
struct Strip8 {
    int first, width;  // columns
    int64_t at;
    uint64_t inside;
};
struct Table8 {
    int64_t at;
    uint64_t inside;
};
struct Depthwise8Map {
    int rows, lines, pitch, kernel_lines, words;  // words of a line of the kernel
    int zero_in;
    bool rolls;  // a vector's lines but the last are those of the vector above but the first
    const Strip8* strips;
    int strip_count;
    const Table8* tables;  // (vector of lines, line of the kernel); to be joined with those of the strip
    const uint8_t* order;  // (word, 64): places of the table that make the words of a vector
};

// The same where a shuffle reaches 16 bytes. A vector is a line of a strip of up to `lanes` columns. Of each line of
// the kernel its first half needs the bytes of the plane from `at` on, the other those that lie `half` behind them.
struct LinesStrip8 {
    int first, width;  // columns
    int64_t at, half;
};
struct LinesMap8 {
    int height, width;  // of the plane
    int lines, pitch, kernel_lines, words;
    int stride, dilation, top;  // of lines
    int zero_in;
    const LinesStrip8* strips;
    int strip_count;
    // (strip, word, 4 * lanes): which of a half's 16 bytes goes where, or 0x80; and paddings, zero elsewhere
    const uint8_t *order, *paddings;
};

// The tile rows [row, row + rows) of a map of 4 x 4 outputs each, `across` in a row, that a 3 x 3 conv makes of planes
// with paddings of `top` and `left`.
struct Tiles8 {
    int height, width, top, left, zero;
    int across, row, rows;
};
// Words of a line that wino_input works on; it has 10 * rows + 2 of them.
constexpr int64_t wino_pitch8(int across) { return 4 * ((int64_t(across) + 15) / 16 * 16) + 32; }

// Where the pixels of a vector of tiles go. Each of them has four of a line, which are bytes [4 * tile, 4 * tile + 4)
// of a vector of bytes: one for each of its four lines.
struct Piece8 {      // tiles of one tile row
    int64_t at;      // byte 0 of the vector would lie here in a plane; the next line follows `width` further on
    uint64_t bytes;  // that are written
    bool bottom;     // whether the tile row is the last, which has `lines` alone
};
struct TileVector8 {
    uint32_t inside;         // the tiles that there are,
    uint32_t right, bottom;  // the last of their lines, which have `columns` alone, and those of the last tile row
    int piece, pieces;
};
struct Finish8Map {
    int width, columns, lines;
    const TileVector8* vectors;
    int count;
    const Piece8* pieces;
};

// Max pooling with a stride of 2 and a kernel of 2 x 2 or 3 x 3.
struct Pool8Map {
    int height, width, kernel, top, left, out_height, out_width;
};

// The microkernels on bytes of one instruction set.
struct Kernels8 {
    const char* name;
    int lanes;          // words in a vector
    int channels;       // that share a word: 4 or 2
    int rows, vectors;  // a tile of gemm: filters that a call takes at most, and vectors of pixels that they fit best
    // Filters that gemm takes at most where the pixels fill no more than a vector, and that wino_pairs does: a sum
    // waits for the one before it, so that few would leave the multipliers idle.
    int tall_rows, pair_rows;

    // Words of n pixels: to[i] has pixel i * step of each of the planes, which are as many as share a word. Up to
    // `lanes` words more are written.
    void (*interleave)(const uint8_t* const* planes, int step, int n, uint32_t* to);

    // to[2 i] = a[i], to[2 i + 1] = b[i], i < n, a multiple of the lanes; to may be a of a single vector. Inputs of
    // words 2 k and 2 k + 1 lie so where pixels or tiles fill no more than a vector: one load of weights serves two
    // vectors then. A word that is missing is zero. Null, and wino_pairs too, where that is no faster.
    void (*pair)(const uint32_t* a, const uint32_t* b, int n, uint32_t* to);

    // Words of the weights row[in[k]], k < n; the last is filled up with zeros. `on` has the bits of the same list, for
    // `inputs` inputs. Returns the sum of the weights, if `sums`, or anything. Up to kSlack8 bytes more are
    // written.
    int32_t (*gather)(const int8_t* row, const int* in, int n, const uint64_t* on, int inputs, bool sums, uint32_t* to);

    // The sums of `rows` filters over n pixels of a walk, finished. Their weights: w[r][t * words + k]. `ahead`: of as
    // many rows, or null.
    void (*gemm)(const uint32_t* const* w, int rows, const Walk8& walk, int n, const Ending8& ending,
                 const Ahead8* ahead);

    // sums[r * pixels + i] = the products of w[r] with pixel i over all runs, for up to kMaxRows8 rows and kDotPixels8
    // pixels. Inputs of a pixel lie side by side, `row` bytes for each tap of the weights and each pixel, whole
    // cache lines. Up to 3 sums more are written.
    void (*dot)(const int8_t* const* w, int rows, const Run8* runs, int count, int64_t row, const uint8_t* const* x,
                int pixels, int32_t* sums);

    // What each sum of dot lacks by n of its weights, whatever the inputs; null: nothing.
    int32_t (*dot_lacks)(const int8_t* w, int n);

    // Filters in vectors, up to kFilters8 of them, each `vectors` full. Words of their weights for the inputs in[k],
    // k < n: the weights for an input are a line of kFilters8 bytes, of which filter f has the one at places[f]. Word k
    // of filter f goes to to[k * vectors * lanes + f]; the last is filled up with zeros.
    void (*filter_words)(const int8_t* lines, const int* in, int n, const uint8_t* places, int vectors, uint32_t* to);

    // sums[pixels[i].to * kFilters8 + f] += sum over k < n of the products of w[k * vectors * lanes + f] with
    // x[k * pitch + pixels[i].from], i < count, f < vectors * lanes.
    void (*filters)(const uint32_t* w, int vectors, int n, const uint32_t* x, int64_t pitch, const Pixel8* pixels,
                    int count, int32_t* sums, const Stretch8& next);

    // lines[f * pitch + i] = sums[i * kFilters8 + f], i < n, f < filters. Of both, whole vectors of filters and whole
    // quads of pixels are touched.
    void (*filter_lines)(const int32_t* sums, int filters, int n, int64_t pitch, int32_t* lines);

    // Winograd, at 36 positions of each tile. Words of the transformed inputs of two planes: tile t at position p goes
    // to v[p * position + t]. Up to a vector past a tile row is written.
    void (*wino_input)(const uint8_t* const* planes, const Tiles8& map, uint32_t* room, uint32_t* v, int64_t position);

    // Words of a filter's transformed weights for the inputs in[k], k < n, which `on` has as bits: word k at position p
    // goes to to[p * position + k], up to a vector more is written. The weights of each tap lie `row` apart. `room`:
    // n + 129 bytes for each tap.
    void (*wino_weights)(const int8_t* taps, int64_t row, const int* in, int n, const uint64_t* on, int inputs,
                         int8_t* room, uint32_t* to, int64_t position);

    // out[r * ldo + t] = sum over k < count of the pairs in w[r * ldw + k] * v[k * pitch + t], t < n or more, to whole
    // vectors. `column`: null, or the words of the last tile side by side, where it would have a vector for itself;
    // zeros fill its own last vector.
    void (*wino_gemm)(const uint32_t* w, int64_t ldw, int rows, const uint32_t* v, int count, int64_t pitch, int n,
                      const uint32_t* column, int32_t* out, int64_t ldo);

    // The same where the tiles fill no more than a vector, for up to `pair_rows` filters, with inputs in pairs.
    void (*wino_pairs)(const uint32_t* w, int64_t ldw, int rows, const uint32_t* v, int count, int64_t pitch,
                       int32_t* out, int64_t ldo);

    // Sums of the pixels of tile rows, lines of `width`, from their products at all positions.
    void (*wino_output)(const int32_t* products, int64_t position, int across, int rows, int width, int32_t* sums);

    // The pixels themselves, finished, as bytes: those of filter 0 of an ending. Null where there is nothing faster
    // than wino_output and finish.
    void (*wino_finish)(const int32_t* products, int64_t position, const Finish8Map& map, const Ending8& ending);

    // One filter of a depthwise conv. Where both are null, nothing is faster than gemm.
    void (*depthwise)(const uint8_t* plane, const uint32_t* w, const Depthwise8Map& map, const Ending8& ending);
    void (*depthwise_lines)(const uint8_t* plane, const uint32_t* w, const LinesMap8& map, const Ending8& ending);

    // n sums of filter `row` of an ending, finished; null: sums of zero, and without the start. Whole vectors of sums
    // are read.
    void (*finish)(const int32_t* sums, int n, const Ending8& ending, int row);

    // q[i] = the nearest byte to x[i] * inverse + zero, halves to even, i < n; NaN counts as 0. Whole vectors are read.
    void (*quantize)(const float* x, int n, float inverse, int zero, uint8_t* q);

    uint8_t (*largest)(const uint8_t* x, int n);
    int64_t (*sum)(const uint8_t* x, int n);

    // One plane. `line`: room for a line with its paddings, and kSlack8 bytes. Up to kSlack8 bytes more are read.
    void (*max_pool)(const uint8_t* x, const Pool8Map& map, uint8_t* line, uint8_t* y);
};

// The named set, or the best for this CPU if the name is empty; null if it is not there.
const Kernels8* find_kernels8(const char* name);

// The set that goes with the kernels of an engine: with "v4" it is "vnni" where the CPU has that.
const Kernels8* kernels8_of(const char* kernels);

}  // namespace cofire
