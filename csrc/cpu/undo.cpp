// Family undo on the CPU: write, write with a log, log, restore. Semantics: nwor_ops/ops.py.
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>

#include "../check.h"
#include "../dispatch.h"
#include "../fp8.h"

namespace nwor {
namespace {

// Rows are small (a few KiB); below this many a second thread costs more than it saves.
constexpr int64_t kRowsPerThread = 16;

// ---------------------------------------------------------------- moving rows

// Address of a slot's first element in a view, in elements of T.
template <class T>
T* slot_data(const CacheView& cache, int64_t slot) {
    const int64_t block = slot / cache.block_size, offset = slot - block * cache.block_size;
    return reinterpret_cast<T*>(cache.data) + block * cache.block_stride + offset * cache.slot_stride;
}

template <class T>
T* row_data(const RowsView& rows, int64_t row) {
    return reinterpret_cast<T*>(rows.data) + row * rows.row_stride;
}

struct HeadsStrides {
    int64_t head, width;
};

inline HeadsStrides strides_of(const CacheView& v) {
    return {v.head_stride, v.width_stride};
}
inline HeadsStrides strides_of(const RowsView& v) {
    return {v.head_stride, v.width_stride};
}

// [H, W] from one strided place to another, bytes as they are.
template <class T>
void copy_row(T* to, HeadsStrides to_strides, const T* from, HeadsStrides from_strides, int64_t num_heads,
              int64_t width) {
    const bool runs = to_strides.width == 1 && from_strides.width == 1;
    if (runs && to_strides.head == width && from_strides.head == width) {
        std::memcpy(to, from, static_cast<size_t>(num_heads * width) * sizeof(T));
        return;
    }
    for (int64_t h = 0; h < num_heads; ++h, to += to_strides.head, from += from_strides.head) {
        if (runs) {
            std::memcpy(to, from, static_cast<size_t>(width) * sizeof(T));
        } else {
            for (int64_t w = 0; w < width; ++w) to[w * to_strides.width] = from[w * from_strides.width];
        }
    }
}

// Rows that follow one another: `count` of them in one access for each element of a row.
template <int count, class T>
void copy_adjacent_rows(T* to, HeadsStrides to_strides, const T* from, HeadsStrides from_strides,
                        int64_t num_heads, int64_t width) {
    for (int64_t h = 0; h < num_heads; ++h, to += to_strides.head, from += from_strides.head)
        for (int64_t w = 0; w < width; ++w)
            std::memcpy(to + w * to_strides.width, from + w * from_strides.width, count * sizeof(T));
}

// Consecutive rows [count, H, W]. Where slots lie next to each other (the keys of vLLM's CPU pages), and the
// log's rows do too, several rows move at once: the drafts of a request are such rows.
template <class T>
void copy_rows(T* to, int64_t to_row_stride, HeadsStrides to_strides, const T* from, int64_t from_row_stride,
               HeadsStrides from_strides, int64_t num_heads, int64_t width, int64_t count) {
    const bool adjacent = to_row_stride == 1 && from_row_stride == 1;
    while (count > 0) {
        int64_t copied = 1;
        if (adjacent && count >= 4) {
            copy_adjacent_rows<4>(to, to_strides, from, from_strides, num_heads, width);
            copied = 4;
        } else if (adjacent && count >= 2) {
            copy_adjacent_rows<2>(to, to_strides, from, from_strides, num_heads, width);
            copied = 2;
        } else {
            copy_row(to, to_strides, from, from_strides, num_heads, width);
        }
        to += copied * to_row_stride;
        from += copied * from_row_stride;
        count -= copied;
    }
}

// [H, W] into or out of a page whose inner order is a table; `to_page` says which.
template <bool to_page, class T>
void copy_page_row(const CacheView& cache, const PageOffsets& offsets, int64_t slot, T* row,
                   HeadsStrides row_strides) {
    const int64_t block = slot / cache.block_size;
    const int32_t* table = offsets.table + (slot - block * cache.block_size) * cache.width;
    T* page = reinterpret_cast<T*>(cache.data) + block * cache.block_stride;
    for (int64_t h = 0; h < cache.num_heads; ++h, page += cache.head_stride, row += row_strides.head)
        for (int64_t w = 0; w < cache.width; ++w) {
            if constexpr (to_page)
                page[table[w]] = row[w * row_strides.width];
            else
                row[w * row_strides.width] = page[table[w]];
        }
}

// ---------------------------------------------------------------- bounds, before the first write

void check_slot(const char* op, const char* name, int64_t index, int64_t slot, const CacheView& cache) {
    if (slot >= cache.num_slots())
        fail<std::out_of_range>(op, name, "[", index, "] must be below ", cache.num_slots(), " (",
                                cache.num_blocks, " blocks of ", cache.block_size, " slots), got ", slot);
}

void check_tokens_in_bounds(const char* op, const int64_t* slot_mapping, const int32_t* log_rows,
                            int64_t num_tokens, int64_t num_log_rows, const CacheView& cache) {
    for (int64_t t = 0; t < num_tokens; ++t) {
        if (slot_mapping[t] < 0) continue;
        check_slot(op, "slot_mapping", t, slot_mapping[t], cache);
        if (log_rows != nullptr && log_rows[t] >= num_log_rows)
            fail<std::out_of_range>(op, "log_rows[", t, "] must be below the ", num_log_rows,
                                    " rows of the log, got ", log_rows[t]);
    }
}

void check_page_table(const char* op, const PageOffsets& offsets, const CacheView& cache) {
    if (offsets.table == nullptr || cache.num_slots() == 0) return;
    const auto [least, most] =
        std::minmax_element(offsets.table, offsets.table + cache.block_size * cache.width);
    const int64_t last_page =
        (cache.num_blocks - 1) * cache.block_stride + (cache.num_heads - 1) * cache.head_stride;
    if (*least < 0 || last_page + *most >= offsets.limit)
        fail<std::out_of_range>(op, "page_offsets must lie within the storage of the cache (", offsets.limit,
                                " elements), got offsets from ", *least, " to ", *most);
}

// ---------------------------------------------------------------- write_kv, write_kv_logged

// One element of the cache from one element of the source.
template <Format format, class Source>
struct Convert;

template <class Source>
struct Convert<Format::kE4M3, Source> {
    static uint8_t apply(Source x, float scale) { return float_to_e4m3(static_cast<float>(x) / scale); }
};
template <class Source>
struct Convert<Format::kE5M2, Source> {
    static uint8_t apply(Source x, float scale) { return float_to_e5m2(static_cast<float>(x) / scale); }
};

template <Format format, class Source>
void quantize_row(uint8_t* to, HeadsStrides to_strides, const Source* from, HeadsStrides from_strides,
                  const ScaleView& scale, int64_t token, int64_t num_heads, int64_t width) {
    for (int64_t h = 0; h < num_heads; ++h, to += to_strides.head, from += from_strides.head) {
        const float s = scale.data[token * scale.token_stride + h * scale.head_stride];
        for (int64_t w = 0; w < width; ++w)
            to[w * to_strides.width] = Convert<format, Source>::apply(from[w * from_strides.width], s);
    }
}

// One of the two planes of a write.
template <class Source>
struct Plane {
    const RowsView& source;
    const CacheView& cache;
    const ScaleView& scale;
    const RowsView& log;

