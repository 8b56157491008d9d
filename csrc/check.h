// What an op may be given. Every argument of every op is checked here, once, for the CPU and the CUDA
// kernels alike, and handed on as plain pointers and strides that a kernel can take by value.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "stable.h"

#ifdef __CUDACC__
#define NWOR_HOST_DEVICE __host__ __device__
#else
#define NWOR_HOST_DEVICE
#endif

namespace nwor {

// ---------------------------------------------------------------- errors

// Python sees std::invalid_argument as ValueError and std::out_of_range as IndexError. ops.py turns a
// complaint that says "must have dtype" or "must be on device" into a TypeError.
template <class Error = std::invalid_argument, class... Parts>
[[noreturn]] inline void fail(const char* op, const Parts&... parts) {
    std::ostringstream text;
    text << op << ": ";
    (text << ... << parts);
    throw Error(text.str());
}

inline const char* dtype_name(ScalarType dtype) {
    switch (dtype) {
        case ScalarType::Float:
            return "torch.float32";
        case ScalarType::Half:
            return "torch.float16";
        case ScalarType::BFloat16:
            return "torch.bfloat16";
        case ScalarType::Double:
            return "torch.float64";
        case ScalarType::Byte:
            return "torch.uint8";
        case ScalarType::Char:
            return "torch.int8";
        case ScalarType::Short:
            return "torch.int16";
        case ScalarType::Int:
            return "torch.int32";
        case ScalarType::Long:
            return "torch.int64";
        case ScalarType::Bool:
            return "torch.bool";
        case ScalarType::Float8_e4m3fn:
            return "torch.float8_e4m3fn";
        case ScalarType::Float8_e5m2:
            return "torch.float8_e5m2";
        default:
            return "another dtype";
    }
}

inline std::string device_name(const Tensor& tensor) {
    if (tensor.is_cpu()) return "cpu";
    return (tensor.is_cuda() ? "cuda:" : "device:") + std::to_string(tensor.get_device_index());
}

inline std::string describe(const Tensor& tensor) {
    std::ostringstream text;
    text << dtype_name(tensor.scalar_type()) << " [";
    for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
    text << "]";
    return text.str();
}

// An argument with the names a complaint needs.
struct Argument {
    const char* op;
    const char* name;
    const Tensor& tensor;

