// The planes of a paged cache that one call takes: all layers of one geometry.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "views.h"

namespace nwor {

inline PageOffsets check_page_offsets(const char* op, const std::optional<Tensor>& page_offsets,
                                      const Tensor& cache) {
    if (!page_offsets.has_value()) return {nullptr, 0};
    const Argument a{op, "page_offsets", *page_offsets};
    a.dtype(ScalarType::Int);
    if (page_offsets->dim() != 2 || page_offsets->size(0) != cache.size(1) ||
        page_offsets->size(1) != cache.size(3))
        a.must_be("[block_size, width] of the cache, ", describe(cache));
    a.contiguous();
    a.same_device(cache);
    int64_t storage_bytes = 0;
    NWOR_TORCH_CHECK(aoti_torch_get_storage_size(cache.get(), &storage_bytes));
    return {static_cast<const int32_t*>(page_offsets->data_ptr()),
            storage_bytes / static_cast<int64_t>(cache.element_size()) - cache.storage_offset()};
}

// Device, dtype, shape and strides of a plane. An engine passes all its layers in every step. Reading them
// once per plane needs only a few calls to torch.
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
    CacheView view;           // view of the first plane; the others differ only in `data`
    int64_t bytes;            // from the first to the last element of a plane
    std::vector<char*> data;  // start of each plane

    int64_t count() const { return static_cast<int64_t>(data.size()); }
    CacheView plane(int64_t i) const {
        CacheView plane = view;
        plane.data = data[static_cast<size_t>(i)];
        return plane;
    }
};

// A row of a plane table: the address of a plane, and the number of bytes from there to the end of its
// storage. For an engine that passes all its layers in every step, checking them costs more than the rest of
// the call. With a table, `caches` holds only the first plane.
struct PlaneRow {
    int64_t address, room;
};

inline const PlaneRow* rows_of_table(const Tensor& plane_table) {
    return static_cast<const PlaneRow*>(plane_table.data_ptr());
}

inline void check_plane_table(const char* op, const std::vector<Tensor>& caches, const Tensor& plane_table,
                              Planes* planes) {
    const Argument table{op, "plane_table", plane_table};
    if (caches.size() != 1)
        fail(op, "caches must hold only the first plane if plane_table is given, got ", caches.size());
    table.dtype(ScalarType::Long);
    if (plane_table.dim() != 2 || plane_table.size(0) < 1 || plane_table.size(1) != 2)
        table.must_be("[>= 1 planes, 2], as nwor_ops.plane_table makes it");
    table.contiguous();
    if (!plane_table.is_cpu()) fail(op, "plane_table must be on device cpu, got ", device_name(plane_table));
    const PlaneRow* rows = rows_of_table(plane_table);
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
        a.must_be("of the shape and strides of caches[0], ", describe(first));
    }
}

// The planes that an op writes.
inline Planes check_planes(const char* op, const std::vector<Tensor>& caches,
                           const std::optional<Tensor>& plane_table = std::nullopt) {
    if (caches.empty()) fail(op, "caches must hold at least one plane, got none");
    const Argument first{op, "caches[0]", caches[0]};
    const CacheView view = cache_view(first);
    check_element_size(first);
    check_elements_apart(first);
    const Range range = range_of(caches[0]);
    Planes planes{view, range.end - range.begin, {}};
    if (plane_table.has_value())
        check_plane_table(op, caches, *plane_table, &planes);
    else
        check_geometries(op, caches, &planes);
    return planes;
}

template <class F>
void each_plane_range(const Planes& planes, const F& f) {
    for (const char* begin : planes.data) f(Range{begin, begin + planes.bytes});
}

// Checks that no plane shares memory with another argument. `first` is the first plane.
template <class Others = std::initializer_list<Argument>>
void check_outside_planes(const char* op, const Planes& planes, const Tensor& first, const Others& others) {
    const auto [low, high] = std::minmax_element(planes.data.begin(), planes.data.end());
    for (const Argument& a : others) {
        const Placed other(a);
        if (other.range.end <= *low || other.range.begin >= *high + planes.bytes) continue;
        for (const char* begin : planes.data)
            must_not_overlap(op, other, Placed("caches", first, {begin, begin + planes.bytes}));
    }
}

// One offset table serves all planes, so the plane with the least storage after its start sets the limit.
inline PageOffsets check_page_offsets(const char* op, const std::optional<Tensor>& page_offsets,
                                      const std::vector<Tensor>& caches,
                                      const std::optional<Tensor>& plane_table = std::nullopt) {
    PageOffsets offsets = check_page_offsets(op, page_offsets, caches[0]);
    if (page_offsets.has_value() && plane_table.has_value()) {
        const int64_t element_size = static_cast<int64_t>(caches[0].element_size());
        for (int64_t i = 1; i < plane_table->size(0); ++i)
            offsets.limit = std::min(offsets.limit, rows_of_table(*plane_table)[i].room / element_size);
    }
    for (size_t i = 1; page_offsets.has_value() && i < caches.size(); ++i)
        offsets.limit = std::min(offsets.limit, check_page_offsets(op, page_offsets, caches[i]).limit);
    return offsets;
}

}  // namespace nwor
