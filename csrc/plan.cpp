#include "plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "conv_common.h"

namespace cofire {

namespace {

constexpr size_t kFew = 1000;  // buffers; networks have a few hundred

// A buffer's place in memory, and the ops between which it holds something.
struct Piece {
    int first, last;
    int64_t size, at = 0;

    int64_t end() const { return at + size; }
    bool meets(const Piece& other) const { return first <= other.last && other.first <= last; }
};

std::vector<Piece> unplaced(const Program& program) {
    std::vector<Piece> found;
    for (size_t b = 0; b < program.buffers.size(); ++b) {
        const int64_t size = program.buffers[b].size(), floats = program.forms[b].u8() ? (size + 3) / 4 : size;
        found.push_back({int(program.ops.size()), -1, up(floats, kLine) + kSlack});
    }
    const auto touch = [&](int buffer, int op) {
        found[buffer].first = std::min(found[buffer].first, op);
        found[buffer].last = std::max(found[buffer].last, op);
    };
    touch(program.input, -1);
    for (int i = 0; i < int(program.ops.size()); ++i) {
        touch(program.ops[i].dst, i);
        for (int source : program.ops[i].src) touch(source, i);
        if (program.ops[i].decides) touch(program.ops[i].head.source, i);
    }
    touch(program.output, int(program.ops.size()));
    for (const Output& more : program.more_outputs) touch(more.buffer, int(program.ops.size()));
    return found;
}

// First fit, largest buffers first: simple, and within a few per cent of the best for chains of layers. Looks at every
// pair.
void place_by_size(std::vector<Piece>* pieces) {
    std::vector<Piece*> order, placed;
    for (Piece& piece : *pieces) order.push_back(&piece);
    std::stable_sort(order.begin(), order.end(), [](Piece* a, Piece* b) { return a->size > b->size; });
    for (Piece* piece : order) {
        std::vector<Piece*> rivals;
        for (Piece* other : placed)
            if (piece->meets(*other)) rivals.push_back(other);
        std::sort(rivals.begin(), rivals.end(), [](Piece* a, Piece* b) { return a->at < b->at; });
        for (Piece* other : rivals) {
            if (piece->end() <= other->at) break;
            piece->at = std::max(piece->at, other->end());
        }
        placed.push_back(piece);
    }
}

// What is free between the buffers of one moment.
class Holes {
   public:
    // The smallest that is large enough, or the end.
    int64_t take(int64_t size) {
        const auto found = by_size_.lower_bound({size, 0});
        if (found == by_size_.end()) return std::exchange(end_, end_ + size);
        const auto [room, at] = *found;
        remove(at, room);
        if (room > size) add(at + size, room - size);
        return at;
    }

    void give_back(int64_t at, int64_t size) {
        const auto after = by_place_.lower_bound(at);
        if (after != by_place_.begin()) {
            const auto [place, room] = *std::prev(after);
            if (place + room == at) remove(place, room), at = place, size += room;
        }
        if (after != by_place_.end() && at + size == after->first) {
            const auto [place, room] = *after;
            remove(place, room), size += room;
        }
        add(at, size);
    }

   private:
    void add(int64_t at, int64_t size) { by_place_[at] = size, by_size_.insert({size, at}); }
    void remove(int64_t at, int64_t size) { by_place_.erase(at), by_size_.erase({size, at}); }

    int64_t end_ = 0;
    std::map<int64_t, int64_t> by_place_;
    std::set<std::pair<int64_t, int64_t>> by_size_;
};

// Best fit, in the order of time: packs less well, but takes no longer for each buffer of a hundred thousand.
void place_by_time(std::vector<Piece>* pieces) {
    std::vector<Piece*> begins, ends;
    for (Piece& piece : *pieces) begins.push_back(&piece), ends.push_back(&piece);
    std::stable_sort(begins.begin(), begins.end(), [](Piece* a, Piece* b) { return a->first < b->first; });
    std::stable_sort(ends.begin(), ends.end(), [](Piece* a, Piece* b) { return a->last < b->last; });
    Holes holes;
    auto ended = ends.begin();
    for (Piece* piece : begins) {
        for (; (*ended)->last < piece->first; ++ended) holes.give_back((*ended)->at, (*ended)->size);
        piece->at = holes.take(piece->size);
    }
}

// After this op. Before it, a buffer that it writes in place may have been otherwise.
bool stays_nonnegative(const Op& op, const std::vector<char>& nonnegative) {
    if (op.act == Act::relu || op.act == Act::relu6 || !keeps_zero(op.act)) return true;
    if (op.act != Act::none || op.kind == Kind::conv || op.kind == Kind::conv8 || op.kind == Kind::affine ||
        op.kind == Kind::rescale || op.kind == Kind::deconv || op.kind == Kind::resample || op.kind == Kind::norm ||
        op.kind == Kind::softmax)
        return false;
    return std::all_of(op.src.begin(), op.src.end(), [&](int source) { return bool(nonnegative[source]); });
}

}  // namespace

Plan::Plan(const Program& program)
    : offsets(program.buffers.size(), 0), peaked(program.buffers.size(), 0), summed(program.buffers.size(), 0) {
    std::vector<Piece> pieces = unplaced(program);
    if (pieces.size() <= kFew)
        place_by_size(&pieces);
    else
        place_by_time(&pieces);
    for (size_t b = 0; b < pieces.size(); ++b) {
        offsets[b] = pieces[b].at;
        floats = std::max(floats, pieces[b].end());
    }
    std::vector<char> by_convs(program.buffers.size(), 1), nonnegative(program.buffers.size(), 0);
    by_convs[program.input] = 0;
    for (const Op& op : program.ops) {
        if (op.kind != Kind::conv) by_convs[op.dst] = 0;
        const bool no_op = op.act == Act::none || (op.act == Act::relu && op.residual && nonnegative[op.src[1]]);
        untouched.push_back(op.residual && op.dst == op.src[1] && no_op);
        plain.push_back(op.decides && nonnegative[op.head.source]);
        nonnegative[op.dst] = stays_nonnegative(op, nonnegative);
    }
    for (size_t i = 0; i < program.ops.size(); ++i) {
        const Head& head = program.ops[i].head;
        if (!program.ops[i].decides || !by_convs[head.source]) continue;
        if (head.pooling == Pooling::max || head.pooling == Pooling::both) peaked[head.source] = 1;
        if (head.pooling == Pooling::avg || head.pooling == Pooling::both || (head.pooling == Pooling::abs && plain[i]))
            summed[head.source] = 1;
    }
}

}  // namespace cofire
