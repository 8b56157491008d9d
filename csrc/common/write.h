// The arguments of every op that writes keys and values to a paged cache.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "views.h"

namespace nwor {

enum class Format { kCopy, kE4M3, kE5M2 };

inline Format parse_format(const char* op, const std::string& kv_cache_dtype) {
    if (kv_cache_dtype == "auto") return Format::kCopy;
    if (kv_cache_dtype == "fp8" || kv_cache_dtype == "fp8_e4m3") return Format::kE4M3;
    if (kv_cache_dtype == "fp8_e5m2") return Format::kE5M2;
    fail(op, "kv_cache_dtype must be one of auto, fp8, fp8_e4m3, fp8_e5m2, got ", kv_cache_dtype);
}

// Which rows of a staging buffer are committed: those with a flag, or the first ones of each request by their
// number. With neither, all rows.
struct Acceptance {
    const bool* flags;                            // [R]
    const int32_t* lengths;                       // [Q]
    const int32_t *row_requests, *row_positions;  // [R], with lengths
    int64_t num_requests;

    NWOR_HOST_DEVICE bool accepts(int64_t row) const {
        if (row_requests == nullptr) return flags == nullptr || flags[row];
        const int64_t request = row_requests[row], position = row_positions[row];
        return request >= 0 && request < num_requests && position >= 0 && position < lengths[request];
    }
};

// Names of the arguments of a write, for messages.
struct WriteNames {
    const char *key = "key", *value = "value", *slots = "slot_mapping";
};

struct WriteArguments {
    const char* op;
    int64_t num_tokens;
    const int64_t* slot_mapping;
    Acceptance accepted;
    RowsView key, value;
    CacheView key_cache, value_cache;
    ScalarType source_dtype;
    Format format;
    ScaleView k_scale, v_scale;
    // Only write_kv_logged sets these; log_rows is null otherwise.
    const int32_t* log_rows;
    int64_t num_log_rows;
    RowsView key_log, value_log;
    RowWindows row_windows;
};

inline void check_source(const Argument& a, const CacheView& cache, int64_t num_tokens) {
    const Tensor& t = a.tensor;
    if (t.dim() != 3 || t.size(0) < num_tokens || t.size(1) != cache.num_heads || t.size(2) != cache.width)
        a.must_be("[>= ", num_tokens, ", ", cache.num_heads, ", ", cache.width,
                  "] (num_tokens, num_kv_heads and width of its cache)");
}

// Does not compare memory. The op does, since it may have more inputs and outputs.
inline WriteArguments check_write(const char* op, const Tensor& key, const Tensor& value,
                                  const Tensor& key_cache, const Tensor& value_cache,
                                  const Tensor& slot_mapping, const Tensor& k_scale, const Tensor& v_scale,
                                  const std::string& kv_cache_dtype, const WriteNames& names = {}) {
    WriteArguments w{};
    w.op = op;
    const Argument slots{op, names.slots, slot_mapping};
    w.slot_mapping = int64_view(slots, 0, "[num_tokens]").data;
    w.num_tokens = slot_mapping.size(0);

    const Argument kc{op, "key_cache", key_cache}, vc{op, "value_cache", value_cache};
    w.key_cache = cache_view(kc);
    w.value_cache = cache_view(vc);
    if (w.value_cache.num_blocks != w.key_cache.num_blocks ||
        w.value_cache.block_size != w.key_cache.block_size ||
        w.value_cache.num_heads != w.key_cache.num_heads)
        vc.must_be("of the num_blocks, block_size and num_kv_heads of key_cache, ", describe(key_cache));
    vc.dtype(key_cache.scalar_type());

    const Argument k{op, names.key, key}, v{op, names.value, value};
    w.source_dtype = key.scalar_type();
    check_floats(k);
    v.dtype(w.source_dtype);
    check_source(k, w.key_cache, w.num_tokens);
    check_source(v, w.value_cache, w.num_tokens);
    w.key = rows_view(key);
    w.value = rows_view(value);

    w.format = parse_format(op, kv_cache_dtype);
    const Argument ks{op, "k_scale", k_scale}, vs{op, "v_scale", v_scale};
    for (const Argument& a : {v, kc, vc, slots, ks, vs}) a.same_device(key);
    if (w.format == Format::kCopy) {
        if (key_cache.scalar_type() != w.source_dtype)
            kc.must_have_dtype(dtype_name(w.source_dtype), " (that of ", names.key,
                               ") for kv_cache_dtype auto");
    } else {
        const ScalarType native =
            w.format == Format::kE4M3 ? ScalarType::Float8_e4m3fn : ScalarType::Float8_e5m2;
        if (key_cache.scalar_type() != ScalarType::Byte && key_cache.scalar_type() != native)
            kc.must_have_dtype("torch.uint8 or ", dtype_name(native), " for kv_cache_dtype ", kv_cache_dtype);
        w.k_scale = scale_view(ks, w.num_tokens, w.key_cache.num_heads);
        w.v_scale = scale_view(vs, w.num_tokens, w.key_cache.num_heads);
    }
    return w;
}

// The inputs of a write that a check compares with its outputs. Scales are read only for a quantised cache.
inline std::vector<Argument> with_scales(std::vector<Argument> inputs, const WriteArguments& w,
                                         const Tensor& k_scale, const Tensor& v_scale) {
    if (w.format == Format::kCopy) return inputs;
    inputs.push_back({w.op, "k_scale", k_scale});
    inputs.push_back({w.op, "v_scale", v_scale});
    return inputs;
}

}  // namespace nwor
