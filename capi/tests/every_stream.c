/* Publishers and subscribers, in this process and in others. */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "parts.h"

/* No test waits that long unless it fails. */
enum { SIZE = 4096, LIMIT = 60000 };

static vmmfd_publisher_t *publisher_of(const vmmfd_device_t *device, uint64_t room, vmmfd_publisher_options_t options) {
    vmmfd_publisher_t *publisher;
    CHECK(vmmfd_publisher_create(device, SIZE, room, &options, &publisher));
    return publisher;
}

/* Publishes a buffer whose bytes all have the value of its number. */
static void publish(const vmmfd_publisher_t *publisher, uint64_t expected) {
    unsigned char bytes[SIZE];
    vmmfd_memory_t *loan;
    uint64_t number;
    CHECK(vmmfd_publisher_loan(publisher, 0, LIMIT, &loan));
    memset(bytes, (int)(expected % 251), sizeof bytes);
    CHECK(vmmfd_memory_copy_in(loan, 0, bytes, sizeof bytes));
    CHECK(vmmfd_loan_publish(loan, &expected, sizeof expected, expected % 2 == 0, &number));
    EXPECT(number == expected);
}

/* Whether the sample is whole, and the publisher's own bytes are right. */
static bool is_whole(const vmmfd_sample_t *sample) {
    unsigned char bytes[SIZE], expected[SIZE];
    CHECK(vmmfd_memory_copy_out(sample->memory, 0, bytes, sizeof bytes));
    memset(expected, (int)(sample->number % 251), sizeof expected);
    return memcmp(bytes, expected, sizeof bytes) == 0 && sample->user_size == sizeof sample->number &&
           memcmp(sample->user, &sample->number, sizeof sample->number) == 0;
}

/* Receives a publication by its number. */
static vmmfd_sample_t receive(const vmmfd_subscriber_t *subscriber, uint64_t number, uint64_t skipped) {
    vmmfd_sample_t sample = {.struct_size = sizeof sample};
    CHECK(vmmfd_subscriber_receive(subscriber, LIMIT, &sample));
    EXPECT(sample.result == VMMFD_SAMPLE && sample.number == number && sample.skipped == skipped && is_whole(&sample));
    return sample;
}

static vmmfd_received_t receive_none(const vmmfd_subscriber_t *subscriber, uint64_t timeout_ms, pid_t publisher) {
    vmmfd_sample_t sample = {.struct_size = sizeof sample};
    CHECK(vmmfd_subscriber_receive(subscriber, timeout_ms, &sample));
    EXPECT(sample.result != VMMFD_SAMPLE && sample.memory == NULL && sample.format == NULL && sample.pid == publisher);
    return sample.result;
}

/* Waits for the next event, and returns its subscriber's process. */
static pid_t event_of(const vmmfd_publisher_t *publisher, vmmfd_stream_event_kind_t kind) {
    vmmfd_stream_event_t event = {.struct_size = sizeof event};
    struct pollfd waiting = {.events = POLLIN};
    bool found = false;
    CHECK(vmmfd_publisher_descriptor(publisher, &waiting.fd));
    while (!found) {
        EXPECT(poll(&waiting, 1, LIMIT) == 1);
        CHECK(vmmfd_publisher_event(publisher, &event, &found));
    }
    EXPECT(event.kind == kind && (event.id > 0) == (kind != VMMFD_STREAM_STARVED));
    return event.pid;
}

/* Subscribes over a pair of sockets. */
static vmmfd_error_t *join(const vmmfd_publisher_t *publisher, const vmmfd_device_t *device,
                           vmmfd_subscriber_options_t options, vmmfd_subscriber_t **subscriber) {
    int pair[2];
    EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    CHECK(vmmfd_publisher_admit(publisher, pair[0]));
    options.socket = pair[1];
    vmmfd_error_t *error = vmmfd_subscriber_connect(device, NULL, &options, subscriber);
    EXPECT(close(pair[0]) == 0 && close(pair[1]) == 0);
    return error;
}

static vmmfd_subscriber_t *joined(const vmmfd_publisher_t *publisher, const vmmfd_device_t *device,
                                  vmmfd_subscriber_options_t options) {
    vmmfd_subscriber_t *subscriber;
    CHECK(join(publisher, device, options, &subscriber));
    EXPECT(event_of(publisher, VMMFD_STREAM_JOINED) == getpid());
    return subscriber;
}

