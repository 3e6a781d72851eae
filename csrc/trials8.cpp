// Which algorithm of a conv on bytes is the fastest.
#include <algorithm>

#include "conv8.h"
#include "conv_common.h"
#include "image.h"
#include "trials.h"

namespace cofire {

namespace {

struct Competitor8 {
    std::string name;
    std::unique_ptr<AbstractConv8> conv;
};

// A conv on bytes of all values, and places for what it writes.
class Trial8 {
   public:
    Trial8(const Op& op, const Quantized& quantized, Shape x, Shape y, const std::vector<float>& flood, int64_t room)
        : quantized_(quantized),
          in_(some(x.c, share_on(op))),
          out_(some(y.c, share_on(op))),
          input_(x.size() / 4 + kSlack),
          output_((quantized.to_float ? y.size() : y.size() / 4) + kSlack),
          room_(room / 4 + kSlack),
          flood_(flood) {
        uint8_t* bytes = reinterpret_cast<uint8_t*>(input_.data());
        for (int64_t i = 0; i < x.size(); ++i) bytes[i] = uint8_t(i * 37);
    }

    double seconds(const AbstractConv8& conv) {
        uint8_t sum = uint8_t(read_all(flood_));
        // The op before has used the same room, and just written the input.
        for (int64_t i = 0; i < conv.room(1) / 4; i += kLine) sum = uint8_t(sum + int(room_[i] == 0));
        for (int64_t i = 0; i < input_.size(); i += kLine) sum = uint8_t(sum + int(input_[i] == 0));
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(input_.data());
        uint8_t* output = reinterpret_cast<uint8_t*>(output_.data());
        output[0] = sum;  // so that the reading is not left out
        Barrier barrier(1);
        ConvCall8 call{};
        call.x = bytes, call.in = in_.data(), call.n_in = int(in_.size());
        call.out = out_.data(), call.n_out = int(out_.size());
        if (quantized_.to_float)
            call.y_float = output_.data();
        else
            call.y = output;
        call.room = reinterpret_cast<uint8_t*>(room_.data());
        Upcoming upcoming;
        call.upcoming = &upcoming;
        const double begin = seconds_now();
        conv.run(call, Member{0, 1, &barrier});
        return seconds_now() - begin;
    }

   private:
    const Quantized& quantized_;
    const std::vector<int> in_, out_;
    Floats input_, output_, room_;
    const std::vector<float>& flood_;
};

}  // namespace

std::vector<std::string> fitting_algorithms8(const Program& program, const Op& op) {
    std::vector<std::string> names;
    for (const ConvAlgorithm8& algorithm : conv8_algorithms())
        if (algorithm.fits(op, quantized_of(program, op), program.buffers[op.src[0]], program.buffers[op.dst]))
            names.emplace_back(algorithm.name);
    return names;
}

std::vector<std::string> tuned_algorithms8(const Program& program, const Op& op, const Kernels8& kernels,
                                           const Limits& limits, const std::vector<float>& flood, double deadline) {
    const Shape x = program.buffers[op.src[0]], y = program.buffers[op.dst];
    const Quantized quantized = quantized_of(program, op);
    std::vector<std::string> names = fitting_algorithms8(program, op);
    names.pop_back();  // the reference only defines
    if (names.size() == 1 || work_of(op, program) >= kMostTried || seconds_now() >= deadline) return names;
    Arena arena;
    std::vector<Competitor8> competitors;
    int64_t room = 0;
    for (const std::string& name : names) {
        auto conv = make_conv8(name, kernels, op, quantized, x, y, arena);
        const int64_t needs = conv->room(1);
        if (name != "gemm" && double(needs + x.size() + y.size()) >= 0.5 * double(limits.memory)) continue;
        competitors.push_back({name, std::move(conv)});
        room = std::max(room, needs);
    }
    Trial8 trial(op, quantized, x, y, flood, room);
    const size_t best =
        fastest(competitors.size(), [&](size_t i) { return trial.seconds(*competitors[i].conv); }, deadline);
    std::vector<std::string> found{competitors[best].name};
    for (const Competitor8& other : competitors)
        if (other.name != found[0]) found.push_back(other.name);
    return found;
}

}  // namespace cofire
