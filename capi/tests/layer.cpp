// Uses every class of vmmfd.hpp: layer BACKEND BROKER.
#include <poll.h>
#include <thread>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
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
    memory.copy_in(0, vmmfd::span<const std::uint32_t>(values, 2));
    memory.synchronize();
    return vmmfd::array(memory, "uint32", {2});
}

static std::uint32_t last(const vmmfd::array &array) {
    std::uint32_t value[1] = {};
    array.memory().copy_out(array.info().offset + 4, vmmfd::span<std::uint32_t>(value, 1));
    return value[0];
}

static void memory(const vmmfd::device &device) {
    vmmfd::memory made(device, 8);
    auto [fd, size] = made.export_segment();
    const int fds[1] = {fd};
    const std::uint64_t sizes[1] = {size};
    vmmfd::memory same(device, vmmfd::span<const int>(fds, 1), vmmfd::span<const std::uint64_t>(sizes, 1));
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
    vmmfd::array copy(device, numbers(device, 3).to_dlpack());
    EXPECT(last(copy) == 4 && copy.shape().size() == 1 && copy.shape()[0] == 2);
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
    EXPECT(last(values) == 11 && lease.info()->version == 1 && lease.info().parts().size() == 1);
    vmmfd_put_options_t any = {};
    any.condition = VMMFD_PUT_ANY;
    EXPECT(broker.put(name, {{"values", &next}}, any) == 2);
    auto prepared = lease.prepare();
    lease.switch_to(prepared);
    EXPECT(last(values) == 21);
    lease.park();
    lease.unpark();
    EXPECT(last(values) == 21);
    EXPECT(broker.list(name).objects().size() == 1 && broker.stat(name).objects()[0]->version == 2);
    broker.stop();
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
