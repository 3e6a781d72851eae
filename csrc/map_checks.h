// Are elements taken from inside a map, and channels in numbers that go together?
#pragma once

#include "program.h"
#include "reading.h"

namespace cofire {

void read_strided(Op* op, JsonValue attrs, const Shape& src, const Shape& dst, const Where& where);
void read_reduce(Op* op, JsonValue attrs, const Shape& src, const Shape& dst, const Where& where);
void read_softmax(Op* op, JsonValue attrs, const Shape& src, const Shape& dst, const Where& where);
void read_norm(Op* op, JsonValue attrs, const Shape& src, const Shape& dst, const Where& where);

}  // namespace cofire
