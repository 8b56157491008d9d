// Family stage on the CPU: a staging buffer, moves, shadow pages. Semantics: nwor_ops/ops_stage.py.
#include "../stage.h"

#include <vector>

#include "accept.h"
#include "write.h"

namespace nwor {
namespace {

// ---------------------------------------------------------------- stage_kv

template <class Raw>
void stage_tokens(const StageArguments& a) {
    torch::stable::parallel_for(0, a.num_tokens, kRowsPerThread, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            const int64_t row = a.stage_rows[t];
            if (row < 0) continue;
            for (int i = 0; i < 2; ++i)
                copy_row(row_data<Raw>(a.staged[i], row), strides_of(a.staged[i]),
                         row_data<const Raw>(a.sources[i], t), strides_of(a.sources[i]),
                         a.shapes[i].num_heads, a.shapes[i].width);
            if (a.row_windows.rows != nullptr) a.row_windows.rows[row] = *a.row_windows.window_id;
        }
    });
}

void stage_kv(const Tensor& key, const Tensor& value, const Tensor& stage_rows, const Tensor& staged_key,
              const Tensor& staged_value, const std::optional<Tensor>& window_id,
              const std::optional<Tensor>& row_windows) {
    const StageArguments a =
        check_stage(key, value, stage_rows, staged_key, staged_value, window_id, row_windows);
    for (int64_t t = 0; t < a.num_tokens; ++t)
        if (a.stage_rows[t] >= a.num_rows)
            fail<std::out_of_range>(a.op, "stage_rows[", t, "] must be below the ", a.num_rows,
                                    " rows of the staging buffer, got ", a.stage_rows[t]);
    with_raw_type(a.shapes[0].element_size, [&](auto tag) { stage_tokens<typename decltype(tag)::type>(a); });
}

// ---------------------------------------------------------------- accept_staged, commit_staged

void accept_staged(const Tensor& row_accepted, const Tensor& row_slots, const Tensor& window_id,
                   const Tensor& row_windows, int64_t num_slots, const Tensor& row_committed,
                   const Tensor& counters, const std::optional<Tensor>& row_requests,
                   const std::optional<Tensor>& row_positions) {
    const AcceptStagedArguments a =
        check_accept_staged(row_accepted, row_slots, window_id, row_windows, num_slots, row_committed,
                            counters, row_requests, row_positions);
    const int64_t window = *a.window_id;
    bool complete = true;
    int64_t staged = 0, operations = 0, committed = 0;
    for (int64_t row = 0; row < a.num_rows; ++row) {
        const int64_t layers = a.layers_of(row, window);
        staged += layers > 0;
        operations += layers;
        if (a.wanted(row) && !a.possible(row, layers)) complete = false;
    }
    for (int64_t row = 0; row < a.num_rows; ++row) {
        a.row_committed[row] = complete && a.wanted(row);
        committed += a.row_committed[row];
    }
    grow(a.counters[kStageWindows], 1);
    grow(a.counters[kStageStaged], staged);
    grow(a.counters[kStageOperations], operations);
    grow(a.counters[kStageCommitted], committed);
    grow(a.counters[kStageRejected], staged - committed);
    grow(a.counters[kStageIncomplete], !complete);
}

void commit_staged(const Tensor& staged_key, const Tensor& staged_value, const Tensor& row_slots,
                   const Tensor& row_accepted, const Tensor& key_cache, const Tensor& value_cache,
                   const Tensor& k_scale, const Tensor& v_scale, const std::string& kv_cache_dtype,
                   const std::optional<Tensor>& row_requests, const std::optional<Tensor>& row_positions) {
    write(check_commit(staged_key, staged_value, row_slots, row_accepted, key_cache, value_cache, k_scale,
                       v_scale, kv_cache_dtype, row_requests, row_positions));
}

// ---------------------------------------------------------------- moving slots of one plane

