// The C++17 layer of the C library: owners that free, errors as exceptions, and views of lists. Header only; see docs/c.md.
#ifndef VMMFD_HPP
#define VMMFD_HPP

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>
#if __has_include(<span>) && __cplusplus >= 202002L
#include <span>
#endif

#include "vmmfd.h"

namespace vmmfd {

#if defined(__cpp_lib_span)
using std::span;
#else
/// The part of C++20's std::span that this header uses.
template <class T> class span {
public:
    span() = default;
    span(T *first, std::size_t count) : first_(first), count_(count) {}
    template <class C, class = decltype(std::declval<C &>().data())>
    span(C &&list) : first_(list.data()), count_(list.size()) {}
    T *data() const { return first_; }
    std::size_t size() const { return count_; }
    std::size_t size_bytes() const { return count_ * sizeof(T); }
    bool empty() const { return count_ == 0; }
    T *begin() const { return first_; }
    T *end() const { return first_ + count_; }
    T &operator[](std::size_t at) const { return first_[at]; }

private:
    T *first_ = nullptr;
    std::size_t count_ = 0;
};
#endif

/// A failed call. what() is the sentence, with the hint if there is one.
class error : public std::runtime_error {
public:
    explicit error(vmmfd_error_t *failed)
        : std::runtime_error(text(failed)), code_(failed->code), driver_code_(failed->driver_code) {
        vmmfd_error_free(failed);
    }
    vmmfd_code_t code() const noexcept { return code_; }
    std::uint32_t driver_code() const noexcept { return driver_code_; }

private:
    static std::string text(const vmmfd_error_t *failed) {
        std::string all = failed->message;
        return failed->hint ? all + ": " + failed->hint : all;
    }
    vmmfd_code_t code_;
    std::uint32_t driver_code_;
};

inline void check(vmmfd_error_t *failed) {
    if (failed)
        throw error(failed);
}

/// Owns a handle. Moves, does not copy.
template <class T, void (*Free)(T *)> class owner {
public:
    owner() = default;
    explicit owner(T *handle) : handle_(handle) {}
    owner(owner &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    owner &operator=(owner &&other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    owner(const owner &) = delete;
    owner &operator=(const owner &) = delete;
    ~owner() { Free(handle_); }
    T *get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

protected:
    /// For calls that return a handle.
    T **place() {
        Free(std::exchange(handle_, nullptr));
        return &handle_;
    }
    T *handle_ = nullptr;
};

inline const char *optional(const std::string &text) { return text.empty() ? nullptr : text.c_str(); }

class device : public owner<vmmfd_device_t, vmmfd_device_free> {
public:
    /// Opens a device; empty texts are the defaults.
    explicit device(const std::string &backend = "", const std::string &selector = "") {
        check(vmmfd_device_open(optional(backend), optional(selector), place()));
    }
    static std::uint32_t count(const std::string &backend = "") {
        std::uint32_t count;
        check(vmmfd_device_count(optional(backend), &count));
        return count;
    }
    vmmfd_device_info_t info() const {
        vmmfd_device_info_t info;
        check(vmmfd_device_info(get(), &info));
        return info;
    }
};

class memory : public owner<vmmfd_memory_t, vmmfd_memory_free> {
public:
    using owner::owner;
    memory(const device &on, std::uint64_t size, const vmmfd_memory_options_t &options = {}) {
        check(vmmfd_memory_create(on.get(), size, &options, place()));
    }
    /// Imports descriptors, which the caller keeps.
    memory(const device &on, span<const int> fds, span<const std::uint64_t> sizes, bool writable = false) {
        if (fds.size() != sizes.size())
            throw std::invalid_argument("each descriptor needs its size");
        check(vmmfd_memory_import(on.get(), fds.data(), sizes.data(), fds.size(), writable, place()));
    }
    vmmfd_memory_info_t info() const {
        vmmfd_memory_info_t info;
        check(vmmfd_memory_info(get(), &info));
        return info;
    }
    template <class T> void copy_in(std::uint64_t offset, span<const T> from) const {
        check(vmmfd_memory_copy_in(get(), offset, from.data(), from.size() * sizeof(T)));
    }
    template <class T> void copy_out(std::uint64_t offset, span<T> to) const {
        check(vmmfd_memory_copy_out(get(), offset, to.data(), to.size() * sizeof(T)));
    }
    void synchronize() const { check(vmmfd_memory_synchronize(get())); }
    /// Returns a descriptor, which the caller closes, and its size.
    std::pair<int, std::uint64_t> export_segment(std::uint64_t segment = 0) const {
        std::pair<int, std::uint64_t> result;
        check(vmmfd_memory_export(get(), segment, &result.first, &result.second));
        return result;
    }
};

class array : public owner<vmmfd_array_t, vmmfd_array_free> {
public:
    using owner::owner;
    array(const memory &of, const std::string &dtype, const std::vector<std::uint64_t> &shape,
          std::uint64_t offset = 0) {
        vmmfd_layout_t layout = {dtype.c_str(), shape.size(), shape.data(), nullptr, offset};
        check(vmmfd_array_create(of.get(), &layout, place()));
    }
    /// Copies a DLPack tensor, which this takes.
    array(const device &on, DLManagedTensorVersioned *tensor) { check(vmmfd_array_import(on.get(), tensor, place())); }
    /// Takes the array that another process serves.
    static array take(const std::string &path = "", const device *on = nullptr,
                      const vmmfd_handoff_options_t &options = {}) {
        array taken;
        check(vmmfd_handoff_take(on ? on->get() : nullptr, optional(path), &options, taken.place()));
        return taken;
    }
    /// Serves the array, and returns the number of consumers.
    std::uint64_t serve(const std::string &path = "", const vmmfd_handoff_options_t &options = {}) const {
        std::uint64_t served;
        check(vmmfd_handoff_serve(optional(path), get(), &options, &served));
        return served;
    }
    vmmfd_layout_t info() const {
        vmmfd_layout_t layout;
        check(vmmfd_array_info(get(), &layout));
        return layout;
    }
    span<const std::uint64_t> shape() const {
        auto layout = info();
        return {layout.shape, layout.dimensions};
    }
    vmmfd::memory memory() const {
        vmmfd_memory_t *of = nullptr;
        check(vmmfd_array_memory(get(), &of));
        return vmmfd::memory(of);
    }
    /// Returns a DLPack tensor, whose deleter frees it.
    DLManagedTensorVersioned *to_dlpack() const {
        DLManagedTensorVersioned *tensor = nullptr;
        check(vmmfd_array_export(get(), &tensor));
        return tensor;
    }
};

class prepared : public owner<vmmfd_prepared_t, vmmfd_prepared_free> {
public:
    using owner::owner;
};

/// Facts about a lease.
class lease_info : public owner<vmmfd_lease_info_t, vmmfd_lease_info_free> {
public:
    using owner::owner;
    const vmmfd_lease_info_t *operator->() const { return get(); }
    span<const vmmfd_part_t *const> parts() const { return {get()->parts, get()->part_count}; }
};

class lease : public owner<vmmfd_lease_t, vmmfd_lease_free> {
public:
    using owner::owner;
    lease_info info() const {
        vmmfd_lease_info_t *info = nullptr;
        check(vmmfd_lease_info(get(), &info));
        return lease_info(info);
    }
    /// An empty part is the only part that has the array.
    vmmfd::array array(const std::string &name, const std::string &part = "") const {
        vmmfd_array_t *found = nullptr;
        check(vmmfd_lease_array(get(), optional(part), name.c_str(), &found));
        return vmmfd::array(found);
    }
    vmmfd::prepared prepare(const vmmfd_get_options_t &options = {}) const {
        vmmfd_prepared_t *next = nullptr;
        check(vmmfd_lease_prepare(get(), &options, &next));
        return vmmfd::prepared(next);
    }
    /// Afterwards `next` holds the old version.
    void switch_to(const vmmfd::prepared &next) const { check(vmmfd_lease_switch(get(), next.get())); }
    void park(bool keep = false) const { check(vmmfd_lease_park(get(), keep)); }
    void unpark(const vmmfd_get_options_t &options = {}) const { check(vmmfd_lease_unpark(get(), &options)); }
};

class listing : public owner<vmmfd_listing_t, vmmfd_listing_free> {
public:
    using owner::owner;
    span<const vmmfd_object_t *const> objects() const { return {get()->objects, get()->count}; }
};

class watch : public owner<vmmfd_watch_t, vmmfd_watch_free> {
public:
    using owner::owner;
    /// Readable while events wait. The watch owns it.
    int descriptor() const {
        int fd;
        check(vmmfd_watch_descriptor(get(), &fd));
        return fd;
    }
    /// The texts are valid until the next call.
    std::optional<vmmfd_event_t> next(std::uint64_t timeout_ms = 0) const {
        vmmfd_event_t event;
        bool found;
        check(vmmfd_watch_next(get(), timeout_ms, &event, &found));
        return found ? std::optional(event) : std::nullopt;
    }
};

class broker : public owner<vmmfd_broker_t, vmmfd_broker_free> {
public:
    /// Connects; an empty path is the default.
    explicit broker(const std::string &path = "", const vmmfd_broker_options_t &options = {}) {
        check(vmmfd_broker_connect(optional(path), &options, place()));
    }
    /// Publishes arrays, and returns the version.
    std::uint64_t put(const std::string &name, std::initializer_list<std::pair<const char *, const array *>> arrays,
                      const vmmfd_put_options_t &options = {}) const {
        std::vector<vmmfd_named_array_t> named;
        for (auto &[of, array] : arrays)
            named.push_back({nullptr, of, array->get()});
        std::uint64_t version;
        check(vmmfd_broker_put(get(), name.c_str(), named.data(), named.size(), &options, &version));
        return version;
    }
    vmmfd::lease get_object(const std::string &name, const vmmfd_get_options_t &options = {},
                            const device *on = nullptr) const {
        vmmfd_lease_t *found = nullptr;
        check(vmmfd_broker_get(get(), on ? on->get() : nullptr, name.c_str(), &options, &found));
        return vmmfd::lease(found);
    }
    vmmfd::listing list(const std::string &prefix = "") const {
        vmmfd_listing_t *found = nullptr;
        check(vmmfd_broker_list(get(), prefix.c_str(), &found));
        return vmmfd::listing(found);
    }
    vmmfd::listing stat(const std::string &name, std::uint64_t version = 0) const {
        vmmfd_listing_t *found = nullptr;
        check(vmmfd_broker_stat(get(), name.c_str(), version, &found));
        return vmmfd::listing(found);
    }
    void remove(const std::string &name) const { check(vmmfd_broker_delete(get(), name.c_str())); }
    vmmfd::watch watch(const std::string &prefix = "") const {
        vmmfd_watch_t *started = nullptr;
        check(vmmfd_broker_watch(get(), prefix.c_str(), &started));
        return vmmfd::watch(started);
    }
    /// Ends the wait of another thread's get.
    void stop() const { check(vmmfd_broker_stop(get())); }
};

} // namespace vmmfd

#endif
