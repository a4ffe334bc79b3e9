// Uses every class of vmmfd.hpp: layer BACKEND BROKER.
#include <poll.h>
#include <thread>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#if __cplusplus >= 202002L
#include <span>
#endif
#include <vmmfd.hpp>

#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);                             \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

static vmmfd::array numbers(const vmmfd::device &device, std::uint32_t first) {
    const std::uint32_t values[2] = {first, first + 1};
    vmmfd::memory memory(device, sizeof values);
    memory.copy_in(0, values);
    memory.synchronize();
    return vmmfd::array(memory, "uint32", {2});
}

static std::uint32_t last(const vmmfd::array &array) {
    std::uint32_t value[1] = {};
    array.memory().copy_out(array.info().offset + 4, value);
    return value[0];
}

static void memory(const vmmfd::device &device) {
    vmmfd::memory made(device, 8);
    auto [fd, size] = made.export_segment();
    const int fds[1] = {fd};
    const std::uint64_t sizes[1] = {size};
    vmmfd::memory same(device, fds, sizes);
    close(fd);
    EXPECT(same.info().size == size && !same.info().writable && made.info().writable);
    vmmfd::memory moved = std::move(made);
    EXPECT(!made && moved);
    try {
        made.info();
        EXPECT(false);
    } catch (const vmmfd::error &error) {
        EXPECT(error.code() == VMMFD_INVALID && error.driver_code() == 0 && std::strlen(error.what()) > 10);
    }
    vmmfd::array copy = vmmfd::array::from_dlpack(device, numbers(device, 3).to_dlpack());
    EXPECT(last(copy) == 4 && copy.shape().size() == 1 && copy.shape()[0] == 2);
}

/// Whether a call compiles for a type.
template <class T, class Call> constexpr bool compiles(Call) { return std::is_invocable_v<Call, T>; }

/// Results with pointers need an owner with a name: a temporary frees their texts and lists at once.
#define NEEDS_NAME(type, call)                                                                                         \
    static_assert(compiles<type &>([](auto &&owner) -> decltype(std::forward<decltype(owner)>(owner).call) {}));       \
    static_assert(!compiles<type>([](auto &&owner) -> decltype(std::forward<decltype(owner)>(owner).call) {}))
NEEDS_NAME(vmmfd::device, info());
NEEDS_NAME(vmmfd::memory, info());
NEEDS_NAME(vmmfd::array, info());
NEEDS_NAME(vmmfd::array, shape());
NEEDS_NAME(vmmfd::lease_info, parts());
NEEDS_NAME(vmmfd::listing, objects());
NEEDS_NAME(vmmfd::recall, holders());
NEEDS_NAME(vmmfd::watch, descriptor());
NEEDS_NAME(vmmfd::watch, next());

#if __cplusplus >= 202002L
// Designated initialisers have the order of the fields: the macros' fields are the first.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
constexpr vmmfd_memory_options_t on_device = {VMMFD_MEMORY_OPTIONS, .placement = VMMFD_ON_DEVICE};
constexpr vmmfd_handoff_options_t short_handoff = {VMMFD_HANDOFF_OPTIONS, .timeout_ms = 5000};
constexpr vmmfd_broker_options_t short_connection = {VMMFD_BROKER_OPTIONS, .timeout_ms = 5000};
constexpr vmmfd_put_options_t replacing = {VMMFD_PUT_OPTIONS, .condition = VMMFD_PUT_ANY};
constexpr vmmfd_get_options_t waiting = {VMMFD_GET_OPTIONS, .wait_ms = 5000};
static_assert(short_handoff.socket == -1 && short_handoff.stop == -1 && short_connection.stop == -1);
static_assert(on_device.chunk == 0 && replacing.keep == 0 && waiting.part_count == 0);
#pragma GCC diagnostic pop
#endif

/// Ranges of several types, and handles that change their owner.
static void ranges(const vmmfd::broker &broker, const vmmfd::device &device, const std::string &name) {
    vmmfd::put_options any;
    any.condition = VMMFD_PUT_ANY;
    std::map<std::string, vmmfd::array> owned;
    owned.emplace("a", numbers(device, 30));
    owned.emplace("b", numbers(device, 40));
    EXPECT(broker.put(name, owned, any) == 3);
    std::vector<std::pair<std::string, const vmmfd::array *>> pointers = {{"a", &owned.at("a")}};
    EXPECT(broker.put(name, pointers, any) == 4);
    std::vector<vmmfd_named_array_t> parts = {{"x", "w", owned.at("a").get()}, {"y", "w", owned.at("b").get()}};
    EXPECT(broker.put(name, parts, any) == 5);
    auto lease = broker.get_object(name, {}, &device);
    vmmfd_lease_t *handle = lease.release();
    EXPECT(!lease && handle != nullptr);
    vmmfd::lease adopted(handle);
    auto info = adopted.info();
    EXPECT(info.parts().size() == 2 && last(adopted.array("w", "y")) == 41);
    const std::vector<std::uint8_t> bytes = {1, 2, 3, 4};
    std::array<std::uint8_t, 4> copied = {};
    vmmfd::memory memory(device, 4);
    memory.copy_in(0, bytes);
    memory.copy_out(0, copied);
    EXPECT(copied[3] == 4);
#ifdef __cpp_lib_span
    std::span<const std::uint64_t> shape = owned.at("a").shape();
    EXPECT(shape.size() == 1);
    memory.copy_out(0, std::span<std::uint8_t>(copied).first(2));
#endif
}

static void broker(const vmmfd::device &device, const char *path) {
    const std::string name = "layer/" + std::to_string(getpid());
    vmmfd::broker broker(path);
    auto watch = broker.watch(name);
    auto array = numbers(device, 10), next = numbers(device, 20);
    EXPECT(broker.put(name, {{"values", &array}}) == 1);
    pollfd ready = {watch.descriptor(), POLLIN, 0};
    EXPECT(poll(&ready, 1, 20000) == 1);
    auto event = watch.next();
    EXPECT(event && event->kind == VMMFD_EVENT_PUBLISHED && name == event->name);
    auto lease = broker.get_object(name, {}, &device);
    auto values = lease.array("values");
    EXPECT(last(values) == 11 && lease.info()->version == 1 && lease.info()->part_count == 1);
    vmmfd::put_options any;
    any.condition = VMMFD_PUT_ANY;
    EXPECT(broker.put(name, {{"values", &next}}, any) == 2);
    auto prepared = lease.prepare();
    lease.switch_to(prepared);
    EXPECT(last(values) == 21);
    lease.park();
    lease.unpark();
    EXPECT(last(values) == 21);
    auto listing = broker.list(name), described = broker.stat(name);
    EXPECT(listing.objects().size() == 1 && described.objects()[0]->version == 2);
    auto recall = broker.recall(name, 0, false, 0);
    EXPECT(recall->kept && recall.holders().size() == 1 && !recall.holders()[0]->acknowledged && lease.recalled());
    broker.interrupt();
    ranges(broker, device, name);
    broker.remove(name);
}

int main(int argc, char **argv) {
    EXPECT(argc == 3);
    vmmfd::device device(argv[1]);
    EXPECT(std::string(device.info().backend) == argv[1] && vmmfd::device::count(argv[1]) >= 1);
    memory(device);
    const std::string path = "/tmp/vmmfd-layer-" + std::to_string(getpid());
    auto array = numbers(device, 5);
    std::thread serving([&] { EXPECT(array.serve(path) == 1); });
    EXPECT(last(vmmfd::array::take(path, &device)) == 6);
    serving.join();
    broker(device, argv[2]);
    std::printf("layer: %s passed\n", argv[1]);
}