static uint64_t now(void) {
    struct timespec time;
    EXPECT(clock_gettime(CLOCK_MONOTONIC, &time) == 0);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static void test_latest(const vmmfd_device_t *device) {
    vmmfd_publisher_t *publisher = publisher_of(device, 3, (vmmfd_publisher_options_t){VMMFD_PUBLISHER_OPTIONS});
    vmmfd_subscriber_t *subscriber =
        joined(publisher, device, (vmmfd_subscriber_options_t){VMMFD_SUBSCRIBER_OPTIONS, .policy = VMMFD_LATEST});
    EXPECT(receive_none(subscriber, 0, getpid()) == VMMFD_NOTHING);
    uint64_t before = now();
    publish(publisher, 1);
    vmmfd_sample_t sample = receive(subscriber, 1, 0);
    EXPECT(sample.published_ns > before && sample.published_ns < now());
    vmmfd_memory_info_t info = {.struct_size = sizeof info};
    CHECK(vmmfd_memory_info(sample.memory, &info));
    EXPECT(info.address == sample.address && info.size == SIZE && sample.size == SIZE && !info.writable);
    EXPECT(sample.format->array_count == 0 && sample.format->blob_size == 0);
    FAILS(VMMFD_INVALID, vmmfd_memory_copy_in(sample.memory, 0, "x", 1));
    for (uint64_t number = 2; number <= 4; number++)
        publish(publisher, number);
    /* It has as many buffers as it may hold. */
    EXPECT(receive_none(subscriber, 0, getpid()) == VMMFD_NOTHING && receive_none(subscriber, 1, getpid()) == VMMFD_NOTHING);
    vmmfd_memory_free(sample.memory);
    sample = receive(subscriber, 4, 2);
    vmmfd_publisher_free(publisher);
    EXPECT(receive_none(subscriber, LIMIT, getpid()) == VMMFD_CRASHED && is_whole(&sample));
    vmmfd_subscriber_free(subscriber);
    EXPECT(is_whole(&sample));
    vmmfd_memory_free(sample.memory);
}

static void test_queue_and_history(const vmmfd_device_t *device) {
    vmmfd_publisher_t *publisher =
        publisher_of(device, 6, (vmmfd_publisher_options_t){VMMFD_PUBLISHER_OPTIONS, .history = 2});
    for (uint64_t number = 1; number <= 3; number++)
        publish(publisher, number);
    vmmfd_subscriber_options_t options = {VMMFD_SUBSCRIBER_OPTIONS, .policy = VMMFD_QUEUE, .queue = 2, .held = 2, .history = 9};
    vmmfd_subscriber_t *subscriber = joined(publisher, device, options);
    vmmfd_sample_t first = receive(subscriber, 2, 0), second = receive(subscriber, 3, 0);
    for (uint64_t number = 4; number <= 7; number++)
        publish(publisher, number);
    EXPECT(receive_none(subscriber, 0, getpid()) == VMMFD_NOTHING);
    vmmfd_memory_free(first.memory);
    vmmfd_memory_free(second.memory);
    first = receive(subscriber, 6, 2);
    second = receive(subscriber, 7, 0);
    vmmfd_memory_free(second.memory);
    /* The last sample outlives its subscriber. */
    vmmfd_subscriber_free(subscriber);
    EXPECT(event_of(publisher, VMMFD_STREAM_LEFT) == getpid() && is_whole(&first));
    vmmfd_memory_free(first.memory);
    CHECK(vmmfd_publisher_finish(publisher, LIMIT));
    vmmfd_publisher_free(publisher);
}

static void test_every(const vmmfd_device_t *device) {
    vmmfd_publisher_t *publisher =
        publisher_of(device, 4, (vmmfd_publisher_options_t){VMMFD_PUBLISHER_OPTIONS, .every_ms = VMMFD_FOREVER});
    vmmfd_subscriber_options_t options = {VMMFD_SUBSCRIBER_OPTIONS, .policy = VMMFD_EVERY};
    vmmfd_subscriber_t *subscriber = joined(publisher, device, options);
    vmmfd_memory_t *loan;
    publish(publisher, 1);
    publish(publisher, 2);
    vmmfd_sample_t sample = receive(subscriber, 1, 0);
    CHECK(vmmfd_publisher_loan(publisher, 0, 0, &loan));
    EXPECT(loan == NULL);
    FAILS(VMMFD_TIMEOUT, vmmfd_publisher_loan(publisher, 0, 1, &loan));
    EXPECT(loan == NULL && event_of(publisher, VMMFD_STREAM_STARVED) == 0);
    vmmfd_memory_free(sample.memory);
    publish(publisher, 3);
    for (uint64_t number = 2; number <= 3; number++) {
        sample = receive(subscriber, number, 0);
        vmmfd_memory_free(sample.memory);
    }
    CHECK(vmmfd_publisher_finish(publisher, LIMIT));
    EXPECT(receive_none(subscriber, LIMIT, getpid()) == VMMFD_ENDED && receive_none(subscriber, 0, getpid()) == VMMFD_ENDED);
    FAILS(VMMFD_SYSTEM, join(publisher, device, options, &subscriber));
    vmmfd_subscriber_free(subscriber);
    vmmfd_publisher_free(publisher);
}

static void test_eviction(const vmmfd_device_t *device) {
    vmmfd_publisher_t *publisher = publisher_of(device, 4, (vmmfd_publisher_options_t){VMMFD_PUBLISHER_OPTIONS, .every_ms = 1});
    vmmfd_subscriber_t *subscriber =
        joined(publisher, device, (vmmfd_subscriber_options_t){VMMFD_SUBSCRIBER_OPTIONS, .policy = VMMFD_EVERY});
    publish(publisher, 1);
    vmmfd_sample_t sample = receive(subscriber, 1, 0);
    publish(publisher, 2);
    EXPECT(event_of(publisher, VMMFD_STREAM_EVICTED) == getpid());
    publish(publisher, 3);
    vmmfd_sample_t none = {.struct_size = sizeof none};
    FAILS(VMMFD_DISCONNECTED, vmmfd_subscriber_receive(subscriber, LIMIT, &none));
    FAILS(VMMFD_INVALID, vmmfd_subscriber_receive(subscriber, LIMIT, &none));
    EXPECT(none.result == VMMFD_NOTHING && is_whole(&sample));
    vmmfd_memory_free(sample.memory);
    vmmfd_subscriber_free(subscriber);
    vmmfd_publisher_free(publisher);
}

static void *free_memory(void *memory) {
    vmmfd_memory_free(memory);
    return NULL;
}

/* Both sides in one event loop; sizes that vary; a sample that another thread frees. */
static void test_descriptors(const vmmfd_device_t *device) {
    vmmfd_publisher_t *publisher;
    vmmfd_memory_t *loan;
    vmmfd_sample_t sample = {.struct_size = sizeof sample};
    struct pollfd ready[2] = {{.events = POLLIN}, {.events = POLLIN}};
    pthread_t thread;
    CHECK(vmmfd_publisher_create(device, 0, 8192, NULL, &publisher));
    FAILS(VMMFD_INVALID, vmmfd_publisher_loan(publisher, 0, 0, &loan));
    FAILS(VMMFD_INVALID, vmmfd_publisher_loan(publisher, 8193, 0, &loan));
    vmmfd_subscriber_t *subscriber = joined(publisher, device, (vmmfd_subscriber_options_t){VMMFD_SUBSCRIBER_OPTIONS});
    CHECK(vmmfd_publisher_descriptor(publisher, &ready[0].fd));
    CHECK(vmmfd_subscriber_descriptor(subscriber, &ready[1].fd));
    EXPECT(poll(ready, 2, 0) == 0);
    CHECK(vmmfd_publisher_loan(publisher, 8000, 0, &loan));
    CHECK(vmmfd_loan_publish(loan, NULL, 0, false, NULL));
    EXPECT(poll(&ready[1], 1, LIMIT) == 1);
    CHECK(vmmfd_subscriber_receive(subscriber, 0, &sample));
    EXPECT(sample.result == VMMFD_SAMPLE && sample.size == 8000 && sample.user_size == 0 && poll(&ready[1], 1, 0) == 0);
    CHECK(vmmfd_publisher_loan(publisher, 500, 0, &loan));
    EXPECT(loan == NULL);
    EXPECT(pthread_create(&thread, NULL, free_memory, sample.memory) == 0);
    while (loan == NULL) {
        EXPECT(poll(ready, 1, LIMIT) == 1);
        CHECK(vmmfd_publisher_loan(publisher, 500, 0, &loan));
    }
    EXPECT(pthread_join(thread, NULL) == 0);
    /* Dropped, and not published. */
    vmmfd_memory_free(loan);
    vmmfd_subscriber_free(subscriber);
    EXPECT(event_of(publisher, VMMFD_STREAM_LEFT) == getpid());
    vmmfd_publisher_free(publisher);
}

static void test_format(const vmmfd_device_t *device) {
    vmmfd_publisher_t *publisher = publisher_of(device, 3, (vmmfd_publisher_options_t){VMMFD_PUBLISHER_OPTIONS});
    vmmfd_subscriber_t *subscriber = joined(publisher, device, (vmmfd_subscriber_options_t){VMMFD_SUBSCRIBER_OPTIONS});
    static const char blob[65537] = "exposure 1/60";
    const uint64_t shape[2] = {16, 16}, large[1] = {SIZE + 1};
    const int64_t strides[2] = {2, 32};
    const char *names[65] = {"left", "right"};
    vmmfd_layout_t left = {.struct_size = sizeof left, .dtype = "uint8", .dimensions = 2, .shape = shape}, right = left;
    right.dtype = "bfloat16";
    right.strides = strides;
    right.offset = 256;
    const vmmfd_layout_t *layouts[65] = {&left, &right};
    vmmfd_format_t format = {.struct_size = sizeof format, .array_count = 2, .names = names, .layouts = layouts};
    format.blob = blob;
    format.blob_size = 65536;
    CHECK(vmmfd_publisher_set_format(publisher, &format));
    publish(publisher, 1);
    vmmfd_sample_t sample = receive(subscriber, 1, 0);
    const vmmfd_format_t *got = sample.format;
    EXPECT(got->array_count == 2 && strcmp(got->names[1], "right") == 0 && strcmp(got->layouts[1]->dtype, "bfloat16") == 0);
    EXPECT(got->layouts[0]->strides == NULL && got->layouts[1]->strides[1] == 32 && got->layouts[1]->shape[1] == 16);
    EXPECT(got->layouts[1]->offset == 256 && got->blob_size == 65536 && memcmp(got->blob, blob, 65536) == 0);
    /* An array and its tensor keep the sample. */
    vmmfd_array_t *array;
    vmmfd_memory_t *memory;
    unsigned char bytes[2] = {0};
    CHECK(vmmfd_array_create(sample.memory, got->layouts[1], &array));
    vmmfd_memory_free(sample.memory);
    publish(publisher, 2);
    EXPECT(receive_none(subscriber, 0, getpid()) == VMMFD_NOTHING);
    CHECK(vmmfd_array_memory(array, &memory));
    CHECK(vmmfd_memory_copy_out(memory, 256, bytes, sizeof bytes));
    EXPECT(bytes[0] == 1 && bytes[1] == 1);
    vmmfd_memory_free(memory);
    vmmfd_array_free(array);
    sample = receive(subscriber, 2, 0);
    EXPECT(sample.format->array_count == 2);
    vmmfd_memory_free(sample.memory);
    format.array_count = 0;
    format.blob_size = 0;
    CHECK(vmmfd_publisher_set_format(publisher, &format));
    publish(publisher, 3);
    sample = receive(subscriber, 3, 0);
    EXPECT(sample.format->array_count == 0 && sample.format->blob_size == 0);
    vmmfd_memory_free(sample.memory);
    /* Each wrong in one way. */
    format.blob_size = 65537;
    FAILS(VMMFD_INVALID, vmmfd_publisher_set_format(publisher, &format));
    format.blob_size = 0;
    format.array_count = 1;
    left.dimensions = 1;
    left.shape = large;
    FAILS(VMMFD_INVALID, vmmfd_publisher_set_format(publisher, &format));
    left.shape = shape;
    CHECK(vmmfd_publisher_set_format(publisher, &format));
    names[0] = NULL;
    FAILS(VMMFD_INVALID, vmmfd_publisher_set_format(publisher, &format));
    for (int at = 0; at < 65; at++) {
        names[at] = "many";
        layouts[at] = &left;
    }
    format.array_count = 65;
    FAILS(VMMFD_INVALID, vmmfd_publisher_set_format(publisher, &format));
    format.layouts = NULL;
    FAILS(VMMFD_INVALID, vmmfd_publisher_set_format(publisher, &format));
    FAILS(VMMFD_INVALID, vmmfd_publisher_set_format(publisher, NULL));
    vmmfd_subscriber_free(subscriber);
    vmmfd_publisher_free(publisher);
}

static void test_loan(const vmmfd_device_t *device) {
    static const char user[4097];
    vmmfd_publisher_t *publisher = publisher_of(device, 2, (vmmfd_publisher_options_t){VMMFD_PUBLISHER_OPTIONS});
    vmmfd_memory_t *loan, *other;
    vmmfd_memory_info_t info = {.struct_size = sizeof info};
    vmmfd_array_t *array;
    struct DLManagedTensorVersioned *tensor;
    uint64_t number = 7;
    FAILS(VMMFD_INVALID, vmmfd_publisher_loan(publisher, SIZE + 1, 0, &loan));
    CHECK(vmmfd_publisher_loan(publisher, 100, 0, &loan));
    CHECK(vmmfd_memory_info(loan, &info));
    EXPECT(info.size == 100 && info.writable && info.segments == 0);
    /* One at a time. */
    CHECK(vmmfd_publisher_loan(publisher, 0, 0, &other));
    EXPECT(other == NULL);
    FAILS(VMMFD_TIMEOUT, vmmfd_publisher_loan(publisher, 0, 1, &other));
    EXPECT(event_of(publisher, VMMFD_STREAM_STARVED) == 0);
    FAILS(VMMFD_INVALID, vmmfd_memory_export(loan, 0, &(int){0}, &(uint64_t){0}));
    FAILS(VMMFD_INVALID, vmmfd_memory_copy_in(loan, 100, "x", 1));
    FAILS(VMMFD_INVALID, vmmfd_loan_publish(loan, user, sizeof user, false, &number));
    FAILS(VMMFD_INVALID, vmmfd_loan_publish(loan, NULL, 1, false, &number));
    EXPECT(number == 0);
    const vmmfd_layout_t layout = {.struct_size = sizeof layout, .dtype = "uint8", .dimensions = 1, .shape = &info.size};
    CHECK(vmmfd_array_create(loan, &layout, &array));
    CHECK(vmmfd_array_to_dlpack(array, &tensor));
    FAILS(VMMFD_INVALID, vmmfd_loan_publish(loan, NULL, 0, false, NULL));
    CHECK(vmmfd_array_from_dlpack(device, tensor, &(vmmfd_array_t *){NULL}));
    CHECK(vmmfd_loan_publish(loan, user, 4096, false, &number));
    EXPECT(number == 1);
    vmmfd_error_t *error = vmmfd_loan_publish(loan, NULL, 0, false, NULL);
    EXPECT(error != NULL && error->code == VMMFD_INVALID && strstr(error->message, "is freed") != NULL);
    vmmfd_error_free(error);
    FAILS(VMMFD_INVALID, vmmfd_array_to_dlpack(array, &tensor));
    vmmfd_array_free(array);
    CHECK(vmmfd_memory_create(device, 1, NULL, &other));
    FAILS(VMMFD_INVALID, vmmfd_loan_publish(other, NULL, 0, false, NULL));
    vmmfd_memory_free(other);
    CHECK(vmmfd_publisher_loan(publisher, 0, 0, &loan));
    CHECK(vmmfd_publisher_finish(publisher, 0));
    FAILS(VMMFD_INVALID, vmmfd_loan_publish(loan, NULL, 0, false, NULL));
    FAILS(VMMFD_INVALID, vmmfd_memory_info(loan, &info));
    vmmfd_memory_free(loan);
    vmmfd_publisher_free(publisher);
    FAILS(VMMFD_INVALID, vmmfd_publisher_finish(publisher, 0));
}

static void test_refusals(const vmmfd_device_t *device) {
    const char *path = "/tmp/vmmfd-every-no-publisher";
    vmmfd_publisher_t *publisher;
    vmmfd_subscriber_t *subscriber;
    vmmfd_publisher_options_t pool = {VMMFD_PUBLISHER_OPTIONS};
    FAILS(VMMFD_INVALID, vmmfd_publisher_create(device, 0, 0, NULL, &publisher));
    FAILS(VMMFD_INVALID, vmmfd_publisher_create(device, SIZE, 0, NULL, &publisher));
    FAILS(VMMFD_INVALID, vmmfd_publisher_create(NULL, SIZE, 2, NULL, &publisher));
    FAILS(VMMFD_INVALID, vmmfd_publisher_create(device, SIZE, 2, NULL, NULL));
    pool.placement = 9;
    FAILS(VMMFD_INVALID, vmmfd_publisher_create(device, SIZE, 2, &pool, &publisher));
    EXPECT(publisher == NULL);
    pool = (vmmfd_publisher_options_t){VMMFD_PUBLISHER_OPTIONS, .placement = VMMFD_ON_HOST, .loans = 2};
    publisher = publisher_of(device, 4, pool);
    FAILS(VMMFD_INVALID, vmmfd_publisher_admit(publisher, -1));
    FAILS(VMMFD_INVALID, vmmfd_publisher_admit(publisher, STDERR_FILENO));
    FAILS(VMMFD_INVALID, vmmfd_publisher_event(publisher, NULL, &(bool){false}));
    FAILS(VMMFD_INVALID, vmmfd_publisher_descriptor(publisher, NULL));
    FAILS(VMMFD_INVALID, vmmfd_publisher_listen(publisher, NULL, "/nowhere/socket"));
    vmmfd_subscriber_options_t options = {VMMFD_SUBSCRIBER_OPTIONS, .timeout_ms = 50};
    FAILS(VMMFD_NOT_FOUND, vmmfd_subscriber_connect(device, path, &options, &subscriber));
    options.policy = 3;
    FAILS(VMMFD_INVALID, join(publisher, device, options, &subscriber));
    options.policy = VMMFD_QUEUE;
    FAILS(VMMFD_INVALID, join(publisher, device, options, &subscriber));
    options.queue = 65537;
    FAILS(VMMFD_INVALID, join(publisher, device, options, &subscriber));
    options.policy = VMMFD_LATEST;
    options.queue = 1;
    FAILS(VMMFD_INVALID, join(publisher, device, options, &subscriber));
    options = (vmmfd_subscriber_options_t){VMMFD_SUBSCRIBER_OPTIONS, .held = 65};
    FAILS(VMMFD_INVALID, join(publisher, device, options, &subscriber));
    options = (vmmfd_subscriber_options_t){VMMFD_SUBSCRIBER_OPTIONS, .timeout_ms = 50};
    options.socket = STDERR_FILENO;
    FAILS(VMMFD_INVALID, vmmfd_subscriber_connect(device, NULL, &options, &subscriber));
    int pair[2];
    EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    options.socket = pair[0];
    FAILS(VMMFD_INVALID, vmmfd_subscriber_connect(device, path, &options, &subscriber));
    FAILS(VMMFD_DISCONNECTED, vmmfd_subscriber_connect(device, NULL, &options, &subscriber));
    EXPECT(close(pair[0]) == 0 && close(pair[1]) == 0);
    options = (vmmfd_subscriber_options_t){VMMFD_SUBSCRIBER_OPTIONS};
    /* The publisher refuses. */
    options.policy = VMMFD_EVERY;
    FAILS(VMMFD_DENIED, join(publisher, device, options, &subscriber));
    options.policy = VMMFD_LATEST;
    options.held = 2;
    vmmfd_error_t *error = join(publisher, device, options, &subscriber);
    EXPECT(error != NULL && error->code == VMMFD_SYSTEM && strstr(error->message, "5 buffers, and it has 4") != NULL);
    EXPECT(subscriber == NULL);
    vmmfd_error_free(error);
    options.held = 0;
    /* A wait that the program stops. */
    int stop = eventfd(0, EFD_CLOEXEC);
    options.stop = stop;
    subscriber = joined(publisher, device, options);
    vmmfd_sample_t sample = {.struct_size = sizeof sample};
    FAILS(VMMFD_INVALID, vmmfd_subscriber_receive(subscriber, 0, NULL));
    FAILS(VMMFD_INVALID, vmmfd_subscriber_descriptor(subscriber, NULL));
    FAILS(VMMFD_INVALID, vmmfd_subscriber_receive((vmmfd_subscriber_t *)publisher, 0, &sample));
    EXPECT(eventfd_write(stop, 1) == 0);
    FAILS(VMMFD_INTERRUPTED, vmmfd_subscriber_receive(subscriber, VMMFD_FOREVER, &sample));
    vmmfd_subscriber_free(subscriber);
    FAILS(VMMFD_INVALID, vmmfd_subscriber_receive(subscriber, 0, &sample));
    EXPECT(close(stop) == 0);
    vmmfd_publisher_free(publisher);
}

/* Opens a topic, also if the broker has not noticed yet that the former publisher is gone. */
static void open_topic(const vmmfd_publisher_t *publisher, const char *path, const char *topic) {
    vmmfd_broker_t *broker;
    vmmfd_error_t *error;
    CHECK(vmmfd_broker_connect(path, NULL, &broker));
    while ((error = vmmfd_publisher_listen(publisher, broker, topic)) != NULL) {
        EXPECT(error->code == VMMFD_EXISTS);
        vmmfd_error_free(error);
        usleep(1000);
    }
    vmmfd_broker_free(broker);
}

/* The other processes: every stream BACKEND ROLE PATH. */
void be_stream_peer(const char *backend, const char *role, const char *path) {
    vmmfd_device_t *device;
    vmmfd_subscriber_t *subscriber;
    vmmfd_sample_t sample = {.struct_size = sizeof sample, .skipped = 1};
    CHECK(vmmfd_device_open(backend, NULL, &device));
    if (strcmp(role, "topic") == 0) {
        vmmfd_publisher_t *publisher =
            publisher_of(device, 4, (vmmfd_publisher_options_t){VMMFD_PUBLISHER_OPTIONS, .history = 1});
        open_topic(publisher, path, "every/stream/other");
        publish(publisher, 1);
        pause();
    } else if (strcmp(role, "finish") == 0 || strcmp(role, "crash") == 0) {
        vmmfd_publisher_t *publisher = publisher_of(device, 3, (vmmfd_publisher_options_t){VMMFD_PUBLISHER_OPTIONS});
        CHECK(vmmfd_publisher_listen(publisher, NULL, path));
        event_of(publisher, VMMFD_STREAM_JOINED);
        publish(publisher, 1);
        if (role[0] == 'c')
            pause();
        CHECK(vmmfd_publisher_finish(publisher, LIMIT));
        vmmfd_publisher_free(publisher);
    } else {
        vmmfd_subscriber_options_t options = {VMMFD_SUBSCRIBER_OPTIONS};
        options.policy = strcmp(role, "every") == 0 ? VMMFD_EVERY : VMMFD_LATEST;
        CHECK(vmmfd_subscriber_connect(device, path, &options, &subscriber));
        for (uint64_t number = 1; number <= 20; number++) {
            sample = receive(subscriber, number, 0);
            if (options.policy == VMMFD_LATEST)
                pause();
            vmmfd_memory_free(sample.memory);
        }
        EXPECT(receive_none(subscriber, LIMIT, getppid()) == VMMFD_ENDED);
        vmmfd_subscriber_free(subscriber);
    }
    vmmfd_device_free(device);
}

static pid_t start(const char *program, const char *backend, const char *role, const char *path) {
    pid_t child = fork();
    if (child == 0) {
        execl(program, program, "stream", backend, role, path, (char *)NULL);
        _exit(1);
    }
    EXPECT(child > 0);
    return child;
}

static void expect_exit(pid_t child, int expected) {
    int status;
    EXPECT(waitpid(child, &status, 0) == child && status == expected);
}

/* Two subscribers get all buffers. A third is killed while it has one, which then returns. */
static void test_subscribers(const vmmfd_device_t *device, const char *backend, const char *program, const char *path) {
    vmmfd_publisher_options_t pool = {VMMFD_PUBLISHER_OPTIONS, .every_ms = VMMFD_FOREVER};
    vmmfd_publisher_t *publisher = publisher_of(device, 5, pool);
    vmmfd_subscriber_options_t options = {VMMFD_SUBSCRIBER_OPTIONS};
    vmmfd_subscriber_t *late;
    CHECK(vmmfd_publisher_listen(publisher, NULL, path));
    pid_t healthy[2], killed = start(program, backend, "hold", path);
    EXPECT(event_of(publisher, VMMFD_STREAM_JOINED) == killed);
    for (int i = 0; i < 2; i++) {
        healthy[i] = start(program, backend, "every", path);
        EXPECT(event_of(publisher, VMMFD_STREAM_JOINED) == healthy[i]);
    }
    for (uint64_t number = 1; number <= 10; number++)
        publish(publisher, number);
    vmmfd_error_t *full = join(publisher, device, options, &late);
    EXPECT(full != NULL && full->code == VMMFD_SYSTEM);
    vmmfd_error_free(full);
    EXPECT(kill(killed, SIGKILL) == 0);
    expect_exit(killed, SIGKILL);
    EXPECT(event_of(publisher, VMMFD_STREAM_LOST) == killed);
    for (uint64_t number = 11; number <= 20; number++)
        publish(publisher, number);
    /* Its room is free once the library has seen the exit. */
    while ((full = join(publisher, device, options, &late)) != NULL) {
        EXPECT(full->code == VMMFD_SYSTEM);
        vmmfd_error_free(full);
        usleep(1000);
    }
    CHECK(vmmfd_publisher_finish(publisher, LIMIT));
    EXPECT(receive_none(late, LIMIT, getpid()) == VMMFD_ENDED);
    expect_exit(healthy[0], 0);
    expect_exit(healthy[1], 0);
    vmmfd_subscriber_free(late);
    vmmfd_publisher_free(publisher);
}

/* A publisher that finishes, and one that is killed. */
static void test_publishers(const vmmfd_device_t *device, const char *backend, const char *program, const char *path) {
    for (int crashes = 0; crashes < 2; crashes++) {
        vmmfd_subscriber_t *subscriber;
        pid_t publisher = start(program, backend, crashes ? "crash" : "finish", path);
        CHECK(vmmfd_subscriber_connect(device, path, NULL, &subscriber));
        vmmfd_sample_t sample = receive(subscriber, 1, 0);
        EXPECT(sample.pid == publisher);
        EXPECT(!crashes || kill(publisher, SIGKILL) == 0);
        EXPECT(receive_none(subscriber, LIMIT, publisher) == (crashes ? VMMFD_CRASHED : VMMFD_ENDED) && is_whole(&sample));
        vmmfd_memory_free(sample.memory);
        expect_exit(publisher, crashes ? SIGKILL : 0);
        vmmfd_subscriber_free(subscriber);
    }
}

/* Receives a result of a topic. Without a sample, the caller frees its error. */
static vmmfd_sample_t receive_of(const vmmfd_subscriber_t *subscriber, const char *topic, vmmfd_received_t result) {
    vmmfd_sample_t sample = {.struct_size = sizeof sample};
    struct pollfd waiting = {.events = POLLIN};
    CHECK(vmmfd_subscriber_descriptor(subscriber, &waiting.fd));
    while (sample.result == VMMFD_NOTHING) {
        EXPECT(poll(&waiting, 1, LIMIT) == 1);
        CHECK(vmmfd_subscriber_receive(subscriber, 0, &sample));
    }
    EXPECT(sample.result == result && strcmp(sample.topic, topic) == 0 && sample.epoch != 0);
    EXPECT((sample.memory != NULL) == (result == VMMFD_SAMPLE) && (sample.error != NULL) == (result == VMMFD_FAILED));
    EXPECT(sample.memory == NULL || is_whole(&sample));
    vmmfd_memory_free(sample.memory);
    return sample;
}

/* One follower, and the publishers of two topics: in this process, and in another that is killed. */
static void test_topics(const vmmfd_device_t *device, const char *backend, const char *program, const char *path) {
    const char *left = "every/stream/left";
    vmmfd_publisher_options_t pool = {VMMFD_PUBLISHER_OPTIONS, .mode = 0644};
    vmmfd_publisher_t *publisher = publisher_of(device, 4, pool), *second;
    vmmfd_subscriber_options_t options = {VMMFD_SUBSCRIBER_OPTIONS, .prefix = true, .timeout_ms = 50}, every = {VMMFD_SUBSCRIBER_OPTIONS};
    vmmfd_subscriber_t *subscriber, *refused;
    vmmfd_broker_t *broker;
    CHECK(vmmfd_broker_connect(path, NULL, &broker));
    FAILS(VMMFD_INVALID, vmmfd_subscriber_connect(device, "/tmp/vmmfd-every-no-publisher", &options, &subscriber));
    options.timeout_ms = 0;
    options.broker = every.broker = broker;
    FAILS(VMMFD_INVALID, vmmfd_subscriber_connect(device, NULL, &options, &subscriber));
    FAILS(VMMFD_INVALID, vmmfd_subscriber_connect(device, "every/stream/", &every, &subscriber));
    options.socket = STDERR_FILENO;
    FAILS(VMMFD_INVALID, vmmfd_subscriber_connect(device, NULL, &options, &subscriber));
    options.socket = -1;
    options.history = 1;
    CHECK(vmmfd_subscriber_connect(device, "every/stream/", &options, &subscriber));
    EXPECT(receive_none(subscriber, 1, 0) == VMMFD_NOTHING);

    FAILS(VMMFD_INVALID, vmmfd_publisher_listen(publisher, broker, NULL));
    FAILS(VMMFD_INVALID, vmmfd_publisher_listen(publisher, broker, "/"));
    open_topic(publisher, path, left);
    pool.mode = 0777;
    second = publisher_of(device, 4, pool);
    FAILS(VMMFD_INVALID, vmmfd_publisher_listen(second, broker, "every/stream/second"));
    vmmfd_publisher_free(second);
    second = publisher_of(device, 4, (vmmfd_publisher_options_t){VMMFD_PUBLISHER_OPTIONS});
    FAILS(VMMFD_EXISTS, vmmfd_publisher_listen(second, broker, left));
    uint64_t epoch = receive_of(subscriber, left, VMMFD_JOINED).epoch;
    publish(publisher, 1);
    EXPECT(receive_of(subscriber, left, VMMFD_SAMPLE).epoch == epoch);
    every.policy = VMMFD_EVERY;
    CHECK(vmmfd_subscriber_connect(device, left, &every, &refused));
    /* Nothing of it ends with the connection. */
    vmmfd_broker_free(broker);
    vmmfd_sample_t failed = receive_of(refused, left, VMMFD_FAILED);
    FAILS(VMMFD_DENIED, failed.error);
    vmmfd_subscriber_free(refused);
    CHECK(vmmfd_publisher_finish(publisher, LIMIT));
    receive_of(subscriber, left, VMMFD_ENDED);
    vmmfd_publisher_free(publisher);

    open_topic(second, path, left);
    EXPECT(receive_of(subscriber, left, VMMFD_RESET).epoch != epoch);
    vmmfd_publisher_free(second);
    EXPECT(receive_of(subscriber, left, VMMFD_CRASHED).pid == getpid());

    pid_t child = start(program, backend, "topic", path);
    receive_of(subscriber, "every/stream/other", VMMFD_JOINED);
    receive_of(subscriber, "every/stream/other", VMMFD_SAMPLE);
    EXPECT(kill(child, SIGKILL) == 0);
    expect_exit(child, SIGKILL);
    EXPECT(receive_of(subscriber, "every/stream/other", VMMFD_CRASHED).pid == child);
    EXPECT(receive_none(subscriber, 0, 0) == VMMFD_NOTHING);
    vmmfd_subscriber_free(subscriber);
}

void test_stream(const vmmfd_device_t *device, const char *backend, const char *program, const char *broker) {
    char folder[] = "/tmp/vmmfd-stream-XXXXXX", path[64];
    EXPECT(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/socket", folder);
    test_latest(device);
    test_queue_and_history(device);
    test_every(device);
    test_eviction(device);
    test_descriptors(device);
    test_format(device);
    test_loan(device);
    test_refusals(device);
    test_subscribers(device, backend, program, path);
    test_publishers(device, backend, program, path);
    test_topics(device, backend, program, broker);
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", folder);
    EXPECT(system(command) == 0);
}
