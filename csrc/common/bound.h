// Bound calls. The arguments of an op are checked once, and each step launches it with the few that changed.
//
// Most of the host's time for a small op goes into passing and checking arguments. An engine passes the same
// buffers, planes and tables in every step. `_bind_NAME` checks a call of op NAME and returns a handle in
// place of running it. `_begin_bound` and `_commit_bound`, their variants, and `_fold_bound` run all calls of
// a handle.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "views.h"

namespace nwor {

// The window of a begin, as its commit needs it. Python writes num_rows to the memory of a
// handle, because an int argument costs the host more than a tensor.
struct Begun {
    int64_t num_requests = 0;
    int64_t num_rows = -1;  // as in restore_slots; negative: not given
    Vector<int32_t> query_start_loc{};
    std::optional<Ids> idx_mapping;
};

// The arguments that change from step to step. A call uses some of them. The calls of a begin fill `window`
// from its tensors: plan_window the number of requests and query_start_loc, open_window the rest.
struct StepArguments {
    const Tensor* query_start_loc = nullptr;
    const Tensor* cu_num_draft_tokens = nullptr;
    const Tensor* seq_lens = nullptr;
    const Tensor* idx_mapping = nullptr;
    const Tensor* num_rejected = nullptr;
    const Tensor* draft_token_ids = nullptr;
    const Tensor* sampled_token_ids = nullptr;
    const Tensor* plan = nullptr;
    Begun window;
};

// The tensor of an argument that this call needs.
inline const Tensor& needed(const char* op, const char* name, const Tensor* tensor) {
    if (tensor == nullptr) fail(op, name, " must be a tensor, got None");
    return *tensor;
}

// A step has at most as many requests as the checked call.
inline void check_requests(const char* op, int64_t num_requests, int64_t most) {
    if (num_requests < 0 || num_requests > most)
        fail(op, "num_requests must be from 0 to the ", most, " of the bound call, got ", num_requests);
}

// Checks that an argument of a step lies outside the address ranges that a call writes, which
// each_written(call, f) passes to f. The check is not exact: memory between the rows of a plane counts as the
// plane's. `view` has the address range, since asking torch for it again costs the host more than the check.
template <class View, class Call>
void check_outside(const char* op, const char* name, const View& view, const Call& call) {
    const Range range = range_of(view);
    if (range.begin == range.end) return;
    each_written(call, [&](const Range& other) {
        if (range.begin < other.end && other.begin < range.end)
            fail(op, name, " must not share memory with an argument that the op writes");
    });
}

// The index of the device of a tensor; -1 is the CPU.
inline int32_t device_number(const Tensor& tensor) {
    return tensor.is_cpu() ? -1 : tensor.get_device_index();
}

class BoundCall {
  public:
    virtual ~BoundCall() = default;
    // Checks the arguments of a step and keeps their addresses.
    virtual void set(StepArguments& step) = 0;
    virtual void launch() = 0;
    virtual const Tensor& like() const = 0;  // an argument on the device
    virtual int32_t device() const = 0;      // as device_number
};

// A list of tensors belongs to the engine, so each step checks that they have not moved.
struct ListedTensor {
    Tensor tensor;
    const void* data;
    int64_t length;
};

inline void list_tensors(std::vector<ListedTensor>& listed, const std::vector<Tensor>& tensors) {
    for (const Tensor& t : tensors) listed.push_back({t, t.data_ptr(), t.size(0)});
}
template <class Other>
void list_tensors(std::vector<ListedTensor>&, const Other&) {}

// `Arguments` is what the op's check returns. set_step(arguments, checked, step), next to that check, changes
// the arguments of the step.
template <class Device, class Arguments, class... Parameters>
class BoundCallOf : public BoundCall {
  public:
    BoundCallOf(const char* op, const Arguments& checked, const Tensor& like, const Parameters&... parameters)
        : op_(op),
          device_(device_number(like)),
          checked_(checked),
          arguments_(checked),
          like_(like),
          kept_(parameters...) {
        (list_tensors(listed_, parameters), ...);
    }
    void set(StepArguments& step) override {
        for (const ListedTensor& t : listed_)
            if (t.tensor.data_ptr() != t.data || t.tensor.size(0) != t.length)
                fail(op_, "a bound tensor must not move or change its length, got ", describe(t.tensor));
        set_step(arguments_, checked_, step);
    }
    void launch() override { run(arguments_, Device(like_)); }
    const Tensor& like() const override { return like_; }
    int32_t device() const override { return device_; }

  private:
    const char* op_;
    const int32_t device_;
    const Arguments checked_;
    Arguments arguments_;
    const Tensor like_;
    const std::tuple<std::decay_t<Parameters>...> kept_;  // keeps the memory of all tensors
    std::vector<ListedTensor> listed_;
};

// The memory of a handle: a tensor int64 [4] on the CPU, so that torch counts its references. `self` tells a
// handle from a copy of its bytes.
struct BoundCalls {
    static constexpr int64_t kMark = 0x6e776f7220626e64;

