// Program files with one thing changed, and whether they are refused.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "../program.h"
#include "build_program.h"
#include "checking.h"

namespace cofire::test {

#define LOADS(source) check_loads((source), __LINE__)
#define REFUSED(source, part) check_refused([&] { load(source); }, (part), __LINE__)

inline Program load(const std::vector<uint8_t>& bytes) { return load_program(bytes.data(), bytes.size()); }
inline Program load(const Source& source) { return load(file_of(source)); }

inline void check_loads(const Source& source, int line) {
    try {
        load(source);
        check(true, "", line);
    } catch (const std::runtime_error& error) {
        check(false, error.what(), line);
    }
}

inline std::string replaced(std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    if (at == std::string::npos) throw std::logic_error("the test looks for what is not there: " + from);
    return text.replace(at, from.size(), to);
}

inline std::string& op_of(Source* source, const std::string& name) {
    for (std::string& op : source->ops)
        if (op.find("\"name\":\"" + name + "\"") != std::string::npos) return op;
    throw std::logic_error("the test looks for an op that is not there: " + name);
}

inline Source with_op(Source source, const std::string& name, const std::string& from, const std::string& to) {
    std::string& op = op_of(&source, name);
    op = replaced(op, from, to);
    return source;
}

inline Source with_head(Source source, const std::string& from, const std::string& to) {
    source.head = replaced(source.head, from, to);
    return source;
}

inline std::vector<uint8_t> with_header(const Source& source, const std::string& from, const std::string& to) {
    return file_of(replaced(header_of(program_of(source), source.tensors), from, to), data_of(source));
}

}  // namespace cofire::test
