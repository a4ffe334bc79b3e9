// The C++17 layer of the C library: owners that free, errors as exceptions, and views of lists. Header only; see docs/c.md.
#ifndef VMMFD_HPP
#define VMMFD_HPP

#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "vmmfd.h"

namespace vmmfd {

/// A view of contiguous elements, and in C++20 convertible to std::span. Not std::span itself: a program may link files of both standards.
template <class T> class span {
    template <class C> using element = std::remove_pointer_t<decltype(std::data(std::declval<C &>()))>;

public:
    span() = default;
    span(T *first, std::size_t count) : first_(first), count_(count) {}
    /// A view of a list, which must outlive it.
    template <class C, class = std::enable_if_t<std::is_convertible_v<element<C> (*)[], T (*)[]>>>
    span(C &&list) : first_(std::data(list)), count_(std::size(list)) {}
    T *data() const { return first_; }
    std::size_t size() const { return count_; }
    bool empty() const { return count_ == 0; }
    T *begin() const { return first_; }
    T *end() const { return first_ + count_; }
    T &operator[](std::size_t at) const { return first_[at]; }

private:
    T *first_ = nullptr;
    std::size_t count_ = 0;
};

/// A struct of the C library with its size, and 0 in the other fields.
template <class T> struct sized : T {
    sized() : T{} { this->struct_size = sizeof(T); }
};

using memory_options = sized<vmmfd_memory_options_t>;
using put_options = sized<vmmfd_put_options_t>;
using get_options = sized<vmmfd_get_options_t>;
struct handoff_options : sized<vmmfd_handoff_options_t> {
    handoff_options() { socket = stop = -1; }
};
struct broker_options : sized<vmmfd_broker_options_t> {
    broker_options() { stop = -1; }
};

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

/// Owns a handle or a result of the C library. Moves, does not copy. Calls whose results point into the handle are deleted for a temporary,
/// which frees it at the end of the expression.
template <class T, void (*Free)(T *)> class owner {
public:
    owner() = default;
    /// Adopts a handle.
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
    /// Returns the handle, which the caller frees.
    T *release() noexcept { return std::exchange(handle_, nullptr); }
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
    using owner::owner;
    /// Opens a device; empty texts are the defaults.
    explicit device(const std::string &backend = "", const std::string &selector = "") {
        check(vmmfd_device_open(optional(backend), optional(selector), place()));
    }
    static std::uint32_t count(const std::string &backend = "") {
        std::uint32_t count;
        check(vmmfd_device_count(optional(backend), &count));
        return count;
    }
    vmmfd_device_info_t info() const && = delete;
    vmmfd_device_info_t info() const & {
        sized<vmmfd_device_info_t> info;
        check(vmmfd_device_info(get(), &info));
        return info;
    }
};

class memory : public owner<vmmfd_memory_t, vmmfd_memory_free> {
public:
    using owner::owner;
    memory(const device &on, std::uint64_t size, const memory_options &options = {}) {
        check(vmmfd_memory_create(on.get(), size, &options, place()));
    }
    /// Imports descriptors, which the caller keeps.
    memory(const device &on, span<const int> fds, span<const std::uint64_t> sizes, bool writable = false) {
        if (fds.size() != sizes.size())
            throw std::invalid_argument("each descriptor needs its size");
        check(vmmfd_memory_import(on.get(), fds.data(), sizes.data(), fds.size(), writable, place()));
    }
    vmmfd_memory_info_t info() const && = delete;
    vmmfd_memory_info_t info() const & {
        sized<vmmfd_memory_info_t> info;
        check(vmmfd_memory_info(get(), &info));
        return info;
    }
    /// Copies a contiguous list in, such as a std::vector, a std::span or an array.
    template <class C> void copy_in(std::uint64_t offset, const C &from) const {
        static_assert(std::is_trivially_copyable_v<std::remove_reference_t<decltype(*std::data(from))>>);
        check(vmmfd_memory_copy_in(get(), offset, std::data(from), std::size(from) * sizeof(*std::data(from))));
    }
    /// Fills a contiguous list.
    template <class C> void copy_out(std::uint64_t offset, C &&to) const {
        static_assert(std::is_trivially_copyable_v<std::remove_reference_t<decltype(*std::data(to))>>);
        check(vmmfd_memory_copy_out(get(), offset, std::data(to), std::size(to) * sizeof(*std::data(to))));
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
        sized<vmmfd_layout_t> layout;
        layout.dtype = dtype.c_str();
        layout.dimensions = shape.size();
        layout.shape = shape.data();
        layout.offset = offset;
        check(vmmfd_array_create(of.get(), &layout, place()));
    }
    /// Copies a DLPack tensor, whose deleter this calls.
    static array from_dlpack(const device &on, DLManagedTensorVersioned *tensor) {
        array copy;
        check(vmmfd_array_from_dlpack(on.get(), tensor, copy.place()));
        return copy;
    }
    /// Takes the array that another process serves.
    static array take(const std::string &path = "", const device *on = nullptr,
                      const handoff_options &options = {}) {
        array taken;
        check(vmmfd_handoff_take(on ? on->get() : nullptr, optional(path), &options, taken.place()));
        return taken;
    }
    /// Serves the array, and returns the number of consumers.
    std::uint64_t serve(const std::string &path = "", const handoff_options &options = {}) const {
        std::uint64_t served;
        check(vmmfd_handoff_serve(optional(path), get(), &options, &served));
        return served;
    }
    vmmfd_layout_t info() const && = delete;
    vmmfd_layout_t info() const & {
        sized<vmmfd_layout_t> layout;
        check(vmmfd_array_info(get(), &layout));
        return layout;
    }
    span<const std::uint64_t> shape() const && = delete;
    span<const std::uint64_t> shape() const & {
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
        check(vmmfd_array_to_dlpack(get(), &tensor));
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
    span<const vmmfd_part_t *const> parts() const && = delete;
    span<const vmmfd_part_t *const> parts() const & { return {get()->parts, get()->part_count}; }
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
    vmmfd::prepared prepare(const get_options &options = {}) const {
        vmmfd_prepared_t *next = nullptr;
        check(vmmfd_lease_prepare(get(), &options, &next));
        return vmmfd::prepared(next);
    }
    /// Afterwards `next` holds the old version.
    void switch_to(const vmmfd::prepared &next) const { check(vmmfd_lease_switch(get(), next.get())); }
    /// Whether the owner of the object asks for the memory.
    bool recalled() const {
        bool is_recalled;
        check(vmmfd_lease_recalled(get(), &is_recalled));
        return is_recalled;
    }
    void park(bool keep = false) const { check(vmmfd_lease_park(get(), keep)); }
    void unpark(const get_options &options = {}) const { check(vmmfd_lease_unpark(get(), &options)); }
};

class listing : public owner<vmmfd_listing_t, vmmfd_listing_free> {
public:
    using owner::owner;
    span<const vmmfd_object_t *const> objects() const && = delete;
    span<const vmmfd_object_t *const> objects() const & { return {get()->objects, get()->count}; }
};

/// The result of a recall.
class recall : public owner<vmmfd_recall_t, vmmfd_recall_free> {
public:
    using owner::owner;
    const vmmfd_recall_t *operator->() const { return get(); }
    span<const vmmfd_holder_t *const> holders() const && = delete;
    span<const vmmfd_holder_t *const> holders() const & { return {get()->holders, get()->holder_count}; }
};

class watch : public owner<vmmfd_watch_t, vmmfd_watch_free> {
public:
    using owner::owner;
    int descriptor() const && = delete;
    /// Readable while events wait. The watch owns it.
    int descriptor() const & {
        int fd;
        check(vmmfd_watch_descriptor(get(), &fd));
        return fd;
    }
    std::optional<vmmfd_event_t> next(std::uint64_t timeout_ms = 0) const && = delete;
    /// The texts are valid until the next call.
    std::optional<vmmfd_event_t> next(std::uint64_t timeout_ms = 0) const & {
        sized<vmmfd_event_t> event;
        bool found;
        check(vmmfd_watch_next(get(), timeout_ms, &event, &found));
        return found ? std::optional<vmmfd_event_t>(event) : std::nullopt;
    }
};

class broker : public owner<vmmfd_broker_t, vmmfd_broker_free> {
public:
    using owner::owner;
    /// Connects; an empty path is the default.
    explicit broker(const std::string &path = "", const broker_options &options = {}) {
        check(vmmfd_broker_connect(optional(path), &options, place()));
    }
    /// Publishes arrays of named parts, and returns the version.
    std::uint64_t put(const std::string &name, span<const vmmfd_named_array_t> arrays,
                      const put_options &options = {}) const {
        std::uint64_t version;
        check(vmmfd_broker_put(get(), name.c_str(), arrays.data(), arrays.size(), &options, &version));
        return version;
    }
    /// Publishes arrays as one part, and returns the version: a range of pairs of a name and an array, or a pointer to one, such as a
    /// std::map.
    template <class R, class = decltype(std::begin(std::declval<const R &>())->first)>
    std::uint64_t put(const std::string &name, const R &arrays, const put_options &options = {}) const {
        std::vector<std::string> names;
        std::vector<vmmfd_named_array_t> named;
        for (const auto &[of, array] : arrays) {
            names.emplace_back(of);
            named.push_back({nullptr, nullptr, handle_of(array)});
        }
        for (std::size_t at = 0; at < names.size(); at++)
            named[at].name = names[at].c_str();
        return put(name, span<const vmmfd_named_array_t>(named), options);
    }
    std::uint64_t put(const std::string &name, std::initializer_list<std::pair<const char *, const array *>> arrays,
                      const put_options &options = {}) const {
        return put<std::initializer_list<std::pair<const char *, const array *>>>(name, arrays, options);
    }
    vmmfd::lease get_object(const std::string &name, const get_options &options = {},
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
    /// Version 0 is the current one.
    vmmfd::recall recall(const std::string &name, std::uint64_t version, bool earlier, std::uint64_t wait_ms) const {
        vmmfd_recall_t *result = nullptr;
        check(vmmfd_broker_recall(get(), name.c_str(), version, earlier, wait_ms, &result));
        return vmmfd::recall(result);
    }
    void remove(const std::string &name) const { check(vmmfd_broker_delete(get(), name.c_str())); }
    vmmfd::watch watch(const std::string &prefix = "") const {
        vmmfd_watch_t *started = nullptr;
        check(vmmfd_broker_watch(get(), prefix.c_str(), &started));
        return vmmfd::watch(started);
    }
    /// Ends the waits of other threads: of a get, and of the connection's watches.
    void interrupt() const { check(vmmfd_broker_interrupt(get())); }

private:
    static const vmmfd_array_t *handle_of(const array &of) { return of.get(); }
    static const vmmfd_array_t *handle_of(const array *of) { return of->get(); }
};

} // namespace vmmfd

#endif