    [[noreturn]] void must_be(const std::string& expected) const {
        fail(op, name, " must be ", expected, ", got ", describe(tensor));
    }
    [[noreturn]] void must_have_dtype(const std::string& expected) const {
        fail(op, name, " must have dtype ", expected, ", got ", describe(tensor));
    }
    void dtype(ScalarType expected) const {
        if (tensor.scalar_type() != expected) must_have_dtype(dtype_name(expected));
    }
    void same_device(const Tensor& other) const {
        if (tensor.is_cpu() != other.is_cpu() || tensor.is_cuda() != other.is_cuda() ||
            tensor.get_device_index() != other.get_device_index())
            fail(op, name, " must be on device ", device_name(other), " like the other arguments, got ",
                 device_name(tensor));
    }
    void contiguous() const {
        if (!tensor.is_contiguous()) must_be("contiguous");
    }
    // A contiguous 1-d tensor of at least `length` elements.
    void vector(ScalarType expected, int64_t length, const char* shape) const {
        dtype(expected);
        if (tensor.dim() != 1 || tensor.size(0) < length)
            must_be(std::string(shape) + " with at least " + std::to_string(length) + " elements");
        contiguous();
    }
};

// Sizes and counts that the host gives. Two of them multiply within 64 bits.
inline void check_below_2_31(const char* op, const char* name, int64_t value) {
    if (value > INT32_MAX) fail(op, name, " must be below 2^31, got ", value);
}
inline void check_positive(const char* op, const char* name, int64_t value) {
    if (value <= 0) fail(op, name, " must be positive, got ", value);
    check_below_2_31(op, name, value);
}
inline void check_not_negative(const char* op, const char* name, int64_t value) {
    if (value < 0) fail(op, name, " must not be negative, got ", value);
    check_below_2_31(op, name, value);
}

// ---------------------------------------------------------------- memory ranges

struct Range {
    const char* begin;
    const char* end;
};

// The bytes between the first and the last element of a strided view. Strides of torch views are never
// negative, so the first element has the lowest address.
inline Range range_of(const Tensor& tensor) {
    const char* begin = static_cast<const char*>(tensor.data_ptr());
    if (tensor.numel() == 0) return {begin, begin};
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    int64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
    return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

// Whether two strided views share a byte. Key and value packed in one row, or in one page, span the same
// range of addresses and share none. Exact: a byte is shared where the distance of the two starts is a sum of
// the views' strides, so the search goes through the strides from the largest down and keeps to the multiples
// that the smaller ones can still make good. For views of nested dimensions that is one or two each.
class SharedBytes {
  public:
    SharedBytes(const Tensor& a, const Tensor& b)
        : size_a_(static_cast<int64_t>(a.element_size())), size_b_(static_cast<int64_t>(b.element_size())) {
        add_dimensions(a, size_a_, 1);
        add_dimensions(b, size_b_, -1);
        std::sort(terms_.begin(), terms_.begin() + num_terms_,
                  [](const Term& x, const Term& y) { return x.stride > y.stride; });
        least_[num_terms_] = 1 - size_a_;
        most_[num_terms_] = size_b_ - 1;
        for (size_t i = num_terms_; i-- > 0;) {
            least_[i] = least_[i + 1] + terms_[i].least * terms_[i].stride;
            most_[i] = most_[i + 1] + terms_[i].most * terms_[i].stride;
        }
    }

    // `distance`: from the start of a to the start of b, in bytes.
    bool at(int64_t distance) { return search(0, distance); }

  private:
    struct Term {
        int64_t stride, least, most;  // the multiples of a stride that an index difference can make
    };

    void add_dimensions(const Tensor& tensor, int64_t element_size, int sign) {
        if (tensor.dim() > kMostDimensions)
            fail("nwor", "a tensor of ", tensor.dim(), " dimensions is compared for shared memory");
        for (int64_t i = 0; i < tensor.dim(); ++i) {
            const int64_t last = tensor.size(i) - 1, stride = tensor.stride(i) * element_size;
            if (last < 1 || stride == 0) continue;
            Term* term = nullptr;
            for (size_t known = 0; known < num_terms_; ++known)
                if (terms_[known].stride == stride) term = &terms_[known];
            if (term == nullptr) {
                term = &terms_[num_terms_++];
                *term = Term{stride, 0, 0};
            }
            (sign > 0 ? term->most : term->least) += sign * last;
        }
    }

    bool search(size_t i, int64_t distance) {
        if (distance < least_[i] || distance > most_[i]) return false;
        if (i == num_terms_ || ++visited_ > kMostVisited) return true;
        const Term& term = terms_[i];
        const auto floor = [&](int64_t x) { return x / term.stride - (x % term.stride < 0); };
        const int64_t first = std::max(term.least, -floor(most_[i + 1] - distance));
        const int64_t last = std::min(term.most, floor(distance - least_[i + 1]));
        for (int64_t multiple = first; multiple <= last; ++multiple)
            if (search(i + 1, distance - multiple * term.stride)) return true;
        return false;
    }

    // Strides so tangled that this does not settle it count as shared.
    static constexpr int kMostVisited = 4096;
    static constexpr int kMostDimensions = 4;  // of any argument that is checked
    int64_t size_a_, size_b_;
    int visited_ = 0;
    size_t num_terms_ = 0;
    std::array<Term, 2 * kMostDimensions> terms_;
    std::array<int64_t, 2 * kMostDimensions + 1> least_,
        most_;  // what the terms from i on can add up to, within an element
};

// An argument and where it lies, for one that is compared with several others.
struct Placed {
    const char* name;
    const Tensor& tensor;
    Range range;

    Placed(const char* name, const Tensor& tensor, Range range) : name(name), tensor(tensor), range(range) {}
    Placed(const char* name, const Tensor& tensor) : Placed(name, tensor, range_of(tensor)) {}
    explicit Placed(const Argument& a) : Placed(a.name, a.tensor) {}
};

inline void must_not_overlap(const char* op, const Placed& a, const Placed& b) {
    if (a.range.begin >= b.range.end || b.range.begin >= a.range.end) return;
    if (SharedBytes(a.tensor, b.tensor).at(b.range.begin - a.range.begin))
        fail(op, a.name, " and ", b.name, " must not share memory");
}

inline void must_not_overlap(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                             const Tensor& other) {
    must_not_overlap(op, Placed(name, tensor), Placed(other_name, other));
}

// ---------------------------------------------------------------- views

// A cache [B, N, H, W]. Strides in elements.
struct CacheView {
    char* data;
    int64_t num_blocks, block_size, num_heads, width;
    int64_t block_stride, slot_stride, head_stride, width_stride;
    int32_t element_size;

    int64_t num_slots() const { return num_blocks * block_size; }
};

// Rows [T or R, H, W] of a key, a value or a log. Strides in elements.
struct RowsView {
    char* data;
    int64_t row_stride, head_stride, width_stride;
};

// A scale: one, per head or per token, told apart by strides.
struct ScaleView {
    const float* data;
    int64_t token_stride, head_stride;
};

enum class Format { kCopy, kE4M3, kE5M2 };

// Inner order of a page that no strides can express; null where strides do.
struct PageOffsets {
    const int32_t* table;  // [N, W], element offsets within a (block, head) page
    int64_t limit;         // elements between the start of the cache and the end of its storage
};

inline CacheView cache_view(const Argument& a) {
    const Tensor& t = a.tensor;
    if (t.dim() != 4) a.must_be("[num_blocks, block_size, num_kv_heads, width]");
    return {static_cast<char*>(t.data_ptr()),
            t.size(0),
            t.size(1),
            t.size(2),
            t.size(3),
            t.stride(0),
            t.stride(1),
            t.stride(2),
            t.stride(3),
            static_cast<int32_t>(t.element_size())};
}

inline RowsView rows_view(const Tensor& t, int64_t first_dim = 0) {
    return {static_cast<char*>(t.data_ptr()), t.stride(first_dim), t.stride(first_dim + 1),
            t.stride(first_dim + 2)};
}

inline void check_element_size(const Argument& a) {
    const size_t size = a.tensor.element_size();
    if (size != 1 && size != 2 && size != 4 && size != 8)
        a.must_have_dtype("of 1, 2, 4 or 8 bytes per element");
}

inline ScaleView scale_view(const Argument& a, int64_t num_tokens, int64_t num_heads) {
    const Tensor& t = a.tensor;
    a.dtype(ScalarType::Float);
    const float* data = static_cast<const float*>(t.data_ptr());
    if (t.numel() == 1 && t.dim() <= 1) return {data, 0, 0};
    if (t.dim() == 1 && t.size(0) == num_heads) return {data, 0, t.stride(0)};
    if (t.dim() == 2 && t.size(0) >= num_tokens && t.size(1) == 1) return {data, t.stride(0), 0};
    a.must_be("one element, per head [num_kv_heads] or per token [num_tokens, 1]");
}

inline Format parse_format(const char* op, const std::string& kv_cache_dtype) {
    if (kv_cache_dtype == "auto") return Format::kCopy;
    if (kv_cache_dtype == "fp8" || kv_cache_dtype == "fp8_e4m3") return Format::kE4M3;
    if (kv_cache_dtype == "fp8_e5m2") return Format::kE5M2;
    fail(op, "kv_cache_dtype must be one of auto, fp8, fp8_e4m3, fp8_e5m2, got ", kv_cache_dtype);
}

// ---------------------------------------------------------------- write_kv, write_kv_logged

// In which window each log row was last written; null where the caller does not keep track.
struct RowWindows {
    const int64_t* window_id;  // [1]
    int64_t* rows;             // [R], or [L, R] in restore_slots
};

inline RowWindows check_row_windows(const char* op, const std::optional<Tensor>& window_id,
                                    const std::optional<Tensor>& row_windows, const Tensor& like,
                                    int64_t num_rows, int64_t num_layers = 0) {
    if (!window_id.has_value() && !row_windows.has_value()) return {nullptr, nullptr};
    if (!window_id.has_value() || !row_windows.has_value())
        fail(op, "window_id and row_windows must be given together");
    const Argument id{op, "window_id", *window_id}, rows{op, "row_windows", *row_windows};
    id.vector(ScalarType::Long, 1, "[1]");
    rows.dtype(ScalarType::Long);
    rows.contiguous();
    if (num_layers == 0 ? row_windows->dim() != 1 || row_windows->size(0) != num_rows
                        : row_windows->dim() != 2 || row_windows->size(0) != num_layers ||
                              row_windows->size(1) != num_rows) {
        std::ostringstream text;
        text << "[";
        if (num_layers > 0) text << num_layers << ", ";
        text << num_rows << "], one number for each row of the log";
        rows.must_be(text.str());
    }
    id.same_device(like);
    rows.same_device(like);
    must_not_overlap(op, "row_windows", *row_windows, "window_id", *window_id);
    return {static_cast<const int64_t*>(window_id->data_ptr()),
            static_cast<int64_t*>(row_windows->data_ptr())};
}

// Which rows of a staging buffer are committed: those with a flag, or the first so many of each request.
// Without either, all.
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

// What an op calls the arguments of a write.
struct WriteNames {
    const char *key = "key", *value = "value", *slots = "slot_mapping";
};

struct WriteArguments {
    const char* op;
    WriteNames names;
    int64_t num_tokens;
    const int64_t* slot_mapping;
    Acceptance accepted;
    RowsView key, value;
    CacheView key_cache, value_cache;
    ScalarType source_dtype;
    Format format;
    ScaleView k_scale, v_scale;
    // Logging; log_rows is null in the plain writer.
    const int32_t* log_rows;
    int64_t num_log_rows;
    RowsView key_log, value_log;
    RowWindows row_windows;
};

inline void check_source(const Argument& a, const CacheView& cache, int64_t num_tokens) {
    const Tensor& t = a.tensor;
    if (t.dim() != 3 || t.size(0) < num_tokens || t.size(1) != cache.num_heads || t.size(2) != cache.width) {
        std::ostringstream text;
        text << "[>= " << num_tokens << ", " << cache.num_heads << ", " << cache.width
             << "] (num_tokens, num_kv_heads and width of its cache)";
        a.must_be(text.str());
    }
}

inline WriteArguments check_write(const char* op, const Tensor& key, const Tensor& value,
                                  const Tensor& key_cache, const Tensor& value_cache,
                                  const Tensor& slot_mapping, const Tensor& k_scale, const Tensor& v_scale,
                                  const std::string& kv_cache_dtype, const WriteNames& names = {}) {
    WriteArguments w{};
    w.op = op;
    w.names = names;
    const Argument slots{op, names.slots, slot_mapping};
    slots.vector(ScalarType::Long, 0, "[num_tokens]");
    w.num_tokens = slot_mapping.size(0);
    w.slot_mapping = static_cast<const int64_t*>(slot_mapping.data_ptr());

    const Argument kc{op, "key_cache", key_cache}, vc{op, "value_cache", value_cache};
    w.key_cache = cache_view(kc);
    w.value_cache = cache_view(vc);
    if (w.value_cache.num_blocks != w.key_cache.num_blocks ||
        w.value_cache.block_size != w.key_cache.block_size ||
        w.value_cache.num_heads != w.key_cache.num_heads)
        vc.must_be("of the num_blocks, block_size and num_kv_heads of key_cache, " + describe(key_cache));
    vc.dtype(key_cache.scalar_type());

    const Argument k{op, names.key, key}, v{op, names.value, value};
    w.source_dtype = key.scalar_type();
    if (w.source_dtype != ScalarType::Float && w.source_dtype != ScalarType::Half &&
        w.source_dtype != ScalarType::BFloat16)
        k.must_have_dtype("torch.float32, torch.float16 or torch.bfloat16");
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
            kc.must_have_dtype(std::string(dtype_name(w.source_dtype)) + " (that of " + names.key +
                               ") for kv_cache_dtype auto");
    } else {
        const ScalarType native =
            w.format == Format::kE4M3 ? ScalarType::Float8_e4m3fn : ScalarType::Float8_e5m2;
        if (key_cache.scalar_type() != ScalarType::Byte && key_cache.scalar_type() != native)
            kc.must_have_dtype(std::string("torch.uint8 or ") + dtype_name(native) + " for kv_cache_dtype " +
                               kv_cache_dtype);
        w.k_scale = scale_view(ks, w.num_tokens, w.key_cache.num_heads);
        w.v_scale = scale_view(vs, w.num_tokens, w.key_cache.num_heads);
    }
    for (const Argument& source : {k, v})
        for (const Argument& cache : {kc, vc})
            must_not_overlap(op, source.name, source.tensor, cache.name, cache.tensor);
    must_not_overlap(op, "key_cache", key_cache, "value_cache", value_cache);
    return w;
}

inline void check_log(const Argument& a, const Tensor& cache, const CacheView& view) {
    const Tensor& t = a.tensor;
    if (t.dim() != 3 || t.size(1) != view.num_heads || t.size(2) != view.width) {
        std::ostringstream text;
        text << "[num_log_rows, " << view.num_heads << ", " << view.width << "]";
        a.must_be(text.str());
    }
    a.dtype(cache.scalar_type());
    a.same_device(cache);
}

inline void check_write_log(WriteArguments& w, const Tensor& key, const Tensor& value,
                            const Tensor& key_cache, const Tensor& value_cache, const Tensor& log_rows,
                            const Tensor& key_log, const Tensor& value_log,
                            const std::optional<Tensor>& window_id = std::nullopt,
                            const std::optional<Tensor>& row_windows = std::nullopt) {
    const Argument rows{w.op, "log_rows", log_rows}, kl{w.op, "key_log", key_log},
        vl{w.op, "value_log", value_log};
    rows.vector(ScalarType::Int, w.num_tokens, "[num_tokens]");
    rows.same_device(key);
    check_log(kl, key_cache, w.key_cache);
    check_log(vl, value_cache, w.value_cache);
    if (value_log.size(0) != key_log.size(0)) vl.must_be("of as many rows as key_log, " + describe(key_log));
    for (const Argument& log : {kl, vl}) {
        must_not_overlap(w.op, log.name, log.tensor, "key", key);
        must_not_overlap(w.op, log.name, log.tensor, "value", value);
        must_not_overlap(w.op, log.name, log.tensor, "key_cache", key_cache);
        must_not_overlap(w.op, log.name, log.tensor, "value_cache", value_cache);
    }
    must_not_overlap(w.op, "key_log", key_log, "value_log", value_log);
    w.log_rows = static_cast<const int32_t*>(log_rows.data_ptr());
    w.num_log_rows = key_log.size(0);
    w.key_log = rows_view(key_log);
    w.value_log = rows_view(value_log);
    w.row_windows = check_row_windows(w.op, window_id, row_windows, key, w.num_log_rows);
}

// ---------------------------------------------------------------- log_slots, restore_slots

inline PageOffsets check_page_offsets(const char* op, const std::optional<Tensor>& page_offsets,
                                      const Tensor& cache) {
    if (!page_offsets.has_value()) return {nullptr, 0};
    const Argument a{op, "page_offsets", *page_offsets};
    a.dtype(ScalarType::Int);
    if (page_offsets->dim() != 2 || page_offsets->size(0) != cache.size(1) ||
        page_offsets->size(1) != cache.size(3))
        a.must_be("[block_size, width] of the cache, " + describe(cache));
    a.contiguous();
    a.same_device(cache);
    int64_t storage_bytes = 0;
    NWOR_TORCH_CHECK(aoti_torch_get_storage_size(cache.get(), &storage_bytes));
    return {static_cast<const int32_t*>(page_offsets->data_ptr()),
            storage_bytes / static_cast<int64_t>(cache.element_size()) - cache.storage_offset()};
}

struct LogArguments {
    const char* op;
    int64_t num_tokens;
    const int64_t* slot_mapping;
    const int32_t* log_rows;
    int64_t num_log_rows;
    CacheView cache;
    RowsView log;
    PageOffsets page_offsets;
    RowWindows row_windows;
};

inline LogArguments check_log_slots(const Tensor& cache, const Tensor& slot_mapping, const Tensor& log_rows,
                                    const Tensor& log, const std::optional<Tensor>& page_offsets,
                                    const std::optional<Tensor>& window_id = std::nullopt,
                                    const std::optional<Tensor>& row_windows = std::nullopt) {
    const char* op = "log_slots";
    LogArguments l{};
    l.op = op;
    const Argument c{op, "cache", cache}, slots{op, "slot_mapping", slot_mapping},
        rows{op, "log_rows", log_rows};
    l.cache = cache_view(c);
    check_element_size(c);
    slots.vector(ScalarType::Long, 0, "[num_tokens]");
    slots.same_device(cache);
    l.num_tokens = slot_mapping.size(0);
    rows.vector(ScalarType::Int, l.num_tokens, "[num_tokens]");
    rows.same_device(cache);
    check_log({op, "log", log}, cache, l.cache);
    must_not_overlap(op, "log", log, "cache", cache);
    l.slot_mapping = static_cast<const int64_t*>(slot_mapping.data_ptr());
    l.log_rows = static_cast<const int32_t*>(log_rows.data_ptr());
    l.num_log_rows = log.size(0);
    l.log = rows_view(log);
    l.page_offsets = check_page_offsets(op, page_offsets, cache);
    l.row_windows = check_row_windows(op, window_id, row_windows, cache, l.num_log_rows);
    return l;
}

// Which device, dtype, shape and strides a plane has. An engine passes all its layers in every step, so that
// each costs a few calls of torch's, not one for every number.
struct Geometry {
    ScalarType dtype;
    bool on_cpu, on_cuda;
    int32_t device_index;
    std::array<int64_t, 4> sizes{}, strides{};

