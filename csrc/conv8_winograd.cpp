// 3 x 3 convs of stride 1 in the Winograd domain, F(4x4, 3x3), with the bits of the direct conv: see docs/int8.md.
//
// Tile rows are taken in blocks, filters in chunks whose products stay in the second-level cache; within a chunk the
// positions come first, whose inputs stay in the first.
#include <cstdlib>

#include "conv8_common.h"

namespace cofire {
namespace {

constexpr int kPositions = 36;
constexpr int64_t kInputs8 = 1280 * 1024;   // bytes of transformed inputs in a block, or those of a tile row
constexpr int64_t kProducts8 = 512 * 1024;  // bytes of products in a chunk, or those of a few filters
constexpr int64_t kWeights8 = 256 * 1024;   // bytes of transformed weights in a chunk, or those of a few filters
constexpr int kFewestWords8 = 32;           // of a last tile that is worth dot products
constexpr int64_t kFewestTiles8 = 9;        // vectors of fewer would be too empty
constexpr int64_t kMostSum8 = 1 << 25;      // which no sum without its bias may reach: they are found modulo 2^26

class Winograd8 final : public AbstractConv8 {
   public:
    Winograd8(const Kernels8& kernels, const Op& op, const Quantized& quantized, Shape x, Shape y, Arena& arena)
        : kernels_(kernels),
          op_(op),
          q_(quantized),
          x_(x),
          y_(y),
          across_((y.w + 3) / 4),
          down_((y.h + 3) / 4),
          words_((x.c + 1) / 2),
          flat_(across_ % (kernels.lanes / 4) == 0),
          weights_(op, quantized, x, y, arena) {
        rows_ = down_;
        while (rows_ > 1 && inputs_size(rows_) > kInputs8) --rows_;
        rows_ = group_size(down_, rows_);
        pairs_ = kernels.wino_pairs && rows_ * across_ <= kernels.lanes;
        for (int row = 0; kernels.wino_finish && row < down_; row += rows_)
            maps_.push_back(map_of(row, std::min(rows_, down_ - row)));
    }

    Stretch weights() const override { return weights_.all(); }
    int64_t room(int threads) const override { return inputs_room() + threads * own_room() + kSlack8; }

    int64_t run(const ConvCall8& call, const Member& member) const override {
        uint8_t* own = call.room + inputs_room() + member.thread * own_room();
        LiveInputs live(call.in, call.n_in, 0, x_.c, own);
        Block block{live, 0, 0, (call.n_in + 1) / 2, pitch(rows_), reinterpret_cast<uint32_t*>(call.room)};
        block.lines = reinterpret_cast<uint32_t*>(own + LiveInputs::room(x_.c));
        block.packed = reinterpret_cast<int8_t*>(block.lines + lines_room() / 4);
        block.weights = reinterpret_cast<uint32_t*>(block.packed + packed_room());
        block.columns = reinterpret_cast<uint32_t*>(own + own_room() - columns_room());
        block.products = reinterpret_cast<int32_t*>(block.weights + chunk_size() * kPositions * weights_pitch());
        const Range mine = member.share(call.n_out);
        for (; block.row < down_ && call.n_out > 0; block.row += rows_) {
            block.rows = std::min(rows_, down_ - block.row);
            if (block.row > 0) member.meet();  // nobody reads the last block any more
            transform_inputs(call, block, member.share(block.words));
            member.meet();
            if (pairs_) pair_words(block, member);
            if (has_column(block)) fill_columns(block);
            const int most = chunk_size();
            for (int f = mine.begin, size; f < mine.end; f += size) {
                size = std::min(most, mine.end - f);
                multiply(call, block, call.out + f, size, mine.end - f - size);
            }
        }
        member.meet();
        keep_residuals(kernels_, q_, call, y_, member);
        return int64_t(mine.end - mine.begin) * call.n_in * 9 * y_.area();
    }

   private:
    struct Block {
        const LiveInputs& live;
        int row, rows;  // of tiles
        const int words;
        const int64_t pitch;  // words from one word of inputs to the next, and from one position of products
        uint32_t* inputs;     // (position, word, tile)
        uint32_t* lines = nullptr;
        int8_t* packed = nullptr;     // a filter's weights of live inputs
        uint32_t* weights = nullptr;  // (filter, position, word)
        uint32_t* columns = nullptr;  // (position, word) of the last tile, if it has a vector for itself
        int32_t* products = nullptr;  // (filter, position, tile)

        int64_t position() const { return odd_words(words) * pitch; }
    };

    // With room for the last one's partner; and an odd number of lines, so that positions do not fall on each other in
    // the cache.
    static int64_t odd_words(int words) { return (words + 1) | 1; }

