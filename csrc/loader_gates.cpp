// Gates of ops: whose filters they switch, and the heads that decide.
#include "loader.h"

namespace cofire {

void Loader::read_gate(Op* op, JsonValue value, const Where& where) {
    const auto [group, head] = fields(value, where, "gate", "group", "head");
    op->group = int(integer(group, where, "group", 0, int64_t(program_.groups.size()) - 1));
    const int filters = program_.groups[size_t(op->group)].filters;
    if (filters != shape(op->dst).c)
        where.fail("group " + std::to_string(op->group) + " must have as many filters as the output channels, " +
                   std::to_string(shape(op->dst).c) + ", got " + std::to_string(filters));
    if (decided_[size_t(op->group)] != head.is_null())
        where.fail("group " + std::to_string(op->group) + " must have its head on its first op, and only there");
    if (head.is_null()) return;
    if (op->group > 0 && !decided_[size_t(op->group) - 1])
        where.fail("groups must be in the order in which they are decided, got " + std::to_string(op->group) +
                   " before " + std::to_string(op->group - 1));
    op->decides = true;
    if (version_ < 2)
        read_old_head(op, head, filters, where);
    else
        read_head(op, head, filters, where);
    scaled_[size_t(op->group)] = op->head.scale;
    decided_[size_t(op->group)] = true;
}

// Of version 1: four of the keys, the others mean what they do where null or false.
void Loader::read_old_head(Op* op, JsonValue value, int filters, const Where& where) {
    static constexpr std::string_view kPools[] = {"max", "avg"};
    const auto [pool, softmax, weight, bias] = fields(value, where, "head", "pool", "softmax", "weight", "bias");
    op->head.source = op->src[0];
    op->head.pooling = Pooling(choice(pool, where, "pool", kPools));
    op->head.softmax = boolean(softmax, where, "softmax");
    op->head.rows = filters;
    read_head_weights(&op->head, weight, bias, where);
}

void Loader::read_head(Op* op, JsonValue value, int filters, const Where& where) {
    static constexpr std::string_view kPools[] = {"max", "avg", "abs", "both"};
    const auto [pool, softmax, weight, bias, top, scale, src] =
        fields(value, where, "head", "pool", "softmax", "weight", "bias", "top", "scale", "src");
    Head& head = op->head;
    head.source = src.is_null() ? op->src[0] : buffer(src, where, "src of the head");
    if (!written_[size_t(head.source)])
        where.fail("src " + std::to_string(head.source) + " of the head must be written before it is read");
    head.pooling = Pooling(choice(pool, where, "pool", kPools));
    head.softmax = boolean(softmax, where, "softmax");
    head.rows = is_one_row(weight, where) ? 1 : filters;
    if (!top.is_null()) head.top = int(integer(top, where, "top", 1, filters));
    if (head.top > 0 && head.rows != filters) wrong(top, where, "top of a head with one row", "null");
    head.scale = boolean(scale, where, "scale");
    read_head_weights(&head, weight, bias, where);
}

bool Loader::is_one_row(JsonValue weight, const Where& where) {
    const auto found = file_.tensors().find(text(weight, where, "a tensor's name"));
    return found != file_.tensors().end() && !found->second.shape.empty() && found->second.shape[0] == 1;
}

void Loader::read_head_weights(Head* head, JsonValue weight, JsonValue bias, const Where& where) {
    head->weight = tensor(weight, where, {head->rows, head->inputs(shape(head->source))});
    head->bias = bias.is_null() ? nullptr : tensor(bias, where, {head->rows});
}

}  // namespace cofire