    // `t` has four dimensions.
    explicit Geometry(const Tensor& t)
        : dtype(t.scalar_type()),
          on_cpu(t.is_cpu()),
          on_cuda(t.is_cuda()),
          device_index(t.get_device_index()) {
        const auto all_sizes = t.sizes(), all_strides = t.strides();
        std::copy(all_sizes.begin(), all_sizes.end(), sizes.begin());
        std::copy(all_strides.begin(), all_strides.end(), strides.begin());
    }
    bool operator==(const Geometry& other) const {
        return dtype == other.dtype && on_cpu == other.on_cpu && on_cuda == other.on_cuda &&
               device_index == other.device_index && sizes == other.sizes && strides == other.strides;
    }
};

// Planes of one geometry.
struct Planes {
    CacheView view;           // of the first; the others differ in `data` alone
    int64_t bytes;            // from the first element of a plane to its last
    std::vector<char*> data;  // where each begins

    int64_t count() const { return static_cast<int64_t>(data.size()); }
    CacheView plane(int64_t i) const {
        CacheView plane = view;
        plane.data = data[static_cast<size_t>(i)];
        return plane;
    }
};

// A row of a plane table: where a plane begins, and how many bytes there are from there to the end of its
// storage. An engine that passes all its layers in every step spends more on looking at them than on the rest
// of the call; with a table, `caches` is the first one alone.
struct PlaneRow {
    int64_t address, room;
};

inline const PlaneRow* rows_of(const Tensor& plane_table) {
    return static_cast<const PlaneRow*>(plane_table.data_ptr());
}

inline void check_plane_table(const char* op, const std::vector<Tensor>& caches, const Tensor& plane_table,
                              Planes* planes) {
    const Argument table{op, "plane_table", plane_table};
    if (caches.size() != 1)
        fail(op, "caches must hold the first plane alone where there is a plane_table, got ", caches.size());
    table.dtype(ScalarType::Long);
    if (plane_table.dim() != 2 || plane_table.size(0) < 1 || plane_table.size(1) != 2)
        table.must_be("[>= 1 planes, 2], as nwor_ops.plane_table makes it");
    table.contiguous();
    if (!plane_table.is_cpu()) fail(op, "plane_table must be on device cpu, got ", device_name(plane_table));
    const PlaneRow* rows = rows_of(plane_table);
    if (reinterpret_cast<char*>(rows[0].address) != planes->view.data)
        fail(op, "plane_table must be of planes that begin with caches[0] and have not moved since");
    planes->data.reserve(static_cast<size_t>(plane_table.size(0)));
    for (int64_t i = 0; i < plane_table.size(0); ++i) {
        if (rows[i].room < planes->bytes)
            fail(op, "plane_table must be of planes as large as caches[0], ", planes->bytes, " bytes, got ",
                 rows[i].room, " for plane ", i);
        planes->data.push_back(reinterpret_cast<char*>(rows[i].address));
    }
}

inline void check_geometries(const char* op, const std::vector<Tensor>& caches, Planes* planes) {
    const Tensor& first = caches[0];
    const Geometry expected(first);
    planes->data.reserve(caches.size());
    for (size_t i = 0; i < caches.size(); ++i) {
        planes->data.push_back(static_cast<char*>(caches[i].data_ptr()));
        if (i == 0 || (caches[i].dim() == 4 && Geometry(caches[i]) == expected)) continue;
        const std::string name = "caches[" + std::to_string(i) + "]";
        const Argument a{op, name.c_str(), caches[i]};
        a.dtype(first.scalar_type());
        a.same_device(first);
        a.must_be("of the shape and strides of caches[0], " + describe(first));
    }
}

inline Planes check_planes(const char* op, const std::vector<Tensor>& caches,
                           const std::optional<Tensor>& plane_table = std::nullopt) {
    if (caches.empty()) fail(op, "caches must hold at least one plane, got none");
    const Argument first{op, "caches[0]", caches[0]};
    const CacheView view = cache_view(first);
    check_element_size(first);
    const Range range = range_of(caches[0]);
    Planes planes{view, range.end - range.begin, {}};
    if (plane_table.has_value())
        check_plane_table(op, caches, *plane_table, &planes);
    else
        check_geometries(op, caches, &planes);
    return planes;
}

// One table serves all planes, so the one with the least storage after its start decides.
inline PageOffsets check_page_offsets(const char* op, const std::optional<Tensor>& page_offsets,
                                      const std::vector<Tensor>& caches,
                                      const std::optional<Tensor>& plane_table = std::nullopt) {
    PageOffsets offsets = check_page_offsets(op, page_offsets, caches[0]);
    if (page_offsets.has_value() && plane_table.has_value()) {
        const int64_t element_size = static_cast<int64_t>(caches[0].element_size());
        for (int64_t i = 1; i < plane_table->size(0); ++i)
            offsets.limit = std::min(offsets.limit, rows_of(*plane_table)[i].room / element_size);
    }
    for (size_t i = 1; page_offsets.has_value() && i < caches.size(); ++i)
        offsets.limit = std::min(offsets.limit, check_page_offsets(op, page_offsets, caches[i]).limit);
    return offsets;
}

struct RestoreArguments {
    const char* op;
    int64_t num_rows;  // that are looked at; the log may have more
    int64_t windows_layer_stride;
    const int64_t* row_slots;
    const bool* row_rejected;
    Planes planes;  // of the layers
    RowsView log;   // layer 0
    int64_t log_layer_stride;
    PageOffsets page_offsets;
    RowWindows row_windows;
};

inline RestoreArguments check_restore(const char* op, const std::vector<Tensor>& caches, const Tensor& log,
                                      const Tensor& row_slots, const Tensor& row_rejected,
                                      const std::optional<Tensor>& page_offsets,
                                      const std::optional<Tensor>& window_id,
                                      const std::optional<Tensor>& row_windows,
                                      const std::optional<int64_t>& num_rows,
                                      const std::optional<Tensor>& plane_table) {
    RestoreArguments r{};
    r.op = op;
    r.planes = check_planes(op, caches, plane_table);
    const CacheView& cache = r.planes.view;
    const Tensor& first = caches[0];
    const Argument l{op, "log", log};
    const int64_t num_layers = r.planes.count();
    if (log.dim() != 4 || log.size(0) != num_layers || log.size(2) != cache.num_heads ||
        log.size(3) != cache.width) {
        std::ostringstream text;
        text << "[" << num_layers << ", num_log_rows, " << cache.num_heads << ", " << cache.width << "]";
        l.must_be(text.str());
    }
    l.dtype(first.scalar_type());
    l.same_device(first);
    const int64_t log_rows = log.size(1);
    const Argument slots{op, "row_slots", row_slots}, rejected{op, "row_rejected", row_rejected};
    slots.vector(ScalarType::Long, 0, "[num_log_rows]");
    rejected.vector(ScalarType::Bool, 0, "[num_log_rows]");
    if (row_slots.size(0) != log_rows) slots.must_be("one slot for each row of log, " + describe(log));
    if (row_rejected.size(0) != log_rows) rejected.must_be("one flag for each row of log, " + describe(log));
    r.num_rows = num_rows.value_or(log_rows);
    if (r.num_rows < 0 || r.num_rows > log_rows)
        fail(op, "num_rows must be from 0 to the ", log_rows, " rows of log, got ", r.num_rows);
    r.windows_layer_stride = log_rows;
    slots.same_device(first);
    rejected.same_device(first);
    const Placed placed_log(l);
    for (const char* begin : r.planes.data)
        must_not_overlap(op, placed_log, Placed("caches", first, {begin, begin + r.planes.bytes}));
    r.row_slots = static_cast<const int64_t*>(row_slots.data_ptr());
    r.row_rejected = static_cast<const bool*>(row_rejected.data_ptr());
    r.log = rows_view(log, 1);
    r.log_layer_stride = log.stride(0);
    r.page_offsets = check_page_offsets(op, page_offsets, caches, plane_table);
    r.row_windows = check_row_windows(op, window_id, row_windows, first, log_rows, num_layers);
    return r;
}

// ---------------------------------------------------------------- family accept

// How an engine counts drafts in `cu_num_draft_tokens`: what else it counts for each request, and whether a
// zero comes before the first request's count.
struct Counting {
    int64_t num_bonus_tokens = 0;
    bool leading_zero = false;
};

// How many drafts the requests have, where `counts` holds the drafts up to and including each request, and
// `num_bonus_tokens` more for each request.
struct CumulativeDrafts {
    const int32_t* counts;
    int64_t num_bonus_tokens;

