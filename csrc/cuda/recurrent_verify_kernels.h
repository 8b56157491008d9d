// Family recurrent: the kernel of gated_delta_verify. It reapplies the accepted rows of the record, stores
// the state, and runs and records the window.
#pragma once

#include <numeric>

#include "../recurrent_verify.h"
#include "async_copies.h"
#include "launch.h"
#include "recurrent_arithmetic.h"
#include "recurrent_chunk.h"
#include "recurrent_delta_rule.h"
#include "recurrent_launch.h"
#include "recurrent_reapply.h"
#include "recurrent_rows.h"
#include "recurrent_shared.h"
#include "recurrent_window.h"

namespace nwor {
namespace {

// Grid: x = Q * HV * (dv / rows of a block), see `BlockPlaces`. Block: x = 32 * warps, at most 256. A block
// runs all tokens of one request on some rows of one head's state. A warp takes `Rows::kRowsOfWarp` rows at a
// time.
template <class State, class Input, int kWidth, bool kPerChannel>
__global__ void __launch_bounds__(kThreads, 2) verify_kernel(const __grid_constant__ VerifyJob job) {
    using R = Rows<State, kWidth>;
    using Raw = RawRows<State, kWidth>;
    using Shared = SharedRows<State, kWidth>;
    using P = Products<State, kWidth>;
    const VerifyArguments& c = job.call;
    RecurrentRecord r = c.record;
    r.is_ring = false;  // a constant: a record with two halves has no instruction for rings
    const BlockPlace block = job.blocks[blockIdx.x];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    Shared shared_rows(job.shared);
    if (job.uses_shared_rows) shared_rows.init();
    wait_for_earlier_kernels();

    // ---- The request: its tokens and its entry of the plan

    // All of these are loaded before the first one is used.
    const int64_t first_token = c.query_start_loc[block.request],
                  end_token = c.query_start_loc[block.request + 1];
    const RecurrentEntry entry = c.plan[block.request];
    if (blockIdx.x == 0 && threadIdx.x == 0) *c.layer_window = *c.window_id;
    if (const Found found = problem_of_request(c, block.request, first_token, end_token, entry)) {
        if (threadIdx.x == 0) report(job.report_as, found);
        return;
    }
    const int num_tokens = static_cast<int>(end_token - first_token);
    if (num_tokens == 0) return;
    if (!r.has_window(entry)) return zero_outputs<Input>(c.out, block, first_token, end_token);

    // ---- Copies to shared memory: the window, the rows to reapply, the first rows of the state

    const auto state_of = [&](int64_t slot) {
        return c.states.data + c.states.row_offset(slot, block.head, 0) * sizeof(State);
    };
    if (Shared::kIsBulk && job.uses_shared_rows)
        shared_rows.fetch(state_of(entry.source), block.first_value + warp * R::kRowsOfWarp);

    // A bulk copy of the state starts before the small copies, many copies of a state start after them. The
    // lanes of the last warp load the inputs of the decays and betas, one token each.
    const bool has_gates = warp == warps - 1 && lane < num_tokens;
    const int64_t token_of_gates = first_token + (has_gates ? lane : 0);
    const LoadedFloat a(c.a, token_of_gates, block.head), b(c.b, token_of_gates, block.head),
        log_rate(c.A_log, block.head), bias(c.dt_bias, block.head);
    const Window window{block,       r,          entry.target, r.first_of_window(entry),
                        first_token, num_tokens, c.has_norm()};
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
    copy_reapplied<State, kWidth, kPerChannel>(r, job.shared, entry, block, warps - 1 - warp);
    close_group_of_copies();

    const LaneOfRow at;
    const LaneOfSum<State, kWidth> sum(at);
    const char* source = state_of(entry.source);
    char* target = state_of(entry.target);
    int value = warp * R::kRowsOfWarp;  // first row of the warp, counted from the block's first
    if (!Shared::kIsBulk && job.uses_shared_rows) shared_rows.fetch(source, block.first_value + value);
    close_group_of_copies();

    // ---- Decays, betas, keys and queries of the window, and keys of the record

    if (window.has_norm)
        for (int i = threadIdx.x; i < block.num_values; i += blockDim.x)
            shared_at<float>(job.shared.weights)[i] = LoadedFloat(c.norm_weight, i).value();
    wait_for_copies<1>();  // all except the state
    __syncthreads();
    if (has_gates) {
        shared_at<float>(job.shared.betas)[lane] = beta_of(c, b.value());
        if constexpr (!kPerChannel) {
            const float decay = decay_of(c, a.value(), bias.value(), log_rate.value());
            shared_at<float>(job.shared.decays)[lane] = decay;
            if (block.leads_head)
                r.decays[r.decay_offset(window.slot, r.row_of(window.first, lane), block.head)] = decay;
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
                r.decays[r.decay_offset(window.slot, r.row_of(window.first, token), block.head) + k] = decay;
        }
    scale_window<State, Input, kWidth>(job, window);
    scale_reapplied_keys<State, Input, kWidth>(job.shared, entry.rows);
    __syncthreads();

    // ---- The state, some rows at a time

    const float* const decays = shared_at<float>(job.shared.decays);
    const float* const betas = shared_at<float>(job.shared.betas);
    const int updates_stride = static_cast<int>(r.num_value_heads * r.value_width);
    while (true) {
        // Load
        const int first = block.first_value + value;
        Raw raw;
        if (job.uses_shared_rows)
            shared_rows.read(&raw);
        else
            raw.load(source, job.is_aligned, first, at);
        R rows;
        raw.widen(&rows);

        // Reapply the accepted rows, and store the state
        if (entry.rows > 0 || entry.source != entry.target) {
            reapply<State, kWidth, kPerChannel>(&rows, job.shared, entry.rows, block.num_values, value, at);
            raw.round(rows);
            if (Shared::kIsBulk && job.uses_shared_rows)
                shared_rows.store(target, first, raw);
            else
                raw.store(target, job.is_aligned, first, at);
            raw.widen(&rows);
        }

        // Run the window on the registers, token by token, and record the updates
        const int value_of_lane = first + sum.row;
        const float *keys = shared_at<float>(job.shared.keys),
                    *queries = shared_at<float>(job.shared.queries);
        const Input* values = shared_at<Input>(job.shared.values) + value + sum.row;
        const int update_row = static_cast<int>(r.update_row(window.first, 0));
        float* updates = r.updates + r.update_offset(window.slot, update_row, block.head) + value_of_lane;
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
        // Products of the previous token. Their lanes are added together with those of this token's keys,
        // because neither sum has to wait for the other.
        P outputs{};
        // The outer loop takes one token at a time if all states are stored. A store in the inner loop would
        // cost a move of each element, also if nothing is stored.
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
            if (c.all_states == nullptr) continue;
            // The state after this token
            const int64_t place =
                (first_token + token - 1) * c.all_states_stride + block.head * c.states.value_width * kWidth;
            raw.round(rows);
            raw.store(c.all_states + place * static_cast<int64_t>(sizeof(State)), job.is_aligned, first, at);
        }
        put(add_lanes(outputs, at));

        // The next rows
        value += warps * R::kRowsOfWarp;
        if (value >= block.num_values) break;
        if (job.uses_shared_rows) {
            shared_rows.make_room();
            shared_rows.fetch(source, block.first_value + value);
        }
        close_group_of_copies();
    }
    if (job.uses_shared_rows) shared_rows.finish();

    // ---- Norm and gate of the outputs

    if (!window.has_norm) return;
    __syncthreads();
    norm_outputs<Input>(job, window);
}

// Returns the largest block size for a call. A multiprocessor holds four blocks of 128 threads or two of
// 256: with 164 KB of shared memory the registers are the limit. Four overlap their waits for memory better.
// But the work that a block does once for all of its rows grows with the window. It matters least
// with small states and the norm, because a block then has all rows of a head. With the norm, few blocks of
// 128 leave a part of the chip idle.
int64_t threads_of_verify(const VerifyArguments& c, int64_t heads) {
    const bool has_norm = c.has_norm();
    const int64_t short_window = has_norm && c.states.is_bfloat16 ? 8 : 5;
    const bool has_few_blocks = has_norm && heads <= kEnoughBlocks;
    return c.record.window_rows > short_window || has_few_blocks ? kThreads : kThreads / 2;
}

void run(const VerifyArguments& c, const Launch& launch) {
    // No heads: only mark the layer
    const int64_t heads = c.num_requests * c.states.num_value_heads;
    if (heads == 0) {
        STD_CUDA_CHECK(cudaMemcpyAsync(c.layer_window, c.window_id, sizeof(int64_t), cudaMemcpyDeviceToDevice,
                                       launch.stream()));
        return check_launch(launch);
    }
    if (c.chunk > 0) return run_chunk(c, launch.like());
    with_types(c.states, c.record, [&](auto state, auto input, auto width, auto per_channel) {
        using State = typename decltype(state)::type;
        constexpr int kWidth = decltype(width)::value;
        constexpr int64_t kRowsOfWarp = Rows<State, kWidth>::kRowsOfWarp;
        const int64_t most = kRowsOfWarp * (threads_of_verify(c, heads) / kWarp);

        // Rows and shared memory of a block
        const bool has_norm = c.has_norm();
        int64_t values = c.states.value_width;
        const auto places = [&](int64_t state_bytes) {
            return SharedPlaces(c.record.window_rows, c.record.pending_rows, Rows<State, kWidth>::kPadded,
                                values, c.record.per_channel, has_norm, state_bytes);
        };
        const auto fits = [&](int64_t state_bytes) {
            const int bytes = places(state_bytes).bytes;
            return bytes <= kSharedWithoutAsking || bytes <= most_shared_memory(launch);
        };
        // With the norm, or with many heads, one block takes all rows of a head, a few at a time. It then
        // prepares keys and queries once. Without the norm, it takes fewer rows if a long record does not fit
        // in shared memory.
        if (!has_norm && (heads <= kEnoughBlocks || !fits(0)))
            values = values_of_block(c.record, heads, most);
        const int64_t warps = std::gcd(values, most) / kRowsOfWarp;
        const int64_t state_bytes = warps * SharedRows<State, kWidth>::kBytes;
        const bool all_aligned = is_aligned(c.states, c.states.data, c.states.slot_stride) &&
                                 is_aligned(c.states, c.all_states, c.all_states_stride);
        // If states do not fit in shared memory, the kernel loads them to registers.
        const bool uses_shared_rows = all_aligned && fits(state_bytes);
        const VerifyJob job{c,
                            places(uses_shared_rows ? state_bytes : 0),
                            BlockPlaces(c.record, values),
                            all_aligned,
                            uses_shared_rows,
                            report_as(c.op)};

        // Launch
        using Input = typename decltype(input)::type;
        const auto kernel = verify_kernel<State, Input, kWidth, per_channel>;
        const LaunchShape shape =
            shape_for_heads(c.op, heads, c.states.value_width / values, warps * kWarp, job.shared.bytes);
        allow_shared_memory(c.op, kernel, shape, launch);
        launch.start(kernel, shape, job);
    });
    check_launch(launch);
}

}  // namespace

}  // namespace nwor