// One head of a slot, into or out of a row [W] of its own.
template <bool to_page, class T>
void copy_head(const CacheView& cache, const PageOffsets& offsets, int64_t slot, int64_t head, T* row) {
    CacheView one = cache;
    one.data += head * cache.head_stride * static_cast<int64_t>(sizeof(T));
    one.num_heads = 1;
    if (offsets.table != nullptr) return copy_page_row<to_page>(one, offsets, slot, row, {0, 1});
    T* at = slot_data<T>(one, slot);
    if constexpr (to_page)
        copy_row(at, strides_of(one), const_cast<const T*>(row), {0, 1}, 1, one.width);
    else
        copy_row(row, {0, 1}, const_cast<const T*>(at), strides_of(one), 1, one.width);
}

// ---------------------------------------------------------------- move_slots

template <class Raw>
void move_rows(const MoveArguments& m) {
    const CacheView& shape = m.planes.view;
    // A head of a plane at a time: all its sources are read before the first destination is written.
    torch::stable::parallel_for(0, m.planes.count() * shape.num_heads, 1, [&](int64_t begin, int64_t end) {
        std::vector<Raw> rows(static_cast<size_t>(m.num_moves * shape.width));
        for (int64_t part = begin; part < end; ++part) {
            const CacheView cache = m.planes.plane(part / shape.num_heads);
            const int64_t head = part % shape.num_heads;
            const auto each = [&](const int64_t* slots, auto to_page) {
                for (int64_t i = 0; i < m.num_moves; ++i)
                    if (m.from[i] >= 0 && m.to[i] >= 0)
                        copy_head<decltype(to_page)::value>(cache, m.page_offsets, slots[i], head,
                                                            rows.data() + i * shape.width);
            };
            each(m.from, std::false_type{});
            each(m.to, std::true_type{});
        }
    });
}

void move_slots(const std::vector<Tensor>& caches, const Tensor& src_slots, const Tensor& dst_slots,
                const std::optional<Tensor>& page_offsets) {
    const MoveArguments m = check_move(caches, src_slots, dst_slots, page_offsets);
    const CacheView& cache = m.planes.view;
    if (m.num_moves == 0 || cache.num_heads * cache.width == 0) return;
    for (int64_t i = 0; i < m.num_moves; ++i) {
        if (m.from[i] < 0 || m.to[i] < 0) continue;
        check_slot(m.op, "src_slots", i, m.from[i], cache);
        check_slot(m.op, "dst_slots", i, m.to[i], cache);
    }
    check_page_table(m.op, m.page_offsets, cache);
    with_raw_type(cache.element_size, [&](auto tag) { move_rows<typename decltype(tag)::type>(m); });
}

// ---------------------------------------------------------------- open_window, close_window

struct Copy {
    int64_t group, from, to;  // slots
};

// Every request's redirect, group by group; raises before anything is written.
template <class Find, class ProblemOfToken>
std::vector<Redirect> redirects_of(const WindowArguments& a, const Find& find,
                                   const ProblemOfToken& problem_of) {
    std::vector<Redirect> redirects;
    for (int64_t g = 0; g < a.num_groups; ++g)
        for (int64_t q = 0; q < a.num_requests; ++q) {
            Found found{};
            redirects.push_back(find(a, g, q, &found));
            const Redirect& r = redirects.back();
            for (int64_t token = 0; r.any() && token < r.tokens() && found.problem == kNoWindowProblem;
                 ++token)
                found = problem_of(a, g, q, r, token);
            if (found.problem != kNoWindowProblem) complain_of_window(a.op, found);
        }
    return redirects;
}

Found problem_at_open(const WindowArguments& a, int64_t group, int64_t request, const Redirect& r,
                      int64_t token) {
    return a.redirects ? problem_of_token(a, group, request, r, token) : Found{};
}

