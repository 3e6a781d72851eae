#include "engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "denormals.h"
#include "forks.h"
#include "image.h"
#include "tuning.h"
#include "workers.h"

namespace cofire {

namespace {

// What one call works with: threads, and an image for the team or one for each thread.
struct Session {
    const int threads;
    const bool together;
    Workers workers;
    Barrier barrier, alone{1};
    std::vector<std::unique_ptr<Image>> images;

    Session(const Prepared& prepared, int count, bool team)
        : threads(count), together(team), workers(count), barrier(count) {
        for (int i = 0; i < (together ? 1 : threads); ++i)
            images.push_back(std::make_unique<Image>(prepared, together ? threads : 1));
    }

    void run(const Call& call) {
        struct Job {
            Session& session;
            const Call& call;
            std::atomic<int> next;
        } job{*this, call, {0}};
        workers.run(
            [](void* context, int thread) {
                const FlushDenormals flush;
                Job& job = *static_cast<Job*>(context);
                Session& session = job.session;
                if (session.together)
                    for (int index = 0; index < job.call.batch; ++index)
                        session.images[0]->run(job.call, index, Member{thread, session.threads, &session.barrier});
                else
                    for (int index; (index = job.next++) < job.call.batch;)
                        session.images[thread]->run(job.call, index, Member{0, 1, &session.alone});
            },
            &job);
    }
};

int usable_threads(int asked) {
    return std::max(1, std::min(asked, std::max(1, int(std::thread::hardware_concurrency()))));
}

}  // namespace

struct Engine::State {
    Prepared prepared;
    std::string kernel;
    std::vector<std::string> algorithms;
    std::vector<std::unique_ptr<Session>> idle;  // under unforked()

    State(Program program, const Kernels& kernels, std::string name)
        : prepared(std::move(program), kernels), kernel(std::move(name)) {}

    std::unique_ptr<Session> borrow(int threads, bool together) {
        {
            std::lock_guard<std::mutex> lock(unforked());
            for (auto& session : idle)
                if (session->threads == threads && session->together == together) {
                    std::unique_ptr<Session> found = std::move(session);
                    session = std::move(idle.back());
                    idle.pop_back();
                    return found;
                }
        }
        return std::make_unique<Session>(prepared, threads, together);
    }

    void give_back(std::unique_ptr<Session> session) {
        std::lock_guard<std::mutex> lock(unforked());
        idle.push_back(std::move(session));
    }
};

namespace {

// The rows that say something of the image.
std::vector<int> rows_of(const Program& program, const Head& head) {
    const int inputs = head.inputs(program.buffers[head.source]);
    std::vector<int> rows;
    for (int r = 0; r < head.rows; ++r) {
        const float* row = head.weight + int64_t(r) * inputs;
        if (std::any_of(row, row + inputs, [](float w) { return !(std::abs(w) < std::numeric_limits<float>::min()); }))
            rows.push_back(r);
    }
    return rows;
}

}  // namespace

Engine::Engine(Program program, const std::string& kernel, const std::string& tuning, const Limits& limits) {
    check_work(program, limits);
    const bool reference = kernel == "ref";
    const Kernels* kernels = find_kernels(reference ? "" : kernel.c_str());
    if (!kernels) throw std::runtime_error("there is no kernel set '" + kernel + "' for this CPU");
    state_ = std::make_unique<State>(std::move(program), *kernels, reference ? "ref" : kernels->name);
    Prepared& prepared = state_->prepared;
    check_memory(prepared.bytes(), limits);
    const std::vector<Op>& ops = prepared.program.ops;
    if (reference)
        for (const Op& op : ops)
            state_->algorithms.push_back(op.kind == Kind::conv || op.kind == Kind::conv8 ? "ref" : "-");
    else
        state_->algorithms = tuning.empty() ? tune(prepared.program, *kernels, limits)
                                            : parse_tuning(prepared.program, *kernels, tuning);
    for (size_t i = 0; i < ops.size(); ++i) {
        prepared.convs.push_back(nullptr);
        prepared.convs8.push_back(nullptr);
        const Shape x = prepared.program.buffers[ops[i].src[0]], y = prepared.program.buffers[ops[i].dst];
        const std::string& algorithm = state_->algorithms[i];
        if (ops[i].kind == Kind::conv) prepared.convs[i] = make_conv(algorithm, *kernels, ops[i], x, y, prepared.arena);
        if (ops[i].kind == Kind::conv8)
            prepared.convs8[i] = make_conv8(algorithm, prepared.kernels8, ops[i],
                                            quantized_of(prepared.program, ops[i]), x, y, prepared.arena);
    }
    for (const Op& op : ops)
        prepared.head_rows.push_back(op.decides ? rows_of(prepared.program, op.head) : std::vector<int>());
    for (const Op& op : ops)
        if (!reference)
            prepared.heads8.push_back(
                op.decides ? head8_of(prepared.program, op.head, prepared.kernels8, prepared.arena) : Head8{});
    check_memory(prepared.bytes(), limits);
}

Engine::~Engine() = default;

void Engine::run(const Call& call) const {
    if (call.batch < 1) return;
    const int threads = call.seconds ? 1 : usable_threads(call.threads);  // a profile is of one thread
    const bool together = call.batch == 1;
    std::unique_ptr<Session> session = state_->borrow(together ? threads : std::min(threads, call.batch), together);
    session->run(call);
    state_->give_back(std::move(session));
}

const Program& Engine::program() const { return state_->prepared.program; }
const std::string& Engine::kernel() const { return state_->kernel; }

std::string Engine::tuning() const {
    std::string text;
    for (const std::string& word : state_->algorithms) text += (text.empty() ? "" : " ") + word;
    return text;
}

}  // namespace cofire
