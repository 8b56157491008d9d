// The writer of keys and values, for all ops that write them.
#pragma once

#include "../common/fp8.h"
#include "../common/write.h"
#include "rows.h"

namespace nwor {
namespace {

// Converts one element of the source to one element of the cache.
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

// Number of tokens from t on, before `end`, that are logged to consecutive rows from consecutive slots of one
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

// The slot of a token; negative if the token is skipped.
int64_t slot_of(const WriteArguments& w, int64_t token) {
    return w.accepted.accepts(token) ? w.slot_mapping[token] : -1;
}

template <Format format, class Source>
void write_tokens(const WriteArguments& w) {
    using Raw = std::conditional_t<format == Format::kCopy, Source, uint8_t>;
    const Plane<Source> planes[] = {{w.key, w.key_cache, w.k_scale, w.key_log},
                                    {w.value, w.value_cache, w.v_scale, w.value_log}};
    parallel_for(0, w.num_tokens, kGrainSize, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin, together = 1; t < end; t += together) {
            together = 1;
            const int64_t slot = slot_of(w, t);
            if (slot < 0) continue;
            const int64_t log_row = w.log_rows == nullptr ? -1 : w.log_rows[t];
            if (log_row >= 0)
                together = logged_together(w.slot_mapping, w.log_rows, t, end, w.key_cache.block_size);
            for (const auto& plane : planes) {
                if (log_row >= 0) plane.template save<Raw>(slot, log_row, together);
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
    // A plain copy moves bytes: NaN payloads and signalling NaNs do not change.
    if constexpr (sizeof(Source) == 4)
        write_tokens<Format::kCopy, uint32_t>(w);
    else
        write_tokens<Format::kCopy, uint16_t>(w);
}

void write(const WriteArguments& w, Problem of_slot = kSlotMapping) {
    check_each(w.op, w.num_tokens, [&](int64_t t) {
        return problem_of_token(of_slot, t, slot_of(w, t), w.log_rows, w.num_log_rows, w.key_cache);
    });
    switch (w.source_dtype) {
        case ScalarType::Float:
            return write_source<float>(w);
        case ScalarType::Half:
            return write_source<Half>(w);
        default:
            return write_source<BFloat16>(w);
    }
}

}  // namespace

}  // namespace nwor