template <class Raw>
void copy_slot(const CacheView& cache, const PageOffsets& offsets, const Copy& copy, std::vector<Raw>& row) {
    if (offsets.table == nullptr)
        return copy_row(slot_data<Raw>(cache, copy.to), strides_of(cache),
                        slot_data<const Raw>(cache, copy.from), strides_of(cache), cache.num_heads,
                        cache.width);
    for (int64_t head = 0; head < cache.num_heads; ++head) {
        copy_head<false>(cache, offsets, copy.from, head, row.data());
        copy_head<true>(cache, offsets, copy.to, head, row.data());
    }
}

template <class Raw>
void copy_in_planes(const Planes& planes, const std::vector<int64_t>& planes_per_group,
                    const PageOffsets& offsets, const std::vector<Copy>& copies) {
    std::vector<int64_t> group_of;
    for (size_t g = 0; g < planes_per_group.size(); ++g)
        group_of.insert(group_of.end(), static_cast<size_t>(planes_per_group[g]), static_cast<int64_t>(g));
    torch::stable::parallel_for(0, planes.count(), 1, [&](int64_t begin, int64_t end) {
        std::vector<Raw> row(static_cast<size_t>(planes.view.width));
        for (int64_t plane = begin; plane < end; ++plane)
            for (const Copy& copy : copies)
                if (copy.group == group_of[plane]) copy_slot(planes.plane(plane), offsets, copy, row);
    });
}

void copy_all(const Planes& planes, const WindowTensors& t, const PageOffsets& offsets,
              const std::vector<Copy>& copies) {
    if (copies.empty() || planes.view.num_heads * planes.view.width == 0) return;
    with_raw_type(planes.view.element_size, [&](auto tag) {
        copy_in_planes<typename decltype(tag)::type>(planes, t.planes_per_group, offsets, copies);
    });
}

void open_window(const std::vector<Tensor>& caches, const std::vector<int64_t>& planes_per_group,
                 const Tensor& query_start_loc, const Tensor& cu_num_draft_tokens, const Tensor& seq_lens,
                 const Tensor& row_slots, const Tensor& shadow_blocks,
                 const std::vector<Tensor>& slot_mappings, const std::vector<Tensor>& block_tables,
                 const Tensor& saved_slots, const Tensor& tail_pages,
                 const std::optional<Tensor>& idx_mapping, const std::optional<Tensor>& held_slots,
                 const std::optional<Tensor>& page_offsets, int64_t num_bonus_tokens,
                 const std::optional<Tensor>& plane_table, bool leading_zero) {
    const WindowTensors t{caches,        planes_per_group, query_start_loc, cu_num_draft_tokens,
                          shadow_blocks, saved_slots,      tail_pages,      slot_mappings,
                          block_tables,  idx_mapping,      held_slots,      plane_table};
    Planes planes;
    const WindowArguments a = check_open(t, seq_lens, row_slots, {num_bonus_tokens, leading_zero}, &planes);
    const PageOffsets offsets = check_page_offsets(a.op, page_offsets, caches, plane_table);
    check_page_table(a.op, offsets, planes.view);
    const std::vector<Redirect> redirects = redirects_of(a, redirect_at_open, problem_at_open);
    std::vector<Copy> copies;
    for (int64_t g = 0; g < a.num_groups; ++g)
        for (int64_t q = 0; q < a.num_requests; ++q) {
            const Redirect& r = redirects[static_cast<size_t>(g * a.num_requests + q)];
            if (a.redirects) open_request(a, g, q, r);
            if (!r.any()) continue;
            const int64_t shadow = shadow_slot(a, g, r, {0, 0, r.first_shadow});
            for (int64_t row = r.held; row < r.first_offset; ++row)
                copies.push_back({g, r.tail_block * a.block_size + row, shadow + row});
            for (int64_t token = 0; a.redirects && token < r.tokens(); ++token)
                redirect_token(a, g, q, r, token);
        }
    copy_all(planes, t, offsets, copies);
}

