// Family recurrent on CUDA: one state per request, replayed and verified in one launch. Semantics:
// nwor_ops/ops/recurrent.py.
//
// A block owns rows of one head's state of one request, from load to store, in registers: eight lanes share a
// row, a thread has 64 elements of a few rows. The state comes through shared memory: loads into registers
// would have the first branch after them wait for all, and what a block works out meanwhile of the window's
// keys, queries and gates and of the record's rows has many. The state is stored as soon as the accepted rows
// are replayed, and the window runs on what is in registers. `StagedRows` says how states come and go.
//
// Bits are those of vLLM's Triton kernels: recurrent_arithmetic.h says of which, recurrent_delta_rule.h in
// what order sums are made.
#include <algorithm>
#include <numeric>

#include "../recurrent.h"
#include "async_copies.h"
#include "launch.h"
#include "recurrent_arithmetic.h"
#include "recurrent_delta_rule.h"
#include "recurrent_launch.h"
#include "recurrent_replay.h"
#include "recurrent_rows.h"
#include "recurrent_shared.h"
#include "recurrent_window.h"

namespace nwor {
namespace {

// ---------------------------------------------------------------- gated_delta_verify

// Of a request that has no state.
template <class Input>
__device__ void zero_outputs(const HeadsView& out, const BlockPlace& block, int64_t first_token,
                             int64_t end_token) {
    for (int64_t token = first_token; token < end_token; ++token) {
        Input* to = reinterpret_cast<Input*>(out.data) + out.offset(token, block.head) + block.first_value;
        for (int i = threadIdx.x; i < block.num_values; i += blockDim.x) set(to + i, 0.0f);
    }
}

template <class State, class Input, int kWidth, bool kPerChannel>
__global__ void __launch_bounds__(kThreads, 2) verify_kernel(const __grid_constant__ VerifyJob job) {
    using R = Rows<State, kWidth>;
    using Raw = RawRows<State, kWidth>;
    using Staged = StagedRows<State, kWidth>;
    using P = Products<State, kWidth>;
    const VerifyArguments& c = job.call;
    const RecurrentRecord& r = c.record;
    const BlockPlace block = job.blocks[blockIdx.x];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    Staged staged(job.shared);
    if (job.is_staged) staged.init();
    wait_for_earlier_kernels();
    // All of these are loaded before the first is looked at.
    const int64_t first_token = c.query_start_loc[block.request],
                  end_token = c.query_start_loc[block.request + 1];
    const RecurrentRow row = c.plan[block.request];
    if (blockIdx.x == 0 && threadIdx.x == 0) *c.layer_window = *c.window;
    if (const Found found = problem_of_request(c, block.request, first_token, end_token, row)) {
        if (threadIdx.x == 0) report(job.report_as, found);
        return;
    }
    const int num_tokens = static_cast<int>(end_token - first_token);
    if (num_tokens == 0) return;
    if (!row.any()) return zero_outputs<Input>(c.out, block, first_token, end_token);

    const auto state_of = [&](int64_t slot) {
        return c.states.data + c.states.row_offset(slot, block.head, 0) * sizeof(State);
    };
    if (Staged::kIsBulk && job.is_staged)
        staged.fetch(state_of(row.source), block.first_value + warp * R::kRowsOfWarp);

    // Small things set out before a state that takes many copies, and behind one that takes one. The last
    // warp has what decays and betas are made of, a lane that of a token.
    const bool has_gates = warp == warps - 1 && lane < num_tokens;
    const int64_t token_of_gates = first_token + (has_gates ? lane : 0);
    const LoadedFloat a(c.a, token_of_gates, block.head), b(c.b, token_of_gates, block.head),
        log_rate(c.A_log, block.head), bias(c.dt_bias, block.head);
    const Window window{block, row, first_token, num_tokens, c.has_norm()};
    for (int copy = warp; copy < 4 * num_tokens; copy += warps) {
        const int kind = copy % 4, token = copy / 4;
        if (kind == 3 && !window.has_norm) continue;
        const HeadsView& from = kind == 0 ? c.k : kind == 1 ? c.q : kind == 2 ? c.v : c.gate;
        const int to = kind == 0   ? job.shared.raw_keys
                       : kind == 1 ? job.shared.raw_queries
                       : kind == 2 ? job.shared.values
                                   : job.shared.gates;
        const bool of_keys = kind < 2;
        const int64_t place = from.offset(first_token + token, of_keys ? block.key_head : block.head) +
                              (of_keys ? 0 : block.first_value);
        const int bytes = (of_keys ? kWidth : block.num_values) * 2;
        copy_row(shared_at<char>(to) + token * bytes, from.data + place * 2, bytes);
    }
    copy_replay<State, kWidth, kPerChannel>(r, job.shared, row, block, warps - 1 - warp);
    close_group_of_copies();

    const LaneOfRow at;
    const LaneOfSum<State, kWidth> sum(at);
    const char* source = state_of(row.source);
    char* target = state_of(row.target);
    int value = warp * R::kRowsOfWarp;  // the warp's first row among the block's
    if (!Staged::kIsBulk && job.is_staged) staged.fetch(source, block.first_value + value);
    close_group_of_copies();

    if (window.has_norm)
        for (int i = threadIdx.x; i < block.num_values; i += blockDim.x)
            shared_at<float>(job.shared.weights)[i] = LoadedFloat(c.norm_weight, i).value();
    wait_for_copies<1>();  // all but the state
    __syncthreads();
    if (has_gates) {
        shared_at<float>(job.shared.betas)[lane] = beta_of(c, b.value());
        if constexpr (!kPerChannel) {
            const float decay = decay_of(c, a.value(), bias.value(), log_rate.value());
            shared_at<float>(job.shared.decays)[lane] = decay;
            if (block.leads_head)
                r.decays[r.decay_offset(row.target, row.next_half(), lane, block.head)] = decay;
        }
    }
    if constexpr (kPerChannel)
        for (int i = threadIdx.x; i < num_tokens * R::kPadded; i += blockDim.x) {
            const int token = i / R::kPadded, k = i % R::kPadded;
            float& shared =
                shared_at<float>(job.shared.decays)[token * R::kPadded + shared_place<State, kWidth>(k)];
            if (k >= kWidth) {
                shared = 0.0f;
                continue;
            }
            const float decay = decay_of(c, c.a.at(first_token + token, block.head, k),
                                         c.dt_bias.at(block.head, k), log_rate.value());
            shared = decay;
            if (block.leads_head)
                r.decays[r.decay_offset(row.target, row.next_half(), token, block.head) + k] = decay;
        }
    scale_window<State, Input, kWidth>(job, window);
    scale_replay_keys<State, Input, kWidth>(job.shared, row.rows);
    __syncthreads();

    const float* const decays = shared_at<float>(job.shared.decays);
    const float* const betas = shared_at<float>(job.shared.betas);
    const int updates_stride = static_cast<int>(r.num_value_heads * r.value_width);
    while (true) {
        const int first = block.first_value + value;
        Raw raw;
        if (job.is_staged)
            staged.read(&raw);
        else
            raw.load(source, job.is_aligned, first, at);
        R rows;
        raw.widen(&rows);
        if (row.rows > 0 || row.source != row.target) {
            replay<State, kWidth, kPerChannel>(&rows, job.shared, row.rows, block.num_values, value, at);
            raw.round(rows);
            if (Staged::kIsBulk && job.is_staged)
                staged.store(target, first, raw);
            else
                raw.store(target, job.is_aligned, first, at);
            raw.widen(&rows);
        }

        // The window, on what is in registers now: token by token, each with its update, which is recorded.
        const int value_of_lane = first + sum.row;
        const float *keys = shared_at<float>(job.shared.keys),
                    *queries = shared_at<float>(job.shared.queries);
        const Input* values = shared_at<Input>(job.shared.values) + value + sum.row;
        float* updates = r.values + r.value_offset(row.target, 0, block.head) + value_of_lane;
        Input* out =
            reinterpret_cast<Input*>(c.out.data) + c.out.offset(first_token, block.head) + value_of_lane;
        Input* out_for_norm = shared_at<Input>(job.shared.outputs) + value + sum.row;
        const auto put = [&](float output) {
            if (window.has_norm) {
                if (sum.leads) set(out_for_norm, output);
                out_for_norm += block.num_values;
            } else {
                if (sum.leads) set(out, output);
                out += c.out.token_stride;
            }
        };
        float addend = 0.0f;
        // Of the token before: its lanes are added while those of this token's keys are, of which neither
        // has to wait for the other.
        P outputs{};
        // One token at a time where states of all are stored: a store in the inner loop would cost it a move
        // of each element, whether it is done or not.
        for (int token = 0; token < num_tokens;) {
            const int end = c.all_states == nullptr ? num_tokens : token + 1;
#pragma unroll 1
            for (; token < end; ++token) {
                const float v = to_float(*values), beta = betas[token];
                values += block.num_values;
                decay_rows<State, kWidth, kPerChannel>(&rows, decays + token * (kPerChannel ? R::kPadded : 1),
                                                       addend, at);
                addend = -0.0f;
                float x[R::kChunks][R::kChunk];
                read_vector(x, keys, at);
                keys += R::kPadded;
                const P products = multiply(rows, x);
                const float output = add_lanes(outputs, at);
                const float update = __fmul_rn(__fadd_rn(v, -add_lanes(products, at)), beta);
                if (sum.leads) *updates = update;
                updates += updates_stride;
                if (token > 0) put(output);
                float u[R::kRows];
#pragma unroll
                for (int j = 0; j < R::kRows; ++j)
                    u[j] = __shfl_sync(kAllLanes, update, j * P::kLanesOfSum, kLanes);
                update_rows(&rows, u, x);
                read_vector(x, queries, at);
                queries += R::kPadded;
                outputs = multiply(rows, x);
            }
            if (c.all_states == nullptr) break;
            const int64_t place =
                (first_token + token - 1) * c.all_states_stride + block.head * c.states.value_width * kWidth;
            raw.round(rows);
            raw.store(c.all_states + place * static_cast<int64_t>(sizeof(State)), job.is_aligned, first, at);
        }
        put(add_lanes(outputs, at));
        value += warps * R::kRowsOfWarp;
        if (value >= block.num_values) break;
        if (job.is_staged) {
            staged.make_room();
            staged.fetch(source, block.first_value + value);
        }
        close_group_of_copies();
    }
    if (job.is_staged) staged.finish();
    if (!window.has_norm) return;
    __syncthreads();
    norm_outputs<Input>(job, window);
}

// Of a block of gated_delta_verify, at most. Four blocks of 128 share a multiprocessor as two of 256 do (the
// registers are the limit where it has 164 KB of shared memory), and overlap their waits for memory better.
// But what a block does for all of its rows grows with the window, least with small states and the norm,
// where a block has all rows of a head; and there few blocks of 128 leave a part of the chip idle.
int64_t threads_of_verify(const VerifyArguments& c, int64_t heads) {
    const bool has_norm = c.has_norm();
    const int64_t short_window = has_norm && c.states.is_bfloat16 ? 8 : 5;
    const bool has_few_blocks = has_norm && heads <= kEnoughBlocks;
    return c.record.rows > short_window || has_few_blocks ? kThreads : kThreads / 2;
}

void run(const VerifyArguments& c, const Launch& launch) {
    const int64_t heads = c.num_requests * c.states.num_value_heads;
    if (heads == 0) {
        STD_CUDA_CHECK(cudaMemcpyAsync(c.layer_window, c.window, sizeof(int64_t), cudaMemcpyDeviceToDevice,
                                       launch.stream()));
        return check_launch(launch);
    }
    with_types(c.states, c.record, [&](auto state, auto input, auto width, auto per_channel) {
        using State = typename decltype(state)::type;
        constexpr int kWidth = decltype(width)::value;
        constexpr int64_t kRowsOfWarp = Rows<State, kWidth>::kRowsOfWarp;
        const int64_t most = kRowsOfWarp * (threads_of_verify(c, heads) / kWarp);
        const bool has_norm = c.has_norm();
        int64_t values = c.states.value_width;
        const auto places = [&](int64_t staged) {
            return SharedPlaces(c.record.rows, c.record.rows, Rows<State, kWidth>::kPadded, values,
                                c.record.per_channel, has_norm, staged);
        };
        const auto fits = [&](int64_t staged) {
            const int bytes = places(staged).bytes;
            return bytes <= kSharedWithoutAsking || bytes <= most_shared_memory(launch);
        };
        // A block has all rows of a head, a few at a time: for the norm, and where heads are many, so that
        // what it does for all of its rows is done once. But long records may leave no room for them.
        if (!has_norm && (heads <= kEnoughBlocks || !fits(0)))
            values = values_of_block(c.record, heads, most);
        const int64_t warps = std::gcd(values, most) / kRowsOfWarp;
        const int64_t staged = warps * StagedRows<State, kWidth>::kBytes;
        const bool all_aligned = is_aligned(c.states, c.states.data, c.states.slot_stride) &&
                                 is_aligned(c.states, c.all_states, c.all_states_stride);
        // Where long windows leave no room, states go straight to registers.
        const bool is_staged = all_aligned && fits(staged);
        const VerifyJob job{c,
                            places(is_staged ? staged : 0),
                            BlockPlaces(c.record, values),
                            all_aligned,
                            is_staged,
                            report_as(c.op)};
        const auto kernel = verify_kernel<State, typename decltype(input)::type, kWidth, per_channel>;
        const LaunchShape shape =
            shape_for_heads(c.op, heads, c.states.value_width / values, warps * kWarp, job.shared.bytes);
        allow_shared_memory(c.op, kernel, shape, launch);
        launch.start(kernel, shape, job);
    });
    check_launch(launch);
}

// ---------------------------------------------------------------- gated_delta_fold

// Layers that fit in a launch's parameters (4 KB in all); more take another launch.
constexpr int64_t kLayersPerLaunch = 72;

struct FoldJob {
    RecurrentStates states;  // of every layer; `data` is not used
    RecurrentRecord record;  // likewise
    RecurrentPlan plan;
    const int64_t* window;
    SharedPlaces shared;
    BlockPlaces blocks;
    FastDivisor by_entries;
    bool is_aligned;  // all states
    const char* report_as;
    FoldLayer layers[kLayersPerLaunch];
};
static_assert(sizeof(FoldJob) <= 4096, "kernel parameters are at most 4 KB on every architecture");

template <class State, class Input, int kWidth, bool kPerChannel>
__global__ void __launch_bounds__(kThreads, 2) fold_kernel(const __grid_constant__ FoldJob job) {
    using R = Rows<State, kWidth>;
    BlockPlace block = job.blocks[blockIdx.x];
    const uint32_t number = job.by_entries.quotient(static_cast<uint32_t>(block.request));
    const FoldLayer& layer = job.layers[number];
    const int64_t entry = block.request - number * job.by_entries.divisor;
    wait_for_earlier_kernels();
    const RecurrentRow row = job.plan[entry];
    const bool has_run = job.window != nullptr && *layer.window == *job.window;
    if (const Found found = problem_of_plan(row, entry, job.states.num_slots, job.record.rows)) {
        if (threadIdx.x == 0) report(job.report_as, found);
        return;
    }
    if (!row.any() || has_run || (row.rows == 0 && row.source == row.target)) return;

    RecurrentRecord r = job.record;
    r.keys = const_cast<char*>(layer.keys);
    r.norms = const_cast<float*>(layer.norms);
    r.decays = const_cast<float*>(layer.decays);
    r.values = const_cast<float*>(layer.values);
    copy_replay<State, kWidth, kPerChannel>(r, job.shared, row, block, threadIdx.x / kWarp);
    const LaneOfRow at;
    const int64_t source = job.states.row_offset(row.source, block.head, 0) * sizeof(State),
                  target = job.states.row_offset(row.target, block.head, 0) * sizeof(State);
    const int value = threadIdx.x / kWarp * R::kRowsOfWarp;
    RawRows<State, kWidth> raw;
    raw.load(layer.states + source, job.is_aligned, block.first_value + value, at);
    close_group_of_copies();
    __syncwarp();  // else the compiler has the loads wait for the copies
    wait_for_copies<0>();
    __syncthreads();
    scale_replay_keys<State, Input, kWidth>(job.shared, row.rows);
    __syncthreads();
    R rows;
    raw.widen(&rows);
    replay<State, kWidth, kPerChannel>(&rows, job.shared, row.rows, block.num_values, value, at);
    raw.round(rows);
    raw.store(layer.states + target, job.is_aligned, block.first_value + value, at);
}

// Marks the layers of a launch as folded. All blocks of fold_kernel must have read the marks before.
__global__ void __launch_bounds__(kThreads)
    mark_kernel(const __grid_constant__ FoldJob job, int64_t num_layers) {
    wait_for_earlier_kernels();
    if (threadIdx.x < num_layers) *job.layers[threadIdx.x].window = *job.window;
}
static_assert(kLayersPerLaunch <= kThreads, "a thread marks one layer");

void run(const FoldArguments& f, const Launch& launch) {
    const bool all_aligned = std::all_of(f.layers.begin(), f.layers.end(), [&](const FoldLayer& layer) {
        return is_aligned(f.states, layer.states, f.states.slot_stride);
    });
    with_types(f.states, f.record, [&](auto state, auto input, auto width, auto per_channel) {
        using State = typename decltype(state)::type;
        constexpr int kWidth = decltype(width)::value;
        constexpr int64_t kMost = Rows<State, kWidth>::kRowsOfWarp * (kThreads / kWarp);
        const int64_t num_layers = static_cast<int64_t>(f.layers.size());
        const int64_t heads_of_layer = f.plan.length * f.states.num_value_heads;
        const int64_t values = values_of_block(f.record, heads_of_layer * num_layers, kMost);
        FoldJob job{f.states,
                    f.record,
                    f.plan,
                    f.window,
                    SharedPlaces(0, f.record.rows, Rows<State, kWidth>::kPadded, values, f.record.per_channel,
                                 false, 0),
                    BlockPlaces(f.record, values),
                    FastDivisor(f.plan.length),
                    all_aligned,
                    report_as(f.op),
                    {}};
        const auto kernel = fold_kernel<State, typename decltype(input)::type, kWidth, per_channel>;
        for (int64_t first = 0; first < num_layers && heads_of_layer > 0; first += kLayersPerLaunch) {
            const int64_t count = std::min(kLayersPerLaunch, num_layers - first);
            std::copy_n(f.layers.begin() + first, count, job.layers);
            const LaunchShape shape =
                shape_for_heads(f.op, heads_of_layer * count, f.states.value_width / values,
                                values / Rows<State, kWidth>::kRowsOfWarp * kWarp, job.shared.bytes);
            allow_shared_memory(f.op, kernel, shape, launch);
            launch.start(kernel, shape, job);
            if (f.window != nullptr) launch.start(mark_kernel, {dim3(1), dim3(kThreads)}, job, count);
        }
    });
    check_launch(launch);
}

// ---------------------------------------------------------------- plans

__global__ void __launch_bounds__(kThreads)
    window_plan_kernel(const __grid_constant__ RecurrentWindowArguments a, const char* report_as) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    wait_for_earlier_kernels();
    if (i == 0) ++*a.window;
    if (i >= a.plan.length) return;
    if (i >= a.num_requests) return a.plan.set(i, {});
    const RecurrentWindowStep step = window_step_of(a, i);
    if (step.found) {
        report(report_as, step.found);
        if (a.num_refused != nullptr) atomicAdd(reinterpret_cast<unsigned long long*>(a.num_refused), 1ull);
    }
    a.plan.set(i, step.row);
    if (step.sets_cursor) a.cursors.set(step.slot, step.cursor_rows, step.cursor_half);
}

void run(const RecurrentWindowArguments& a, const Launch& launch) {
    launch.start(window_plan_kernel, shape_for_items(a.plan.length), a, report_as(a.op));
    check_launch(launch);
}

// One block: all cursors are read before the first is written. In between, an entry that folds nothing but
// still clears its cursor is marked by its half.
constexpr int32_t kClears = 1;

__global__ void __launch_bounds__(kThreads)
    fold_plan_kernel(const __grid_constant__ RecurrentFoldPlanArguments a, const char* report_as) {
    wait_for_earlier_kernels();
    for (int64_t i = threadIdx.x; i < a.plan.length; i += kThreads) {
        if (i >= a.num_entries) {
            a.plan.set(i, {});
            continue;
        }
        const RecurrentFoldStep step = fold_step_of(a, i);
        if (step.found) report(report_as, step.found);
        a.plan.set(i, !step.row.any() && step.cleared_target > 0 ? RecurrentRow{0, 0, kClears, 0} : step.row);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < a.num_entries; i += kThreads) {
        const RecurrentRow row = a.plan[i];
        if (row.any()) {
            a.cursors.set(row.target, 0, a.cursors.half(row.target));
            if (row.source != row.target && !a.keep_source)
                a.cursors.set(row.source, 0, a.cursors.half(row.source));
        } else if (row.half == kClears) {
            const int64_t target = a.target_slots[i];
            a.cursors.set(target, 0, a.cursors.half(target));
            a.plan.set(i, {});
        }
    }
}

void run(const RecurrentFoldPlanArguments& a, const Launch& launch) {
    launch.start(fold_plan_kernel, {dim3(1), dim3(kThreads)}, a, report_as(a.op));
    check_launch(launch);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
    register_recurrent<Launch>(m);
}

}  // namespace nwor
