/* Timelines, and streams that wait for a publisher's, on a GPU or the emulated driver; on host memory, the refusals. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "parts.h"

/* No test waits that long unless it fails. */
enum { SIZE = 4096, LIMIT = 60000, SHORT = 20 };

/* A function of the driver. */
static void *driver(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *function = library ? dlsym(library, name) : NULL;
    EXPECT(function != NULL);
    return function;
}

/* Calls a function of the driver. Pointers to functions and data have one size here. */
#define DRIVER(name, types, arguments) EXPECT((*(int(**) types) & (void *[]){driver(name)}) arguments == 0)

static void *new_stream(void) {
    void *context, *stream;
    DRIVER("cuInit", (unsigned), (0));
    DRIVER("cuDevicePrimaryCtxRetain", (void **, int), (&context, 0));
    DRIVER("cuCtxSetCurrent", (void *), (context));
    DRIVER("cuStreamCreate", (void **, unsigned), (&stream, 1));
    return stream;
}

static void fill(void *stream, uint64_t address, unsigned char byte) {
    DRIVER("cuMemsetD8Async", (uint64_t, unsigned char, size_t, void *), (address, byte, SIZE, stream));
}

static void drain(void *stream) {
    DRIVER("cuStreamSynchronize", (void *), (stream));
}

static vmmfd_completion_t completion(const vmmfd_timeline_t *timeline, uint64_t value) {
    vmmfd_completion_t found;
    CHECK(vmmfd_timeline_completion(timeline, value, &found));
    return found;
}

static vmmfd_completion_t written(const vmmfd_sample_t *sample) {
    vmmfd_completion_t found;
    CHECK(vmmfd_sample_completion(sample->memory, &found));
    return found;
}

static void pause_ms(long time) {
    nanosleep(&(struct timespec){.tv_nsec = time * 1000000}, NULL);
}

static vmmfd_timeline_t *open_again(const vmmfd_device_t *device, const vmmfd_timeline_t *timeline) {
    vmmfd_timeline_t *other;
    int fd;
    CHECK(vmmfd_timeline_descriptor(timeline, &fd));
    CHECK(vmmfd_timeline_open(device, fd, &other));
    return other;
}

static void test_timeline(const vmmfd_device_t *device) {
    void *first = new_stream(), *second = new_stream();
    vmmfd_timeline_t *timeline, *gate;
    uint64_t value = 9;
    CHECK(vmmfd_timeline_create(device, &gate));
    CHECK(vmmfd_timeline_create(device, &timeline));
    vmmfd_timeline_t *other = open_again(device, timeline), *watcher = open_again(NULL, timeline);
    CHECK(vmmfd_timeline_wait(gate, first, 1, LIMIT));
    CHECK(vmmfd_timeline_record(timeline, first, &value));
    EXPECT(value == 1);
    CHECK(vmmfd_timeline_wait(other, second, 1, LIMIT));
    FAILS(VMMFD_TIMEOUT, vmmfd_timeline_wait_cpu(watcher, 1, SHORT, -1));
    int stop = eventfd(1, EFD_CLOEXEC);
    FAILS(VMMFD_INTERRUPTED, vmmfd_timeline_wait_cpu(watcher, 1, VMMFD_FOREVER, stop));
    EXPECT(close(stop) == 0 && completion(watcher, 1) == VMMFD_PENDING);
    CHECK(vmmfd_timeline_record(gate, NULL, &value));
    CHECK(vmmfd_timeline_wait_cpu(watcher, 1, LIMIT, -1));
    drain(second);
    CHECK(vmmfd_timeline_value(other, &value));
    EXPECT(value == 1 && completion(other, 1) == VMMFD_DONE && completion(other, 2) == VMMFD_PENDING);
    /* Wrong use. */
    FAILS(VMMFD_INVALID, vmmfd_timeline_record(other, first, &value));
    FAILS(VMMFD_INVALID, vmmfd_timeline_wait(watcher, first, 1, 1));
    FAILS(VMMFD_INVALID, vmmfd_timeline_record(timeline, (void *)2, &value));
    FAILS(VMMFD_INVALID, vmmfd_timeline_release_with(other, -1));
    FAILS(VMMFD_SYSTEM, vmmfd_timeline_open(device, STDERR_FILENO, &(vmmfd_timeline_t *){NULL}));
    /* A peer that closes its connection. */
    int pair[2];
    EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    CHECK(vmmfd_timeline_release_with(other, pair[0]));
    CHECK(vmmfd_timeline_wait(other, second, 2, LIMIT));
    EXPECT(close(pair[1]) == 0);
    drain(second);
    EXPECT(completion(other, 1) == VMMFD_DONE && completion(other, 2) == VMMFD_LOST && close(pair[0]) == 0);
    FAILS(VMMFD_DISCONNECTED, vmmfd_timeline_wait(other, second, 2, LIMIT));
    FAILS(VMMFD_DISCONNECTED, vmmfd_timeline_wait_cpu(watcher, 2, LIMIT, -1));
    /* A release by the program. */
    CHECK(vmmfd_timeline_wait(gate, first, 2, LIMIT));
    CHECK(vmmfd_timeline_release(gate));
    drain(first);
    vmmfd_timeline_free(watcher);
    vmmfd_timeline_free(other);
    vmmfd_timeline_free(timeline);
    vmmfd_timeline_free(gate);
    FAILS(VMMFD_INVALID, vmmfd_timeline_value(gate, &value));
}