    template <class Raw>
    void save(int64_t slot, int64_t log_row, int64_t count) const {
        copy_rows(row_data<Raw>(log, log_row), log.row_stride, strides_of(log),
                  slot_data<const Raw>(cache, slot), cache.slot_stride, strides_of(cache), cache.num_heads,
                  cache.width, count);
    }

    template <Format format>
    void write(int64_t token, int64_t slot) const {
        const Source* from = row_data<const Source>(source, token);
        if constexpr (format == Format::kCopy) {
            copy_row(slot_data<Source>(cache, slot), strides_of(cache), from, strides_of(source),
                     cache.num_heads, cache.width);
        } else {
            quantize_row<format>(slot_data<uint8_t>(cache, slot), strides_of(cache), from, strides_of(source),
                                 scale, token, cache.num_heads, cache.width);
        }
    }
};

// How many tokens from t on, before `end`, are logged to consecutive rows from consecutive slots of one
// block.
int64_t logged_together(const int64_t* slot_mapping, const int32_t* log_rows, int64_t t, int64_t end,
                        int64_t block_size) {
    const int64_t left_in_block = block_size - slot_mapping[t] % block_size;
    int64_t count = 1;
    while (t + count < end && count < left_in_block && slot_mapping[t + count] == slot_mapping[t] + count &&
           log_rows[t + count] == log_rows[t] + count)
        ++count;
    return count;
}

template <Format format, class Source>
void write_tokens(const WriteArguments& w) {
    using Raw = std::conditional_t<format == Format::kCopy, Source, uint8_t>;
    const Plane<Source> planes[] = {{w.key, w.key_cache, w.k_scale, w.key_log},
                                    {w.value, w.value_cache, w.v_scale, w.value_log}};
    torch::stable::parallel_for(0, w.num_tokens, kRowsPerThread, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin, together = 1; t < end; t += together) {
            together = 1;
            if (w.slot_mapping[t] < 0) continue;
            const int64_t log_row = w.log_rows == nullptr ? -1 : w.log_rows[t];
            if (log_row >= 0)
                together = logged_together(w.slot_mapping, w.log_rows, t, end, w.key_cache.block_size);
            for (const auto& plane : planes) {
                if (log_row >= 0) plane.template save<Raw>(w.slot_mapping[t], log_row, together);
                for (int64_t i = t; i < t + together; ++i) plane.template write<format>(i, w.slot_mapping[i]);
            }
            if (log_row >= 0 && w.row_windows.rows != nullptr)
                std::fill_n(w.row_windows.rows + log_row, together, *w.row_windows.window_id);
        }
    });
}