    // Words of a position's tiles, to whole vectors; one may run over from the last tile row.
    int64_t pitch(int rows) const { return odd_lines(int64_t(rows) * across_ + (flat_ ? 0 : kernels_.lanes - 1)); }
    int64_t inputs_size(int rows) const { return kPositions * 4 * odd_words(words_) * pitch(rows); }
    int64_t inputs_room() const { return inputs_size(rows_); }
    int64_t lines_room() const {
        const int64_t inputs = (10 * rows_ + 2) * wino_pitch8(across_),
                      sums = int64_t(4) * rows_ * y_.w + kernels_.lanes;
        return up(4 * std::max(inputs, sums), kLine8) + kSlack8;
    }
    int64_t packed_room() const { return up(9 * (int64_t(x_.c) + 129), kLine8) + kSlack8; }
    int64_t weights_pitch() const { return odd_lines(words_); }
    int64_t products_of_filter() const { return kPositions * 4 * pitch(rows_); }
    int chunk_size() const {
        const int64_t products = kProducts8 / products_of_filter();
        const int64_t weights = kWeights8 / (kPositions * 4 * weights_pitch());
        return int(std::max<int64_t>(std::min(products, weights) / kernels_.pair_rows, 1)) * kernels_.pair_rows;
    }
    int64_t own_room() const {
        return LiveInputs::room(x_.c) + lines_room() + packed_room() +
               chunk_size() * (kPositions * 4 * weights_pitch() + products_of_filter()) + kSlack8 + columns_room();
    }

    // Where the tiles of a block go.
    struct Map {
        std::vector<TileVector8> vectors;
        std::vector<Piece8> pieces;
    };

    Map map_of(int row, int rows) const {
        Map map;
        const int columns = y_.w - 4 * (across_ - 1), lanes = kernels_.lanes;
        for (int first = 0; first < rows * across_; first += lanes) {
            TileVector8 vector{0, 0, 0, int(map.pieces.size()), 0};
            for (int lane = 0, tiles; lane < std::min(lanes, rows * across_ - first); lane += tiles) {
                const int tile = first + lane, tile_y = row + tile / across_, tile_x = tile % across_;
                tiles = std::min({across_ - tile_x, lanes - lane, rows * across_ - tile});
                const bool right = tile_x + tiles == across_, bottom = tile_y == down_ - 1;
                const uint32_t some = ((1u << tiles) - 1) << lane;
                const int bytes = 4 * tiles - (right ? 4 - columns : 0);
                vector.inside |= some;
                if (right) vector.right |= 1u << (lane + tiles - 1);
                if (bottom) vector.bottom |= some;
                map.pieces.push_back({(int64_t(tile_y) * y_.w + tile_x - lane) * 4,
                                      (bytes < 64 ? (uint64_t(1) << bytes) - 1 : ~uint64_t(0)) << 4 * lane, bottom});
                ++vector.pieces;
            }
            map.vectors.push_back(vector);
        }
        return map;
    }

    void transform_inputs(const ConvCall8& call, const Block& block, Range mine) const {
        const Tiles8 map{x_.h, x_.w, op_.padding.top, op_.padding.left, q_.zero_in, across_, block.row, block.rows};
        const LiveInputs& live = block.live;
        for (int word = mine.begin; word < mine.end; ++word) {
            const uint8_t* planes[2];
            for (int c = 0; c < 2; ++c)  // one past the end meets weights of zero
                planes[c] = call.x + int64_t(live.list[std::min(2 * word + c, live.count - 1)]) * x_.area();
            kernels_.wino_input(planes, map, block.lines, block.inputs + word * block.pitch, block.position());
        }
    }

    void pair_words(const Block& block, const Member& member) const {
        const Range mine = member.share(kPositions);
        for (int position = mine.begin; position < mine.end; ++position) {
            uint32_t* v = block.inputs + position * block.position();
            for (int k = 0; k < block.words; k += 2, v += 2 * block.pitch)
                kernels_.pair(v, k + 1 < block.words ? v + block.pitch : kNothing, kernels_.lanes, v);
        }
        member.meet();
    }

    int64_t columns_room() const { return kPositions * 4 * weights_pitch(); }
    bool has_column(const Block& block) const {
        const int tiles = block.rows * across_;
        return tiles > kernels_.lanes && tiles % kernels_.lanes == 1 && block.words >= kFewestWords8;
    }
    void fill_columns(const Block& block) const {
        for (int position = 0; position < kPositions; ++position) {
            uint32_t* to = block.columns + position * weights_pitch();
            const uint32_t* from = block.inputs + position * block.position() + block.rows * across_ - 1;
            for (int k = 0; k < block.words; ++k) to[k] = from[k * block.pitch];
            std::fill(to + block.words, to + up(block.words, kLine), 0u);
        }
    }

