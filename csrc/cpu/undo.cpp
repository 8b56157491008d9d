// Family undo on the CPU: write, write with a log, log, restore. Semantics: nwor_ops/ops/undo.py.
#include "../undo.h"

#include "acceptance.h"
#include "write.h"

namespace nwor {
namespace {

void run(const WriteArguments& w, const Cpu&) {
    write(w);
}

// ---------------------------------------------------------------- log_slots

template <class Raw>
void log_tokens(const LogArguments& l) {
    parallel_for(0, l.num_tokens, kGrainSize, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            const int64_t slot = l.slot_mapping[t];
            if (slot < 0 || l.log_rows[t] < 0) continue;
            Raw* row = row_data<Raw>(l.log, l.log_rows[t]);
            if (l.page_offsets.table != nullptr)
                copy_page_row<false>(l.cache, l.page_offsets, slot, row, strides_of(l.log));
            else
                copy_row(row, strides_of(l.log), slot_data<const Raw>(l.cache, slot), strides_of(l.cache),
                         l.cache.num_heads, l.cache.width);
            if (l.row_windows.rows != nullptr) l.row_windows.rows[l.log_rows[t]] = *l.row_windows.window_id;
        }
    });
}

void run(const LogArguments& l, const Cpu&) {
    check_each(l.op, l.num_tokens, [&](int64_t t) {
        return problem_of_token(kSlotMapping, t, l.slot_mapping[t], l.log_rows, l.num_log_rows, l.cache);
    });
    check_page_table(l.op, l.page_offsets, l.cache);
    with_raw_type(l.cache.element_size, [&](auto tag) { log_tokens<typename decltype(tag)::type>(l); });
}

// ---------------------------------------------------------------- restore_slots

// Returns whether a layer has logged this row in the window.
bool is_logged(const RestoreArguments& r, int64_t layer, int64_t row) {
    return r.row_windows.rows == nullptr ||
           r.row_windows.rows[layer * r.windows_layer_stride + row] == *r.row_windows.window_id;
}

template <class Raw>
void restore_rows(const RestoreArguments& r) {
    // Layers and rows share one parallel region, so that a few rows of many layers still use all threads.
    parallel_for(0, r.planes.count() * r.num_rows, kGrainSize, [&](int64_t begin, int64_t end) {
        for (int64_t layer = begin / r.num_rows; layer * r.num_rows < end; ++layer) {
            const CacheView cache = r.planes.plane(layer);
            RowsView log = r.log;
            log.data += layer * r.log_layer_stride * static_cast<int64_t>(sizeof(Raw));
            const int64_t first = std::max(begin - layer * r.num_rows, int64_t{0});
            const int64_t last = std::min(end - layer * r.num_rows, r.num_rows);
            const auto undone = [&](int64_t row) {
                return r.row_slots[row] >= 0 && r.row_rejected[row] && is_logged(r, layer, row);
            };
            for (int64_t row = first, together = 1; row < last; row += together) {
                together = 1;
                if (!undone(row)) continue;
                const int64_t slot = r.row_slots[row];
                Raw* saved = row_data<Raw>(log, row);
                if (r.page_offsets.table != nullptr) {
                    copy_page_row<true>(cache, r.page_offsets, slot, saved, strides_of(log));
                    continue;
                }
                const int64_t left_in_block = cache.block_size - slot % cache.block_size;
                while (row + together < last && together < left_in_block && undone(row + together) &&
                       r.row_slots[row + together] == slot + together)
                    ++together;
                copy_rows(slot_data<Raw>(cache, slot), cache.slot_stride, strides_of(cache),
                          const_cast<const Raw*>(saved), log.row_stride, strides_of(log), cache.num_heads,
                          cache.width, together);
            }
        }
    });
}

// Checks the rows that some layer restores. The slots of other rows may be those of other caches.
void check_rejected_slots(const RestoreArguments& r, const bool* row_rejected) {
    const auto is_restored = [&](int64_t row) {
        for (int64_t layer = 0; row_rejected[row] && layer < r.planes.count(); ++layer)
            if (is_logged(r, layer, row)) return true;
        return false;
    };
    check_each(r.op, r.num_rows, [&](int64_t row) {
        return is_restored(row) ? problem_of_slot(kRowSlots, row, r.row_slots[row], r.planes.view) : Found{};
    });
    if (r.num_rows > 0) check_page_table(r.op, r.page_offsets, r.planes.view);
}

void restore(const RestoreArguments& r) {
    if (r.num_rows == 0) return;
    with_raw_type(r.planes.view.element_size,
                  [&](auto tag) { restore_rows<typename decltype(tag)::type>(r); });
}

void run(const RestoreArguments& r, const Cpu&) {
    check_rejected_slots(r, r.row_rejected);
    restore(r);
}

void run(const RestoreCall& call, const Cpu&) {
    check_drafts(call.accept);
    check_rejected_slots(call.restore, Accepted(call.accept).marks());
    accept(call.accept);
    restore(call.restore);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
    register_undo<Cpu>(m);
}

}  // namespace nwor