    // Drafts of requests [0, request], that is the log row after the request's last.
    NWOR_HOST_DEVICE int64_t until(int64_t request) const {
        return counts[request] - num_bonus_tokens * (request + 1);
    }
    // Drafts of requests [0, request), that is the first log row of `request`.
    NWOR_HOST_DEVICE int64_t before(int64_t request) const { return request == 0 ? 0 : until(request - 1); }
};

// Order of the `counters` tensor; the names are COUNTERS in ops.py.
enum Counter { kWindows, kDrafted, kAccepted, kRejected, kOverflowed, kNumCounters };

struct PlanArguments {
    const char* op;
    int64_t num_requests, num_tokens, token_offset, num_rows, num_groups, log_rows_length;
    bool whole_batch;  // not a micro-batch: every draft must be among the tokens
    const int32_t* query_start_loc;
    CumulativeDrafts drafts_of;
    std::vector<const int64_t*> slot_mappings;
    int32_t* log_rows;
    int64_t* row_slots;
    int32_t* row_requests;
    int32_t* row_positions;
    int64_t* counters;
};

inline void check_counters(const char* op, const Tensor& counters) {
    Argument{op, "counters", counters}.vector(ScalarType::Long, kNumCounters, "[len(COUNTERS)]");
}

inline CumulativeDrafts check_cumulative_drafts(const Argument& cu, const Counting& counting,
                                                int64_t* num_requests) {
    check_not_negative(cu.op, "num_bonus_tokens", counting.num_bonus_tokens);
    const int64_t zeros = counting.leading_zero ? 1 : 0;
    cu.vector(ScalarType::Int, zeros, zeros ? "[num_requests + 1]" : "[num_requests]");
    *num_requests = cu.tensor.size(0) - zeros;
    const int32_t* counts = static_cast<const int32_t*>(cu.tensor.data_ptr());
    if (zeros && cu.tensor.is_cpu() && counts[0] != 0)
        fail(cu.op, cu.name, " must begin with 0 where it has a leading_zero, got ", counts[0]);
    return {counts + zeros, counting.num_bonus_tokens};
}

inline PlanArguments check_plan(const Tensor& query_start_loc, const Tensor& cu_num_draft_tokens,
                                const std::vector<Tensor>& slot_mappings, const Tensor& log_rows,
                                const Tensor& row_slots, const Tensor& row_requests,
                                const Tensor& row_positions, const Tensor& counters,
                                const std::optional<int64_t>& token_offset, const Counting& counting) {
    const char* op = "plan_window";
    if (slot_mappings.empty()) fail(op, "slot_mappings must hold at least one slot mapping, got none");
    PlanArguments p{};
    p.op = op;
    p.token_offset = token_offset.value_or(0);
    check_not_negative(op, "token_offset", p.token_offset);
    p.whole_batch = !token_offset.has_value();
    const Argument qsl{op, "query_start_loc", query_start_loc},
        cu{op, "cu_num_draft_tokens", cu_num_draft_tokens}, lr{op, "log_rows", log_rows},
        rs{op, "row_slots", row_slots}, rr{op, "row_requests", row_requests},
        rp{op, "row_positions", row_positions}, ct{op, "counters", counters};
    p.drafts_of = check_cumulative_drafts(cu, counting, &p.num_requests);
    qsl.vector(ScalarType::Int, p.num_requests + 1, "[num_requests + 1]");
    p.num_groups = static_cast<int64_t>(slot_mappings.size());
    for (size_t g = 0; g < slot_mappings.size(); ++g) {
        const std::string name = "slot_mappings[" + std::to_string(g) + "]";
        const Argument s{op, name.c_str(), slot_mappings[g]};
        s.vector(ScalarType::Long, 0, "[num_tokens]");
        if (slot_mappings[g].size(0) != slot_mappings[0].size(0))
            s.must_be("of the length of slot_mappings[0], " + describe(slot_mappings[0]));
        s.same_device(query_start_loc);
        must_not_overlap(op, s.name, s.tensor, "row_slots", row_slots);
        must_not_overlap(op, s.name, s.tensor, "counters", counters);
        p.slot_mappings.push_back(static_cast<const int64_t*>(slot_mappings[g].data_ptr()));
    }
    p.num_tokens = slot_mappings[0].size(0);
    lr.vector(ScalarType::Int, p.num_tokens, "[num_tokens]");
    p.log_rows_length = log_rows.size(0);
    rs.dtype(ScalarType::Long);
    if (row_slots.dim() != 2 || row_slots.size(0) != p.num_groups)
        rs.must_be("[" + std::to_string(p.num_groups) + " groups, num_log_rows]");
    rs.contiguous();
    p.num_rows = row_slots.size(1);
    rr.vector(ScalarType::Int, p.num_rows, "[num_log_rows]");
    rp.vector(ScalarType::Int, p.num_rows, "[num_log_rows]");
    if (row_requests.size(0) != p.num_rows)
        rr.must_be("of as many rows as row_slots, " + describe(row_slots));
    if (row_positions.size(0) != p.num_rows)
        rp.must_be("of as many rows as row_slots, " + describe(row_slots));
    check_counters(op, counters);
    for (const Argument& a : {cu, lr, rs, rr, rp, ct}) a.same_device(query_start_loc);
    const Placed inputs[] = {Placed(qsl), Placed(cu)};
    const Placed outputs[] = {Placed(lr), Placed(rs), Placed(rr), Placed(rp), Placed(ct)};
    for (const Placed& out : outputs)
        for (const Placed& in : inputs) must_not_overlap(op, out, in);
    for (int i = 0; i < 5; ++i)
        for (int j = 0; j < i; ++j) must_not_overlap(op, outputs[i], outputs[j]);
    p.query_start_loc = static_cast<const int32_t*>(query_start_loc.data_ptr());
    p.log_rows = static_cast<int32_t*>(log_rows.data_ptr());
    p.row_slots = static_cast<int64_t*>(row_slots.data_ptr());
    p.row_requests = static_cast<int32_t*>(row_requests.data_ptr());
    p.row_positions = static_cast<int32_t*>(row_positions.data_ptr());
    p.counters = static_cast<int64_t*>(counters.data_ptr());
    return p;
}

// Token ids of either width.
struct IdsView {
    const void* data;
    bool is_int64;
    int64_t length;         // drafts
    int64_t rows, columns;  // sampled tokens
    int64_t row_stride, column_stride;
};

struct AcceptArguments {
    const char* op;
    int64_t num_requests;
    CumulativeDrafts drafts_of;
    // Either the tokens (num_rejected is null) or the counts.
    IdsView drafts, sampled;
    const int32_t* num_rejected;
    // Outputs. `marks` is true for a rejected draft if `marks_rejected`, else for an accepted one.
    bool* marks;
    bool marks_rejected;
    int64_t num_marks;
    int32_t* num_accepted;
    int64_t num_accepted_length;
    int64_t* counters;  // null in the forms that return fresh tensors
};

inline void check_ids(const Argument& a) {
    if (a.tensor.scalar_type() != ScalarType::Int && a.tensor.scalar_type() != ScalarType::Long)
        a.must_have_dtype("torch.int32 or torch.int64");
}

// How many of a request's drafts stay, where the counts say how many do not.
NWOR_HOST_DEVICE inline int64_t num_accepted_of(int64_t drafts, int64_t rejected) {
    if (rejected <= 0) return drafts;
    return rejected < drafts ? drafts - rejected : 0;
}

inline AcceptArguments check_accept(const char* op, const Tensor& cu_num_draft_tokens,
                                    const Counting& counting = {}) {
    AcceptArguments a{};
    a.op = op;
    const Argument cu{op, "cu_num_draft_tokens", cu_num_draft_tokens};
    a.drafts_of = check_cumulative_drafts(cu, counting, &a.num_requests);
    return a;
}

inline void check_tokens(AcceptArguments& a, const Tensor& draft_token_ids, const Tensor& sampled_token_ids,
                         const Tensor& cu_num_draft_tokens) {
    const Argument drafts{a.op, "draft_token_ids", draft_token_ids},
        sampled{a.op, "sampled_token_ids", sampled_token_ids};
    check_ids(drafts);
    if (draft_token_ids.dim() != 1) drafts.must_be("[num_draft_tokens]");
    drafts.contiguous();
    check_ids(sampled);
    if (sampled_token_ids.dim() != 2 || sampled_token_ids.size(0) < a.num_requests)
        sampled.must_be("[>= " + std::to_string(a.num_requests) + " requests, most drafts (+ 1)]");
    drafts.same_device(cu_num_draft_tokens);
    sampled.same_device(cu_num_draft_tokens);
    a.drafts = {draft_token_ids.data_ptr(),
                draft_token_ids.scalar_type() == ScalarType::Long,
                draft_token_ids.size(0),
                0,
                0,
                0,
                0};
    a.sampled = {sampled_token_ids.data_ptr(),
                 sampled_token_ids.scalar_type() == ScalarType::Long,
                 0,
                 sampled_token_ids.size(0),
                 sampled_token_ids.size(1),
                 sampled_token_ids.stride(0),
                 sampled_token_ids.stride(1)};
}

inline void check_num_rejected(AcceptArguments& a, const Tensor& num_rejected,
                               const Tensor& cu_num_draft_tokens) {
    const Argument r{a.op, "num_rejected", num_rejected};
    r.vector(ScalarType::Int, a.num_requests, "[num_requests]");
    r.same_device(cu_num_draft_tokens);
    a.num_rejected = static_cast<const int32_t*>(num_rejected.data_ptr());
}

// `inputs` are what the outputs may not overlap.
inline void check_reject_outputs(AcceptArguments& a, const Tensor& row_rejected, const Tensor& num_accepted,
                                 const Tensor& counters, const std::vector<Placed>& inputs) {
    const Argument rows{a.op, "row_rejected", row_rejected}, accepted{a.op, "num_accepted", num_accepted},
        counts{a.op, "counters", counters};
    rows.vector(ScalarType::Bool, 0, "[num_log_rows]");
    accepted.vector(ScalarType::Int, a.num_requests, "[num_requests]");
    check_counters(a.op, counters);
    for (const Argument& out : {rows, accepted, counts}) out.same_device(inputs[0].tensor);
    const Placed outputs[] = {Placed(rows), Placed(accepted), Placed(counts)};
    for (const Placed& out : outputs)
        for (const Placed& in : inputs) must_not_overlap(a.op, out, in);
    must_not_overlap(a.op, outputs[0], outputs[1]);
    must_not_overlap(a.op, outputs[0], outputs[2]);
    must_not_overlap(a.op, outputs[1], outputs[2]);
    a.marks = static_cast<bool*>(row_rejected.data_ptr());
    a.marks_rejected = true;
    a.num_marks = row_rejected.size(0);
    a.num_accepted = static_cast<int32_t*>(num_accepted.data_ptr());
    a.num_accepted_length = num_accepted.size(0);
    a.counters = static_cast<int64_t*>(counters.data_ptr());
}

// ---------------------------------------------------------------- one check for each op of the family

inline AcceptArguments check_acceptance_mask(const Tensor& draft_token_ids, const Tensor& sampled_token_ids,
                                             const Tensor& cu_num_draft_tokens) {
    AcceptArguments a = check_accept("acceptance_mask", cu_num_draft_tokens);
    check_tokens(a, draft_token_ids, sampled_token_ids, cu_num_draft_tokens);
    return a;
}

inline AcceptArguments check_acceptance_mask_from_rejected(const Tensor& num_rejected,
                                                           const Tensor& cu_num_draft_tokens,
                                                           int64_t num_draft_tokens) {
    AcceptArguments a = check_accept("acceptance_mask_from_rejected", cu_num_draft_tokens);
    check_num_rejected(a, num_rejected, cu_num_draft_tokens);
    check_not_negative(a.op, "num_draft_tokens", num_draft_tokens);
    return a;
}

inline AcceptArguments check_reject_rows(const Tensor& draft_token_ids, const Tensor& sampled_token_ids,
                                         const Tensor& cu_num_draft_tokens, const Tensor& row_rejected,
                                         const Tensor& num_accepted, const Tensor& counters,
                                         const Counting& counting) {
    AcceptArguments a = check_accept("reject_rows", cu_num_draft_tokens, counting);
    check_tokens(a, draft_token_ids, sampled_token_ids, cu_num_draft_tokens);
    check_reject_outputs(a, row_rejected, num_accepted, counters,
                         {Placed("an input", cu_num_draft_tokens), Placed("an input", draft_token_ids),
                          Placed("an input", sampled_token_ids)});
    return a;
}

// `others` are further inputs of an op that also moves rows: blocks of one launch do both in any order.
inline AcceptArguments check_reject_counts(const char* op, const Tensor& num_rejected,
                                           const Tensor& cu_num_draft_tokens, const Tensor& row_rejected,
                                           const Tensor& num_accepted, const Tensor& counters,
                                           const Counting& counting, const std::vector<Placed>& others = {}) {
    AcceptArguments a = check_accept(op, cu_num_draft_tokens, counting);
    check_num_rejected(a, num_rejected, cu_num_draft_tokens);
    std::vector<Placed> inputs{Placed("an input", cu_num_draft_tokens), Placed("an input", num_rejected)};
    for (const Placed& other : others) inputs.push_back(other);
    check_reject_outputs(a, row_rejected, num_accepted, counters, inputs);
    return a;
}

inline AcceptArguments check_reject_rows_from_rejected(const Tensor& num_rejected,
                                                       const Tensor& cu_num_draft_tokens,
                                                       const Tensor& row_rejected, const Tensor& num_accepted,
                                                       const Tensor& counters, const Counting& counting) {
    return check_reject_counts("reject_rows_from_rejected", num_rejected, cu_num_draft_tokens, row_rejected,
                               num_accepted, counters, counting);
}

inline RestoreArguments check_restore_from_rejected(
    const std::vector<Tensor>& caches, const Tensor& log, const Tensor& row_slots, const Tensor& num_rejected,
    const Tensor& cu_num_draft_tokens, const Tensor& row_rejected, const Tensor& num_accepted,
    const Tensor& counters, const Counting& counting, const std::optional<Tensor>& page_offsets,
    const std::optional<Tensor>& window_id, const std::optional<Tensor>& row_windows,
    const std::optional<int64_t>& num_rows, const std::optional<Tensor>& plane_table,
    AcceptArguments* accept) {
    const char* op = "restore_slots_from_rejected";
    const RestoreArguments r = check_restore(op, caches, log, row_slots, row_rejected, page_offsets,
                                             window_id, row_windows, num_rows, plane_table);
    Argument{op, "cu_num_draft_tokens", cu_num_draft_tokens}.same_device(caches[0]);
    std::vector<Placed> inputs{Placed("row_slots", row_slots)};
    if (row_windows.has_value()) inputs.emplace_back("row_windows", *row_windows);
    *accept = check_reject_counts(op, num_rejected, cu_num_draft_tokens, row_rejected, num_accepted, counters,
                                  counting, inputs);
    return r;
}

// Fresh results instead of a window's buffers.
inline void set_mask_outputs(AcceptArguments& a, const Tensor& accepted, const Tensor& num_accepted) {
    a.marks = static_cast<bool*>(accepted.data_ptr());
    a.marks_rejected = false;
    a.num_marks = accepted.size(0);
    a.num_accepted = static_cast<int32_t*>(num_accepted.data_ptr());
    a.num_accepted_length = num_accepted.size(0);
}

}  // namespace nwor