static void publish_on(const vmmfd_publisher_t *publisher, void *stream, unsigned char byte) {
    vmmfd_memory_t *loan;
    vmmfd_memory_info_t info = {.struct_size = sizeof info};
    CHECK(vmmfd_publisher_loan(publisher, 0, LIMIT, &loan));
    CHECK(vmmfd_memory_info(loan, &info));
    fill(stream, info.address, byte);
    CHECK(vmmfd_loan_publish_on(loan, stream, &byte, 1, NULL));
}

static void test_publications(const vmmfd_device_t *device, vmmfd_publisher_t *publisher, vmmfd_subscriber_t *subscriber) {
    void *writer = new_stream(), *reader = new_stream();
    vmmfd_timeline_t *gate;
    vmmfd_sample_t sample = {.struct_size = sizeof sample};
    unsigned char bytes[2];
    CHECK(vmmfd_timeline_create(device, &gate));
    CHECK(vmmfd_timeline_wait(gate, writer, 1, LIMIT));
    publish_on(publisher, writer, 7);
    CHECK(vmmfd_subscriber_receive_on(subscriber, reader, LIMIT, &sample));
    pause_ms(SHORT);
    EXPECT(sample.result == VMMFD_SAMPLE && sample.user_size == 1 && written(&sample) == VMMFD_PENDING);
    CHECK(vmmfd_timeline_record(gate, NULL, &(uint64_t){0}));
    CHECK(vmmfd_memory_copy_out(sample.memory, SIZE - 2, bytes, 2));
    EXPECT(bytes[0] == 7 && bytes[1] == 7 && written(&sample) == VMMFD_DONE);
    /* Given back behind the reader's work, without a wait. */
    CHECK(vmmfd_timeline_wait(gate, reader, 2, LIMIT));
    vmmfd_memory_free(sample.memory);
    CHECK(vmmfd_timeline_record(gate, NULL, &(uint64_t){0}));
    FAILS(VMMFD_INVALID, vmmfd_subscriber_receive_on(subscriber, reader, 0, &sample));
    FAILS(VMMFD_INVALID, vmmfd_subscriber_receive_on(subscriber, (void *)2, LIMIT, &sample));
    CHECK(vmmfd_subscriber_receive_on(subscriber, reader, SHORT, &sample));
    EXPECT(sample.result == VMMFD_NOTHING);
    /* A late publisher. */
    CHECK(vmmfd_timeline_wait(gate, writer, 3, LIMIT));
    publish_on(publisher, writer, 8);
    CHECK(vmmfd_subscriber_receive_on(subscriber, reader, SHORT, &sample));
    drain(reader);
    EXPECT(sample.result == VMMFD_SAMPLE && written(&sample) == VMMFD_LOST);
    vmmfd_memory_free(sample.memory);
    FAILS(VMMFD_DISCONNECTED, vmmfd_subscriber_receive_on(subscriber, reader, LIMIT, &sample));
    CHECK(vmmfd_timeline_release(gate));
    drain(writer);
    vmmfd_timeline_free(gate);
}

void test_order(const vmmfd_device_t *device, bool has_streams) {
    vmmfd_publisher_t *publisher;
    vmmfd_subscriber_t *subscriber;
    vmmfd_memory_t *loan;
    vmmfd_order_t order = {.struct_size = sizeof order};
    vmmfd_sample_t sample = {.struct_size = sizeof sample};
    int pair[2];
    CHECK(vmmfd_publisher_create(device, SIZE, 4, NULL, &publisher));
    EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    CHECK(vmmfd_publisher_admit(publisher, pair[0]));
    vmmfd_subscriber_options_t options = {VMMFD_SUBSCRIBER_OPTIONS, .held = 2};
    options.socket = pair[1];
    CHECK(vmmfd_subscriber_connect(device, NULL, &options, &subscriber));
    EXPECT(close(pair[0]) == 0 && close(pair[1]) == 0);
    CHECK(vmmfd_publisher_order(publisher, &order));
    EXPECT(order.gpu == has_streams && (strlen(order.reason) > 10) == !has_streams);
    CHECK(vmmfd_subscriber_order(subscriber, &order));
    EXPECT(order.gpu == has_streams && (strlen(order.reason) > 10) == !has_streams);
    CHECK(vmmfd_publisher_loan(publisher, 0, 0, &loan));
    FAILS(VMMFD_INVALID, vmmfd_sample_completion(loan, &(vmmfd_completion_t){0}));
    if (has_streams) {
        vmmfd_memory_free(loan);
        test_timeline(device);
        test_publications(device, publisher, subscriber);
    } else {
        FAILS(VMMFD_UNSUPPORTED, vmmfd_loan_publish_on(loan, NULL, NULL, 0, NULL));
        FAILS(VMMFD_UNSUPPORTED, vmmfd_subscriber_receive_on(subscriber, NULL, SHORT, &sample));
        FAILS(VMMFD_UNSUPPORTED, vmmfd_timeline_create(device, &(vmmfd_timeline_t *){NULL}));
        vmmfd_memory_free(loan);
    }
    vmmfd_subscriber_free(subscriber);
    vmmfd_publisher_free(publisher);
}
