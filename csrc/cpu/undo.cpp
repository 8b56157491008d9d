// Family undo on the CPU: write, write with a log, log, restore. Semantics: nwor_ops/ops.py.
#include "accept.h"
#include "write.h"

namespace nwor {
namespace {

// ---------------------------------------------------------------- write_kv, write_kv_logged

void write_kv(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
              const Tensor& slot_mapping, const Tensor& k_scale, const Tensor& v_scale,
              const std::string& kv_cache_dtype) {
    write(check_write("write_kv", key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale,
                      kv_cache_dtype));
}

void write_kv_logged(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                     const Tensor& value_cache, const Tensor& slot_mapping, const Tensor& k_scale,
                     const Tensor& v_scale, const std::string& kv_cache_dtype, const Tensor& log_rows,
                     const Tensor& key_log, const Tensor& value_log, const std::optional<Tensor>& window_id,
                     const std::optional<Tensor>& row_windows) {
    WriteArguments w = check_write("write_kv_logged", key, value, key_cache, value_cache, slot_mapping,
                                   k_scale, v_scale, kv_cache_dtype);
    check_write_log(w, key, value, key_cache, value_cache, log_rows, key_log, value_log, window_id,
                    row_windows);
    write(w);
}

// ---------------------------------------------------------------- log_slots

template <class Raw>
void log_tokens(const LogArguments& l) {
    torch::stable::parallel_for(0, l.num_tokens, kRowsPerThread, [&](int64_t begin, int64_t end) {
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

void log_slots(const Tensor& cache, const Tensor& slot_mapping, const Tensor& log_rows, const Tensor& log,
               const std::optional<Tensor>& page_offsets, const std::optional<Tensor>& window_id,
               const std::optional<Tensor>& row_windows) {
    const LogArguments l =
        check_log_slots(cache, slot_mapping, log_rows, log, page_offsets, window_id, row_windows);
    for (int64_t t = 0; t < l.num_tokens; ++t)
        check_token(l.op, "slot_mapping", t, l.slot_mapping[t], l.log_rows, l.num_log_rows, l.cache);
    check_page_table(l.op, l.page_offsets, l.cache);
    with_raw_type(l.cache.element_size, [&](auto tag) { log_tokens<typename decltype(tag)::type>(l); });
}

// ---------------------------------------------------------------- restore_slots

template <class Raw>
void restore_rows(const RestoreArguments& r) {
    // Layers x rows in one parallel region, so that few rows of many layers still fill the threads.
    torch::stable::parallel_for(
        0, r.planes.count() * r.num_rows, kRowsPerThread, [&](int64_t begin, int64_t end) {
            for (int64_t layer = begin / r.num_rows; layer * r.num_rows < end; ++layer) {
                const CacheView cache = r.planes.plane(layer);
                RowsView log = r.log;
                log.data += layer * r.log_layer_stride * static_cast<int64_t>(sizeof(Raw));
                const int64_t first = std::max(begin - layer * r.num_rows, int64_t{0});
                const int64_t last = std::min(end - layer * r.num_rows, r.num_rows);
                const auto undone = [&](int64_t row) {
                    return r.row_slots[row] >= 0 && r.row_rejected[row] &&
                           (r.row_windows.rows == nullptr ||
                            r.row_windows.rows[layer * r.windows_layer_stride + row] ==
                                *r.row_windows.window_id);
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

void check_rejected_slots(const RestoreArguments& r, const bool* row_rejected) {
    for (int64_t row = 0; row < r.num_rows; ++row)
        if (row_rejected[row]) check_slot(r.op, "row_slots", row, r.row_slots[row], r.planes.view);
    if (r.num_rows > 0) check_page_table(r.op, r.page_offsets, r.planes.view);
}

void restore(const RestoreArguments& r) {
    if (r.num_rows == 0) return;
    with_raw_type(r.planes.view.element_size,
                  [&](auto tag) { restore_rows<typename decltype(tag)::type>(r); });
}

void restore_slots(const std::vector<Tensor>& caches, const Tensor& log, const Tensor& row_slots,
                   const Tensor& row_rejected, const std::optional<Tensor>& page_offsets,
                   const std::optional<Tensor>& window_id, const std::optional<Tensor>& row_windows,
                   const std::optional<int64_t>& num_rows, const std::optional<Tensor>& plane_table) {
    const RestoreArguments r = check_restore("restore_slots", caches, log, row_slots, row_rejected,
                                             page_offsets, window_id, row_windows, num_rows, plane_table);
    check_rejected_slots(r, r.row_rejected);
    restore(r);
}

void restore_slots_from_rejected(
    const std::vector<Tensor>& caches, const Tensor& log, const Tensor& row_slots, const Tensor& num_rejected,
    const Tensor& cu_num_draft_tokens, const Tensor& row_rejected, const Tensor& num_accepted,
    const Tensor& counters, int64_t num_bonus_tokens, const std::optional<Tensor>& page_offsets,
    const std::optional<Tensor>& window_id, const std::optional<Tensor>& row_windows,
    const std::optional<int64_t>& num_rows, const std::optional<Tensor>& plane_table, bool leading_zero) {
    AcceptArguments a{};
    const RestoreArguments r = check_restore_from_rejected(
        caches, log, row_slots, num_rejected, cu_num_draft_tokens, row_rejected, num_accepted, counters,
        {num_bonus_tokens, leading_zero}, page_offsets, window_id, row_windows, num_rows, plane_table, &a);
    check_cumulative(a, INT32_MAX, "a 32-bit count");
    check_rejected_slots(r, Judged(a).marks());
    accept(a);
    restore(r);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
    m.impl("write_kv", TORCH_BOX(&write_kv));
    m.impl("write_kv_logged", TORCH_BOX(&write_kv_logged));
    m.impl("log_slots", TORCH_BOX(&log_slots));
    m.impl("restore_slots", TORCH_BOX(&restore_slots));
    m.impl("restore_slots_from_rejected", TORCH_BOX(&restore_slots_from_rejected));
}

}  // namespace nwor
