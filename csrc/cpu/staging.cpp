// Family staging on the CPU: the staging buffer, and moves. Semantics: nwor_ops/ops/staging.py.
#include "../staging.h"

#include <vector>

#include "write.h"

namespace nwor {
namespace {

// ---------------------------------------------------------------- stage_kv

template <class Raw>
void stage_tokens(const StageArguments& a) {
    parallel_for(0, a.num_tokens, kGrainSize, [&](int64_t begin, int64_t end) {
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

void run(const StageArguments& a, const Cpu&) {
    check_each(a.op, a.num_tokens, [&](int64_t t) {
        return a.stage_rows[t] < a.num_rows ? Found{} : Found{kStageRows, t, a.stage_rows[t], a.num_rows};
    });
    with_raw_type(a.shapes[0].element_size, [&](auto tag) { stage_tokens<typename decltype(tag)::type>(a); });
}

// ---------------------------------------------------------------- accept_staged, commit_staged

void run(const AcceptStagedArguments& a, const Cpu&) {
    const int64_t window = *a.windows.window_id;
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

void run(const WriteArguments& w, const Cpu&) {
    write(w, kRowSlots);
}

// ---------------------------------------------------------------- move_slots

template <class Raw>
void move_rows(const MoveArguments& m) {
    const CacheView& shape = m.planes.view;
    // One head of a plane at a time: all its sources are read before the first destination is written.
    parallel_for(0, m.planes.count() * shape.num_heads, 1, [&](int64_t begin, int64_t end) {
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

void run(const MoveArguments& m, const Cpu&) {
    const CacheView& cache = m.planes.view;
    if (m.num_moves == 0 || cache.num_heads * cache.width == 0) return;
    check_each(m.op, m.num_moves, [&](int64_t i) {
        if (m.from[i] < 0 || m.to[i] < 0) return Found{};
        if (const Found found = problem_of_slot(kSrcSlots, i, m.from[i], cache)) return found;
        return problem_of_slot(kDstSlots, i, m.to[i], cache);
    });
    check_page_table(m.op, m.page_offsets, cache);
    with_raw_type(cache.element_size, [&](auto tag) { move_rows<typename decltype(tag)::type>(m); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
    register_staging<Cpu>(m);
}

}  // namespace nwor