void close(const WindowArguments& a, const Planes& planes, const WindowTensors& t,
           const std::optional<Tensor>& page_offsets, const AcceptArguments* judged) {
    const PageOffsets offsets = check_page_offsets(a.op, page_offsets, t.caches, t.plane_table);
    check_page_table(a.op, offsets, planes.view);
    const std::vector<Redirect> redirects = redirects_of(a, redirect_at_close, problem_of_saved);
    if (judged != nullptr) accept(*judged);
    std::vector<Copy> copies;
    for (int64_t g = 0; g < a.num_groups; ++g)
        for (int64_t q = 0; q < a.num_requests; ++q) {
            const Redirect& r = redirects[static_cast<size_t>(g * a.num_requests + q)];
            if (a.redirects) close_request(a, g, q, r);
            for (int64_t token = 0; r.any() && token < r.tokens(); ++token) {
                const int64_t to = saved_slot(a, g, r, token);
                if (to < 0) continue;
                if (kept(a, r, token)) copies.push_back({g, shadow_slot(a, g, r, place_of(a, r, token)), to});
                if (a.redirects) put_back_token(a, g, q, r, token);
            }
        }
    copy_all(planes, t, offsets, copies);
}

void close_window(const std::vector<Tensor>& caches, const std::vector<int64_t>& planes_per_group,
                  const Tensor& query_start_loc, const Tensor& cu_num_draft_tokens,
                  const Tensor& row_rejected, const Tensor& shadow_blocks, const Tensor& saved_slots,
                  const Tensor& tail_pages, const std::vector<Tensor>& slot_mappings,
                  const std::vector<Tensor>& block_tables, const std::optional<Tensor>& idx_mapping,
                  const std::optional<Tensor>& held_slots, const std::optional<Tensor>& page_offsets,
                  int64_t num_bonus_tokens, const std::optional<Tensor>& plane_table, bool leading_zero) {
    const WindowTensors t{caches,        planes_per_group, query_start_loc, cu_num_draft_tokens,
                          shadow_blocks, saved_slots,      tail_pages,      slot_mappings,
                          block_tables,  idx_mapping,      held_slots,      plane_table};
    Planes planes;
    const WindowArguments a =
        check_close("close_window", t, row_rejected, {num_bonus_tokens, leading_zero}, &planes);
    close(a, planes, t, page_offsets, nullptr);
}

void close_window_from_rejected(
    const std::vector<Tensor>& caches, const std::vector<int64_t>& planes_per_group,
    const Tensor& query_start_loc, const Tensor& cu_num_draft_tokens, const Tensor& num_rejected,
    const Tensor& row_rejected, const Tensor& num_accepted, const Tensor& counters,
    const Tensor& shadow_blocks, const Tensor& saved_slots, const Tensor& tail_pages,
    const std::vector<Tensor>& slot_mappings, const std::vector<Tensor>& block_tables,
    const std::optional<Tensor>& idx_mapping, const std::optional<Tensor>& held_slots,
    const std::optional<Tensor>& page_offsets, int64_t num_bonus_tokens,
    const std::optional<Tensor>& plane_table, bool leading_zero) {
    const WindowTensors t{caches,        planes_per_group, query_start_loc, cu_num_draft_tokens,
                          shadow_blocks, saved_slots,      tail_pages,      slot_mappings,
                          block_tables,  idx_mapping,      held_slots,      plane_table};
    Planes planes;
    AcceptArguments judged{};
    const WindowArguments a = check_close_from_rejected(t, num_rejected, row_rejected, num_accepted, counters,
                                                        {num_bonus_tokens, leading_zero}, &planes, &judged);
    check_cumulative(judged, INT32_MAX, "a 32-bit count");
    close(a, planes, t, page_offsets, &judged);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
    m.impl("stage_kv", TORCH_BOX(&stage_kv));
    m.impl("accept_staged", TORCH_BOX(&accept_staged));
    m.impl("commit_staged", TORCH_BOX(&commit_staged));
    m.impl("move_slots", TORCH_BOX(&move_slots));
    m.impl("open_window", TORCH_BOX(&open_window));
    m.impl("close_window", TORCH_BOX(&close_window));
    m.impl("close_window_from_rejected", TORCH_BOX(&close_window_from_rejected));
}

}  // namespace nwor