    void multiply(const ConvCall8& call, const Block& block, const int* filters, int size, int more) const {
        const int64_t per_filter = kPositions * block.pitch, weights = kPositions * weights_pitch();
        const LiveInputs& live = block.live;
        for (int f = 0; f < size; ++f)
            kernels_.wino_weights(weights_.row(filters[f]), weights_.tap_pitch(), live.list, live.count, live.bits,
                                  x_.c, block.packed, block.weights + f * weights, weights_pitch());
        const int most = pairs_ ? kernels_.pair_rows : kernels_.rows;
        for (int position = 0; position < kPositions; ++position) {
            const uint32_t* inputs = block.inputs + position * block.position();
            for (int f = 0, group; f < size; f += group) {
                group = group_size(size - f, most);
                const uint32_t* rows = block.weights + f * weights + position * weights_pitch();
                int32_t* products = block.products + f * per_filter + position * block.pitch;
                if (pairs_)
                    kernels_.wino_pairs(rows, weights, group, inputs, block.words, block.pitch, products, per_filter);
                else
                    kernels_.wino_gemm(rows, weights, group, inputs, block.words, block.pitch, block.rows * across_,
                                       has_column(block) ? block.columns + position * weights_pitch() : nullptr,
                                       products, per_filter);
            }
            call.upcoming->fetch();
            // A share of the next filters' weights. In a function of its own, which has no effect, it would be left
            // out.
            const int64_t lines = weights_.row_pitch() / kLine8;
            for (int f = 0; f < std::min(size, more); ++f)
                for (int64_t l = lines * position / kPositions; l < lines * (position + 1) / kPositions; ++l)
                    __builtin_prefetch(weights_.row(filters[size + f]) + l * kLine8);
        }
        for (int f = 0; f < size; ++f) finish(call, block, filters[f], block.products + f * per_filter);
    }

    void finish(const ConvCall8& call, const Block& block, int o, const int32_t* products) const {
        Ending8 ending = ending_of(q_);
        if (kernels_.wino_finish && !q_.to_float) {
            const Map& map = maps_[block.row / rows_];
            end_filter(ending, 0, q_, call, o, y_.area(), 0, q_.bias[o]);
            return kernels_.wino_finish(products, block.pitch,
                                        {y_.w, y_.w - 4 * (across_ - 1), y_.h - 4 * (down_ - 1), map.vectors.data(),
                                         int(map.vectors.size()), map.pieces.data()},
                                        ending);
        }
        const int first = block.row * 4, lines = std::min(4 * block.rows, y_.h - first);
        int32_t* sums = reinterpret_cast<int32_t*>(block.lines);
        kernels_.wino_output(products, block.pitch, across_, block.rows, y_.w, sums);
        end_filter(ending, 0, q_, call, o, y_.area(), first * y_.w, q_.bias[o]);
        kernels_.finish(sums, lines * y_.w, ending, 0);
    }

    const Kernels8& kernels_;
    const Op& op_;
    const Quantized q_;
    const Shape x_, y_;
    const int across_, down_;  // tiles
    const int words_;          // pairs of inputs
    const bool flat_;          // vectors of tiles go on from one tile row to the next
    const Weights8 weights_;
    int rows_;               // of tiles in a block
    bool pairs_;             // whether the tiles of a block fill no more than a vector
    std::vector<Map> maps_;  // of each block
};

}  // namespace

bool fits_winograd8(const Op& op, const Quantized& q, Shape x, Shape y) {
    const bool is_3x3 = op.kernel.h == 3 && op.kernel.w == 3 && op.stride.h == 1 && op.stride.w == 1 &&
                        op.dilation.h == 1 && op.dilation.w == 1 && op.groups == 1;
    if (!is_3x3 || int64_t((y.h + 3) / 4) * ((y.w + 3) / 4) < kFewestTiles8) return false;
    const int8_t* weight = q.weight;
    for (int o = 0; o < y.c; ++o) {
        int64_t positive = 0, negative = 0;
        for (int64_t k = 0; k < int64_t(x.c) * 9; ++k, ++weight)
            (*weight > 0 ? positive : negative) += std::abs(*weight);
        const int64_t above = 255 - q.zero_in, below = q.zero_in;
        if (std::max(above * positive + below * negative, above * negative + below * positive) >= kMostSum8)
            return false;
    }
    return true;
}

std::unique_ptr<AbstractConv8> make_winograd8(const Kernels8& kernels, const Op& op, const Quantized& quantized,
                                              Shape x, Shape y, Arena& arena) {
    return std::make_unique<Winograd8>(kernels, op, quantized, x, y, arena);
}

}  // namespace cofire