template <class Source>
void write_source(const WriteArguments& w) {
    switch (w.format) {
        case Format::kE4M3:
            return write_tokens<Format::kE4M3, Source>(w);
        case Format::kE5M2:
            return write_tokens<Format::kE5M2, Source>(w);
        case Format::kCopy:
            break;
    }
    // A plain copy moves bytes: NaN payloads and signalling NaNs stay as they are.
    if constexpr (sizeof(Source) == 4)
        write_tokens<Format::kCopy, uint32_t>(w);
    else
        write_tokens<Format::kCopy, uint16_t>(w);
}

void write(const WriteArguments& w) {
    check_tokens_in_bounds(w.op, w.slot_mapping, w.log_rows, w.num_tokens, w.num_log_rows, w.key_cache);
    switch (w.source_dtype) {
        case ScalarType::Float:
            return write_source<float>(w);
        case ScalarType::Half:
            return write_source<c10::Half>(w);
        default:
            return write_source<c10::BFloat16>(w);
    }
}

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
    check_tokens_in_bounds(l.op, l.slot_mapping, l.log_rows, l.num_tokens, l.num_log_rows, l.cache);
    check_page_table(l.op, l.page_offsets, l.cache);
    with_raw_type(l.cache.element_size, [&](auto tag) { log_tokens<typename decltype(tag)::type>(l); });
}

// ---------------------------------------------------------------- restore_slots

template <class Raw>
void restore_rows(const RestoreArguments& r, const std::vector<Tensor>& caches) {
    // Layers x rows in one parallel region, so that few rows of many layers still fill the threads.
    torch::stable::parallel_for(
        0, r.num_layers * r.num_rows, kRowsPerThread, [&](int64_t begin, int64_t end) {
            for (int64_t layer = begin / r.num_rows; layer * r.num_rows < end; ++layer) {
                CacheView cache = r.cache;
                cache.data = static_cast<char*>(caches[layer].data_ptr());
                RowsView log = r.log;
                log.data += layer * r.log_layer_stride * static_cast<int64_t>(sizeof(Raw));
                const int64_t first = std::max(begin - layer * r.num_rows, int64_t{0});
                const int64_t last = std::min(end - layer * r.num_rows, r.num_rows);
                const auto undone = [&](int64_t row) {
                    return r.row_slots[row] >= 0 && r.row_rejected[row] &&
                           (r.row_windows.rows == nullptr ||
                            r.row_windows.rows[layer * r.num_rows + row] == *r.row_windows.window_id);
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

void restore_slots(const std::vector<Tensor>& caches, const Tensor& log, const Tensor& row_slots,
                   const Tensor& row_rejected, const std::optional<Tensor>& page_offsets,
                   const std::optional<Tensor>& window_id, const std::optional<Tensor>& row_windows) {
    const RestoreArguments r =
        check_restore(caches, log, row_slots, row_rejected, page_offsets, window_id, row_windows);
    if (r.num_rows == 0) return;
    for (int64_t row = 0; row < r.num_rows; ++row)
        if (r.row_rejected[row]) check_slot(r.op, "row_slots", row, r.row_slots[row], r.cache);
    check_page_table(r.op, r.page_offsets, r.cache);
    with_raw_type(r.cache.element_size,
                  [&](auto tag) { restore_rows<typename decltype(tag)::type>(r, caches); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
    m.impl("write_kv", TORCH_BOX(&write_kv));
    m.impl("write_kv_logged", TORCH_BOX(&write_kv_logged));
    m.impl("log_slots", TORCH_BOX(&log_slots));
    m.impl("restore_slots", TORCH_BOX(&restore_slots));
}

}  // namespace nwor