    int64_t mark = kMark;
    const BoundCalls* self = this;
    Begun window;  // The last begin fills it.
    std::vector<std::shared_ptr<BoundCall>> calls;
    // For a commit: the handle of its begin.
    const BoundCalls* begun = nullptr;
    std::optional<Tensor> begun_memory;
};
static_assert(offsetof(BoundCalls, self) == 8 && offsetof(BoundCalls, window.num_requests) == 16 &&
                  offsetof(BoundCalls, window.num_rows) == 24,
              "a handle is int64 [4]");

inline BoundCalls& bound_calls(const char* op, const char* name, const Tensor& bound) {
    const Argument a{op, name, bound};
    if (!bound.is_cpu()) fail(op, name, " must be on device cpu, got ", device_name(bound));
    a.dtype(ScalarType::Long);
    if (bound.dim() == 1 && bound.size(0) == 4) {
        BoundCalls* calls = static_cast<BoundCalls*>(bound.data_ptr());
        if (calls->mark == BoundCalls::kMark && calls->self == calls) return *calls;
    }
    a.must_be("a handle that _bind has returned, and not a copy");
}

// Returns a handle of the calls of `after` and then `call`. `begun` is the handle of the begin, for a commit.
inline Tensor bound_handle(const char* op, std::shared_ptr<BoundCall> call,
                           const std::optional<Tensor>& after, const std::optional<Tensor>& begun) {
    auto handle = std::make_unique<BoundCalls>();
    if (after.has_value()) {
        const BoundCalls& earlier = bound_calls(op, "after", *after);
        handle->calls = earlier.calls;
        handle->begun = earlier.begun;
        handle->begun_memory = earlier.begun_memory;
    }
    if (begun.has_value()) {
        handle->begun = &bound_calls(op, "begun", *begun);
        handle->begun_memory = begun;
    }
    handle->calls.push_back(std::move(call));
    const int64_t size = 4, stride = 1;
    Tensor tensor = torch::stable::from_blob(
        handle.get(), {&size, 1}, {&stride, 1}, torch::stable::Device(torch::headeronly::DeviceType::CPU),
        ScalarType::Long, [](void* data) { delete static_cast<BoundCalls*>(data); });
    handle.release();
    return tensor;
}

// All checks come before the first launch.
inline void launch_bound(const char* op, BoundCalls& handle, StepArguments& step) {
    const std::vector<std::shared_ptr<BoundCall>>& calls = handle.calls;
    const BoundCall& first = *calls[0];
    const std::pair<const char*, const Tensor*> tensors[] = {
        {"query_start_loc", step.query_start_loc},
        {"cu_num_draft_tokens", step.cu_num_draft_tokens},
        {"seq_lens", step.seq_lens},
        {"idx_mapping", step.idx_mapping},
        {"num_rejected", step.num_rejected},
        {"draft_token_ids", step.draft_token_ids},
        {"plan", step.plan},
        {"sampled_token_ids", step.sampled_token_ids}};
    // The dispatcher lets no other type of device in than those of the handle and of the calls.
    for (const auto& [name, tensor] : tensors)
        if (tensor != nullptr && device_number(*tensor) != first.device())
            Argument{op, name, *tensor}.same_device(first.like());
    for (const auto& call : calls) call->set(step);
    handle.window = step.window;
    for (const auto& call : calls) call->launch();
}

inline void begin_bound(const Tensor& query_start_loc,      // int32 [num_requests + 1]
                        const Tensor& cu_num_draft_tokens,  // int32 [num_requests]
                        const Tensor& bound) {
    StepArguments step;
    step.query_start_loc = &query_start_loc;
    step.cu_num_draft_tokens = &cu_num_draft_tokens;
    launch_bound("_begin_bound", bound_calls("_begin_bound", "bound", bound), step);
}

inline void begin_redirected_bound(const Tensor& query_start_loc,      // int32 [num_requests + 1]
                                   const Tensor& cu_num_draft_tokens,  // int32 [num_requests]
                                   const Tensor& bound,
                                   const Tensor& seq_lens,                    // int32 [num_requests]
                                   const std::optional<Tensor>& idx_mapping)  // ids [num_requests]
{
    const char* op = "_begin_redirected_bound";
    StepArguments step;
    step.query_start_loc = &query_start_loc;
    step.cu_num_draft_tokens = &cu_num_draft_tokens;
    step.seq_lens = &seq_lens;
    if (idx_mapping.has_value()) step.idx_mapping = &*idx_mapping;
    launch_bound(op, bound_calls(op, "bound", bound), step);
}

inline void fold_bound(const Tensor& plan, const Tensor& bound) {
    StepArguments step;
    step.plan = &plan;
    launch_bound("_fold_bound", bound_calls("_fold_bound", "bound", bound), step);
}

// `step` has the outcome of the drafts. The rest is the same for each of its forms.
inline void launch_commit(const char* op, StepArguments& step, const Tensor& bound) {
    BoundCalls& handle = bound_calls(op, "bound", bound);
    if (handle.begun == nullptr) fail(op, "bound must be a handle that was bound with begun");
    step.window = handle.begun->window;
    launch_bound(op, handle, step);
}

inline void commit_bound(const Tensor& num_rejected,  // int32 [num_requests]
                         const Tensor& bound) {
    StepArguments step;
    step.num_rejected = &num_rejected;
    launch_commit("_commit_bound", step, bound);
}

inline void commit_tokens_bound(const Tensor& draft_token_ids,    // ids [num_draft_tokens]
                                const Tensor& sampled_token_ids,  // ids [num_requests, most drafts (+ 1)]
                                const Tensor& bound) {
    StepArguments step;
    step.draft_token_ids = &draft_token_ids;
    step.sampled_token_ids = &sampled_token_ids;
    launch_commit("_commit_tokens_bound", step, bound);
}

}  // namespace nwor
