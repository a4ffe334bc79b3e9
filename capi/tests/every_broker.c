/* The broker's functions, on a running broker. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "parts.h"

static const char *place;

/* Puts two arrays, of 3 and 5 numbers, as a version. */
static uint64_t put(const vmmfd_broker_t *broker, const vmmfd_device_t *device, const char *name, uint32_t first,
                    const vmmfd_put_options_t *options) {
    vmmfd_array_t *one = numbers(device, 3, first), *other = numbers(device, 5, first + 100);
    vmmfd_named_array_t arrays[2] = {{.name = "one", .array = one}, {.name = "other", .array = other}};
    uint64_t version;
    CHECK(vmmfd_broker_put(broker, name, arrays, 2, options, &version));
    FAILS(VMMFD_EXISTS, vmmfd_broker_put(broker, name, arrays, 2, NULL, NULL));
    vmmfd_array_free(one);
    vmmfd_array_free(other);
    return version;
}

/* Waits with poll(2), as an event loop does, and returns the next event's kind. */
static vmmfd_event_kind_t next(const vmmfd_watch_t *watch, const char *name, uint64_t version) {
    struct pollfd ready = {.events = POLLIN};
    vmmfd_event_t event = {.struct_size = sizeof event};
    bool found;
    CHECK(vmmfd_watch_descriptor(watch, &ready.fd));
    EXPECT(poll(&ready, 1, 20000) == 1);
    CHECK(vmmfd_watch_next(watch, 0, &event, &found));
    EXPECT(found && strcmp(event.name, name) == 0 && event.version == version && event.at_ms > 0);
    return event.kind;
}

static void test_listing(const vmmfd_broker_t *broker, const char *name) {
    vmmfd_listing_t *listing;
    CHECK(vmmfd_broker_list(broker, name, &listing));
    EXPECT(listing->count == 1 && strcmp(listing->objects[0]->name, name) == 0 && listing->objects[0]->metadata == NULL);
    EXPECT(listing->objects[0]->arrays == 2 && listing->objects[0]->mode == 0600 && listing->objects[0]->owner == getuid());
    vmmfd_listing_free(listing);
    CHECK(vmmfd_broker_stat(broker, name, 1, &listing));
    EXPECT(listing->count == 1 && strcmp(listing->objects[0]->metadata, "{\"step\":1}") == 0);
    vmmfd_listing_free(listing);
    FAILS(VMMFD_NOT_FOUND, vmmfd_broker_stat(broker, "every/none", 0, &listing));
    EXPECT(listing == NULL);
    vmmfd_listing_free(NULL);
}

static uint64_t address(const vmmfd_array_t *array) {
    vmmfd_memory_t *memory;
    vmmfd_memory_info_t info = {.struct_size = sizeof info};
    CHECK(vmmfd_array_memory(array, &memory));
    CHECK(vmmfd_memory_info(memory, &info));
    vmmfd_memory_free(memory);
    EXPECT(!info.writable && info.segments == 0);
    return info.address;
}

/* A lease shows version 1, then version 2 at the same addresses, and is parked in between. */
static void test_lease(const vmmfd_broker_t *broker, const vmmfd_device_t *device, const char *name) {
    vmmfd_lease_t *lease;
    vmmfd_array_t *array;
    vmmfd_prepared_t *prepared;
    vmmfd_get_options_t options = {VMMFD_GET_OPTIONS, .wait_ms = 20000, .expect = "{\"step\": 1}"};
    options.expect_owner = true;
    options.owner = getuid();
    CHECK(vmmfd_broker_get(broker, device, name, &options, &lease));
    vmmfd_lease_info_t *first, *info;
    CHECK(vmmfd_lease_info(lease, &first));
    EXPECT(first->version == 1 && first->held && !first->parked && first->created_ms > 0 && first->owner == getuid());
    EXPECT(strcmp(first->name, name) == 0 && first->part_count == 1 && strcmp(first->parts[0]->name, "all") == 0);
    EXPECT(first->parts[0]->array_count == 2 && strcmp(first->parts[0]->arrays[1], "other") == 0);
    EXPECT(strcmp(first->parts[0]->digest, "test:1") == 0 && first->parts[0]->size > 0);
    CHECK(vmmfd_lease_array(lease, NULL, "other", &array));
    uint64_t at = address(array);
    EXPECT(number(array, 4) == 104);
    vmmfd_put_options_t replace = {VMMFD_PUT_OPTIONS, .condition = VMMFD_PUT_VERSION, .version = 1};
    EXPECT(put(broker, device, name, 20, &replace) == 2);
    options = (vmmfd_get_options_t){VMMFD_GET_OPTIONS, .newer_than = 1, .wait_ms = 20000};
    CHECK(vmmfd_lease_prepare(lease, &options, &prepared));
    EXPECT(number(array, 4) == 104);
    DLManagedTensorVersioned *tensor;
    CHECK(vmmfd_lease_switch(lease, prepared));
    EXPECT(number(array, 4) == 124 && address(array) == at);
    CHECK(vmmfd_lease_info(lease, &info));
    EXPECT(info->version == 2 && strcmp(info->metadata, "{}") == 0);
    vmmfd_lease_info_free(info);
    EXPECT(strcmp(first->name, name) == 0 && strcmp(first->metadata, "{\"step\":1}") == 0);
    vmmfd_lease_info_free(first);
    CHECK(vmmfd_lease_switch(lease, prepared));
    EXPECT(number(array, 0) == 100);
    CHECK(vmmfd_lease_switch(lease, prepared));
    vmmfd_prepared_free(prepared);
    FAILS(VMMFD_INVALID, vmmfd_lease_switch(lease, prepared));
    FAILS(VMMFD_INVALID, vmmfd_lease_unpark(lease, NULL));
    CHECK(vmmfd_lease_park(lease, false));
    FAILS(VMMFD_INVALID, vmmfd_array_to_dlpack(array, &tensor));
    CHECK(vmmfd_lease_info(lease, &info));
    EXPECT(info->parked && !info->held);
    vmmfd_lease_info_free(info);
    CHECK(vmmfd_lease_unpark(lease, NULL));
    EXPECT(number(array, 4) == 124 && address(array) == at);
    vmmfd_lease_free(lease);
    /* The array keeps the lease. */
    EXPECT(number(array, 0) == 120);
    vmmfd_array_free(array);
    FAILS(VMMFD_INVALID, vmmfd_lease_info(lease, &info));
    EXPECT(info == NULL);
    vmmfd_lease_info_free(NULL);
    options = (vmmfd_get_options_t){VMMFD_GET_OPTIONS, .expect = "{\"step\": 7}"};
    FAILS(VMMFD_DIFFERS, vmmfd_broker_get(broker, device, name, &options, &lease));
    options.expect = "[]";
    FAILS(VMMFD_INVALID, vmmfd_broker_get(broker, device, name, &options, &lease));
}

/* Waits until a lease is recalled, and frees it. */
static void *give_up(void *lease) {
    struct timespec pause = {.tv_nsec = 1000 * 1000};
    bool recalled = false;
    while (!recalled && nanosleep(&pause, NULL) == 0)
        CHECK(vmmfd_lease_recalled(lease, &recalled));
    vmmfd_lease_free(lease);
    return NULL;
}

/* One holder keeps its lease, another one frees it when it is asked. */
static void test_recall(const vmmfd_broker_t *broker, const vmmfd_device_t *device, const char *name) {
    vmmfd_lease_t *lease, *other;
    vmmfd_recall_t *recall;
    pthread_t thread;
    bool recalled = true;
    vmmfd_put_options_t any = {VMMFD_PUT_OPTIONS, .condition = VMMFD_PUT_ANY};
    put(broker, device, name, 0, &any);
    CHECK(vmmfd_broker_get(broker, device, name, NULL, &lease));
    CHECK(vmmfd_lease_recalled(lease, &recalled));
    EXPECT(!recalled);
    CHECK(vmmfd_broker_recall(broker, name, 0, false, 0, &recall));
    EXPECT(recall->holder_count == 1 && !recall->free && recall->kept);
    const vmmfd_holder_t *holder = recall->holders[0];
    EXPECT(holder->pid == getpid() && holder->uid == getuid() && holder->version == 1 && !holder->acknowledged);
    /* A checker of memory has its own name. */
    EXPECT(strlen(holder->command) > 0 && holder->size >= 8 * sizeof(uint32_t));
    vmmfd_recall_free(recall);
    give_up(lease);
    CHECK(vmmfd_broker_get(broker, device, name, NULL, &other));
    CHECK(vmmfd_lease_recalled(other, &recalled));
    EXPECT(!recalled);
    put(broker, device, name, 0, &any);
    EXPECT(pthread_create(&thread, NULL, give_up, other) == 0);
    CHECK(vmmfd_broker_recall(broker, name, 0, true, 20000, &recall));
    EXPECT(recall->holder_count == 1 && recall->holders[0]->acknowledged && recall->free && !recall->kept);
    vmmfd_recall_free(recall);
    EXPECT(pthread_join(thread, NULL) == 0);
    FAILS(VMMFD_INVALID, vmmfd_lease_recalled(other, &recalled));
    CHECK(vmmfd_broker_recall(broker, name, 2, false, 20000, &recall));
    EXPECT(recall->holder_count == 0 && !recall->free && recall->kept);
    vmmfd_recall_free(recall);
    FAILS(VMMFD_INVALID, vmmfd_broker_recall(broker, name, 2, true, 0, &recall));
    EXPECT(recall == NULL);
    FAILS(VMMFD_NOT_FOUND, vmmfd_broker_recall(broker, name, 7, false, 0, &recall));
    CHECK(vmmfd_broker_delete(broker, name));
    vmmfd_recall_free(NULL);
}

/* Arguments that contradict themselves, or exceed a limit. */
static void test_arguments(const vmmfd_broker_t *broker, const vmmfd_device_t *device) {
    vmmfd_array_t *array = numbers(device, 1, 0);
    vmmfd_named_array_t named = {.name = "one", .array = array};
    vmmfd_listing_t *listing;
    vmmfd_watch_t *watch;
    vmmfd_lease_t *lease;
    char prefix[300];
    FAILS(VMMFD_INVALID, vmmfd_broker_put(broker, "every/no", NULL, 0, NULL, NULL));
    FAILS(VMMFD_INVALID, vmmfd_broker_put(broker, "every/no", &named, SIZE_MAX, NULL, NULL));
    FAILS(VMMFD_INVALID, vmmfd_broker_put(broker, "every/no", &named, (size_t)1 << 50, NULL, NULL));
    vmmfd_put_options_t wrong[] = {
        {VMMFD_PUT_OPTIONS, .idle_ms = 5},
        {VMMFD_PUT_OPTIONS, .version = 5},
        {VMMFD_PUT_OPTIONS, .condition = VMMFD_PUT_ANY, .version = 5},
        {VMMFD_PUT_OPTIONS, .lifetime = VMMFD_WITH_MAKER, .idle_ms = 5},
        {VMMFD_PUT_OPTIONS, .condition = 9},
        {VMMFD_PUT_OPTIONS, .lifetime = 9},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        FAILS(VMMFD_INVALID, vmmfd_broker_put(broker, "every/no", &named, 1, &wrong[i], NULL));
    vmmfd_array_free(array);
    vmmfd_get_options_t unused[] = {
        {VMMFD_GET_OPTIONS, .owner = 5},
        {VMMFD_GET_OPTIONS, .parts = (const char *[]){"x"}},
    };
    for (size_t i = 0; i < sizeof unused / sizeof *unused; i++)
        FAILS(VMMFD_INVALID, vmmfd_broker_get(broker, device, "every/no", &unused[i], &lease));
    FAILS(VMMFD_INVALID, vmmfd_broker_delete(broker, NULL));
    FAILS(VMMFD_INVALID, vmmfd_broker_delete(broker, "\xff"));
    snprintf(prefix, sizeof prefix, "%0256d", 0);
    FAILS(VMMFD_INVALID, vmmfd_broker_list(broker, prefix, &listing));
    FAILS(VMMFD_INVALID, vmmfd_broker_watch(broker, prefix, &watch));
    CHECK(vmmfd_broker_list(broker, prefix + 1, &listing));
    vmmfd_listing_free(listing);
}

/* Two parts have an array of the same name. */
static void test_parts(const vmmfd_broker_t *broker, const vmmfd_device_t *device, const char *name) {
    vmmfd_array_t *arrays[2] = {numbers(device, 1, 10), numbers(device, 1, 20)}, *found;
    vmmfd_named_array_t named[3] = {{"x", "w", arrays[0]}, {"y", "w", arrays[1]}, {"y", "own", arrays[1]}};
    vmmfd_lease_t *lease;
    uint64_t version;
    CHECK(vmmfd_broker_put(broker, name, named, 3, NULL, &version));
    vmmfd_put_options_t replace = {VMMFD_PUT_OPTIONS, .condition = VMMFD_PUT_VERSION, .version = version};
    CHECK(vmmfd_broker_put(broker, name, named, 3, &replace, &version));
    EXPECT(version == replace.version + 1);
    FAILS(VMMFD_DIFFERS, vmmfd_broker_put(broker, name, named, 3, &replace, &version));
    EXPECT(version == 0);
    vmmfd_put_options_t digest = {VMMFD_PUT_OPTIONS, .condition = VMMFD_PUT_ANY, .digest = "of which part?"};
    FAILS(VMMFD_INVALID, vmmfd_broker_put(broker, name, named, 3, &digest, NULL));
    vmmfd_array_free(arrays[0]);
    vmmfd_array_free(arrays[1]);
    CHECK(vmmfd_broker_get(broker, device, name, NULL, &lease));
    FAILS(VMMFD_INVALID, vmmfd_lease_array(lease, NULL, "w", &found));
    FAILS(VMMFD_NOT_FOUND, vmmfd_lease_array(lease, "z", "w", &found));
    FAILS(VMMFD_NOT_FOUND, vmmfd_lease_array(lease, "x", "own", &found));
    vmmfd_error_t *absent = vmmfd_lease_array(lease, NULL, "third", &found);
    EXPECT(absent->code == VMMFD_NOT_FOUND && strstr(absent->message, "`own`") != NULL && absent->hint == NULL);
    vmmfd_error_free(absent);
    for (int i = 0; i < 2; i++) {
        CHECK(vmmfd_lease_array(lease, named[i].part, "w", &found));
        EXPECT(number(found, 0) == (i + 1) * 10u);
        vmmfd_array_free(found);
    }
    vmmfd_lease_free(lease);
    vmmfd_lease_info_t *info;
    vmmfd_get_options_t options = {VMMFD_GET_OPTIONS, .parts = (const char *[]){"y"}, .part_count = 1};
    CHECK(vmmfd_broker_get(broker, device, name, &options, &lease));
    CHECK(vmmfd_lease_info(lease, &info));
    EXPECT(info->part_count == 1 && strcmp(info->parts[0]->name, "y") == 0 && info->parts[0]->array_count == 2);
    vmmfd_lease_info_free(info);
    CHECK(vmmfd_lease_array(lease, NULL, "w", &found));
    EXPECT(number(found, 0) == 20);
    vmmfd_array_free(found);
    vmmfd_lease_free(lease);
    absent = vmmfd_broker_delete(broker, "every/none");
    EXPECT(absent->code == VMMFD_NOT_FOUND && strstr(absent->hint, "wait") == NULL);
    vmmfd_error_free(absent);
    CHECK(vmmfd_broker_delete(broker, name));
}

/* A fork does not keep the names of its parent's connection, from its first call on. */
static void test_fork_after_connect(const vmmfd_broker_t *broker) {
    int alive[2], called[2];
    char name[64], byte;
    vmmfd_listing_t *listing = NULL;
    EXPECT(pipe(alive) == 0 && pipe(called) == 0);
    snprintf(name, sizeof name, "every/forked-%d", (int)getpid());
    pid_t maker = fork();
    if (maker == 0) {
        vmmfd_device_t *device;
        vmmfd_broker_t *own;
        vmmfd_lease_t *lease;
        CHECK(vmmfd_device_open("host", NULL, &device));
        CHECK(vmmfd_broker_connect(place, NULL, &own));
        vmmfd_named_array_t named = {.name = "one", .array = numbers(device, 1, 1)};
        vmmfd_put_options_t options = {VMMFD_PUT_OPTIONS, .lifetime = VMMFD_WITH_MAKER};
        CHECK(vmmfd_broker_put(own, name, &named, 1, &options, NULL));
        CHECK(vmmfd_broker_get(own, device, name, NULL, &lease));
        if (fork() == 0) {
            close(alive[1]);
            vmmfd_broker_free(own);
            EXPECT(write(called[1], "c", 1) == 1 && read(alive[0], &byte, 1) == 0);
            execlp("true", "true", NULL);
            _exit(1);
        }
        pause();
    }
    close(alive[0]);
    EXPECT(maker > 0 && read(called[0], &byte, 1) == 1);
    CHECK(vmmfd_broker_stat(broker, name, 0, &listing));
    vmmfd_listing_free(listing);
    EXPECT(kill(maker, SIGKILL) == 0 && waitpid(maker, NULL, 0) == maker);
    vmmfd_error_t *error = NULL;
    struct timespec pause = {.tv_nsec = 50 * 1000 * 1000};
    for (int i = 0; error == NULL && i < 400; i++) {
        error = vmmfd_broker_stat(broker, name, 0, &listing);
        vmmfd_listing_free(listing);
        nanosleep(&pause, NULL);
    }
    FAILS(VMMFD_NOT_FOUND, error);
    close(alive[1]);
    close(called[0]);
    close(called[1]);
}

struct meeting {
    char path[128];
    const vmmfd_array_t *array;
};

static void *serve(void *given) {
    struct meeting *meeting = given;
    CHECK(vmmfd_handoff_serve(meeting->path, meeting->array, NULL, NULL));
    return NULL;
}

/* Ends the process unless stdin, stdout and stderr are still closed. There is no place to print to. */
static void expect_closed(int stage) {
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) != -1)
            _exit(stage);
}

/* No descriptor of the library takes the number of stdin, stdout or stderr, if the program has closed them. */
static void test_standard(void) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        vmmfd_device_t *device;
        vmmfd_array_t *array, *taken;
        vmmfd_broker_t *broker;
        vmmfd_watch_t *watch;
        vmmfd_lease_t *lease;
        pthread_t thread;
        struct meeting meeting;
        char name[64];
        for (int fd = 0; fd < 3; fd++)
            close(fd);
        CHECK(vmmfd_device_open("host", NULL, &device));
        array = numbers(device, 4, 1);
        expect_closed(2);
        meeting.array = array;
        snprintf(meeting.path, sizeof meeting.path, "%s-%d", place, (int)getpid());
        EXPECT(pthread_create(&thread, NULL, serve, &meeting) == 0);
        CHECK(vmmfd_handoff_take(device, meeting.path, NULL, &taken));
        /* A thread that serves may hold one for an instant. */
        EXPECT(pthread_join(thread, NULL) == 0 && number(taken, 3) == 4);
        expect_closed(3);
        CHECK(vmmfd_broker_connect(place, NULL, &broker));
        expect_closed(4);
        snprintf(name, sizeof name, "every/closed-%d", (int)getpid());
        vmmfd_named_array_t named = {.name = "one", .array = array};
        vmmfd_put_options_t options = {VMMFD_PUT_OPTIONS, .lifetime = VMMFD_WITH_MAKER};
        CHECK(vmmfd_broker_put(broker, name, &named, 1, &options, NULL));
        CHECK(vmmfd_broker_get(broker, device, name, NULL, &lease));
        expect_closed(5);
        CHECK(vmmfd_broker_watch(broker, name, &watch));
        expect_closed(6);
        /* Not an exit, at which valgrind reports the parent's objects. */
        CHECK(vmmfd_broker_delete(broker, name));
        execlp("true", "true", NULL);
        _exit(1);
    }
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    EXPECT(status == 0);
}

static void *wait_for_ever(void *broker) {
    vmmfd_get_options_t options = {VMMFD_GET_OPTIONS, .wait_ms = VMMFD_FOREVER};
    vmmfd_lease_t *lease;
    FAILS(VMMFD_INTERRUPTED, vmmfd_broker_get(broker, NULL, "every/never", &options, &lease));
    return NULL;
}

static void *prepare_for_ever(void *lease) {
    vmmfd_get_options_t options = {VMMFD_GET_OPTIONS, .newer_than = 99, .wait_ms = VMMFD_FOREVER};
    vmmfd_prepared_t *prepared;
    FAILS(VMMFD_INTERRUPTED, vmmfd_lease_prepare(lease, &options, &prepared));
    return NULL;
}

/* Returns the code with which a wait for an event ends. */
static void *wait_for_event(void *watch) {
    vmmfd_event_t event = {.struct_size = sizeof event};
    bool found;
    vmmfd_error_t *error = vmmfd_watch_next(watch, VMMFD_FOREVER, &event, &found);
    EXPECT(error != NULL && !found);
    uintptr_t code = error->code;
    vmmfd_error_free(error);
    return (void *)code;
}

/* An interruption and `stop` each end a wait for an event. */
static void test_interrupted_watch(void) {
    struct timespec pause = {.tv_nsec = 20 * 1000 * 1000};
    for (int way = 0; way < 2; way++) {
        vmmfd_broker_t *broker;
        vmmfd_watch_t *watch;
        pthread_t thread;
        void *code;
        vmmfd_broker_options_t options = {VMMFD_BROKER_OPTIONS};
        options.stop = eventfd(0, EFD_CLOEXEC);
        CHECK(vmmfd_broker_connect(place, &options, &broker));
        CHECK(vmmfd_broker_watch(broker, "every/never", &watch));
        EXPECT(pthread_create(&thread, NULL, wait_for_event, watch) == 0);
        do {
            nanosleep(&pause, NULL);
            if (way == 0)
                CHECK(vmmfd_broker_interrupt(broker));
            else
                EXPECT(eventfd_write(options.stop, 1) == 0);
        } while (pthread_tryjoin_np(thread, &code) != 0);
        EXPECT((uintptr_t)code == VMMFD_INTERRUPTED);
        vmmfd_watch_free(watch);
        vmmfd_broker_free(broker);
        EXPECT(close(options.stop) == 0);
    }
}

/* Freeing a watch ends a wait for an event. A thread that finds the watch freed was late: the next attempt gives it more time. */
static void test_freed_watch(void) {
    vmmfd_broker_t *broker;
    vmmfd_watch_t *watch;
    pthread_t thread;
    void *code;
    useconds_t pause = 20 * 1000;
    CHECK(vmmfd_broker_connect(place, NULL, &broker));
    do {
        CHECK(vmmfd_broker_watch(broker, "every/never", &watch));
        EXPECT(pthread_create(&thread, NULL, wait_for_event, watch) == 0);
        usleep(pause);
        vmmfd_watch_free(watch);
        EXPECT(pthread_join(thread, &code) == 0);
        pause *= 2;
    } while ((uintptr_t)code == VMMFD_INVALID);
    EXPECT((uintptr_t)code == VMMFD_INTERRUPTED);
    vmmfd_broker_free(broker);
}

/* `stop` ends the start of a watch of a broker that does not answer: a link to the broker now leads to a socket that accepts nothing. */
static void test_stopped_start(void) {
    vmmfd_broker_t *broker;
    vmmfd_watch_t *watch;
    vmmfd_broker_options_t options = {VMMFD_BROKER_OPTIONS, .timeout_ms = 20000};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    /* Readable during the call. */
    const struct itimerspec soon = {.it_value.tv_nsec = 50 * 1000 * 1000};
    snprintf(address.sun_path, sizeof address.sun_path, "/tmp/vmmfd-every-%d", (int)getpid());
    EXPECT(symlink(place, address.sun_path) == 0);
    options.stop = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    CHECK(vmmfd_broker_connect(address.sun_path, &options, &broker));
    int silent = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    EXPECT(unlink(address.sun_path) == 0 && bind(silent, (struct sockaddr *)&address, sizeof address) == 0);
    EXPECT(listen(silent, 1) == 0 && timerfd_settime(options.stop, 0, &soon, NULL) == 0);
    FAILS(VMMFD_INTERRUPTED, vmmfd_broker_watch(broker, "", &watch));
    EXPECT(watch == NULL && unlink(address.sun_path) == 0 && close(silent) == 0 && close(options.stop) == 0);
    vmmfd_broker_free(broker);
}

/* A get that waits does not delay the requests of other threads. */
static void test_requests_beside_wait(void) {
    vmmfd_broker_t *broker;
    vmmfd_listing_t *listing;
    pthread_t thread;
    vmmfd_broker_options_t options = {VMMFD_BROKER_OPTIONS, .timeout_ms = 20000};
    struct timespec pause = {.tv_nsec = 20 * 1000 * 1000};
    CHECK(vmmfd_broker_connect(place, &options, &broker));
    EXPECT(pthread_create(&thread, NULL, wait_for_ever, broker) == 0);
    for (int i = 0; i < 10; i++) {
        nanosleep(&pause, NULL);
        CHECK(vmmfd_broker_list(broker, "", &listing));
        vmmfd_listing_free(listing);
    }
    do
        CHECK(vmmfd_broker_interrupt(broker));
    while (nanosleep(&pause, NULL) == 0 && pthread_tryjoin_np(thread, NULL) != 0);
    vmmfd_broker_free(broker);
}

/* An interrupted wait ends no lease of its connection. */
static void test_stop(const vmmfd_device_t *device) {
    vmmfd_broker_t *broker;
    vmmfd_lease_t *lease;
    vmmfd_lease_info_t *info;
    pthread_t thread;
    char name[64];
    snprintf(name, sizeof name, "every/held-%d", (int)getpid());
    CHECK(vmmfd_broker_connect(place, NULL, &broker));
    EXPECT(put(broker, device, name, 0, NULL) == 1);
    CHECK(vmmfd_broker_get(broker, device, name, NULL, &lease));
    for (int prepares = 0; prepares < 2; prepares++) {
        void *(*wait)(void *) = prepares ? prepare_for_ever : wait_for_ever;
        EXPECT(pthread_create(&thread, NULL, wait, prepares ? (void *)lease : (void *)broker) == 0);
        /* Until the other thread waits. */
        struct timespec pause = {.tv_nsec = 20 * 1000 * 1000};
        do
            CHECK(vmmfd_broker_interrupt(broker));
        while (nanosleep(&pause, NULL) == 0 && pthread_tryjoin_np(thread, NULL) != 0);
        CHECK(vmmfd_lease_info(lease, &info));
        EXPECT(info->held);
        vmmfd_lease_info_free(info);
    }
    CHECK(vmmfd_broker_delete(broker, name));
    vmmfd_lease_free(lease);
    vmmfd_broker_free(broker);
}

void test_gone(const char *path, pid_t broker) {
    vmmfd_broker_t *connected, *other = NULL;
    vmmfd_broker_options_t options = {VMMFD_BROKER_OPTIONS, .timeout_ms = 300, .wait_ms = 20000};
    vmmfd_listing_t *listing;
    vmmfd_error_t *error;
    CHECK(vmmfd_broker_connect(path, &options, &connected));
    FAILS(VMMFD_NOT_FOUND, vmmfd_broker_stat(connected, "every/none", 0, &listing));
    EXPECT(kill(broker, SIGTERM) == 0);
    options.wait_ms = 1;
    vmmfd_code_t code = VMMFD_INTERNAL;
    while (code != VMMFD_NOT_FOUND) {
        error = vmmfd_broker_connect(path, &options, &other);
        code = error == NULL ? VMMFD_INTERNAL : error->code;
        vmmfd_error_free(error);
        vmmfd_broker_free(other);
    }
    for (int i = 0; i < 2; i++)
        FAILS(VMMFD_DISCONNECTED, vmmfd_broker_stat(connected, "every/none", 0, &listing));
    FAILS(VMMFD_DISCONNECTED, vmmfd_broker_watch(connected, "", &(vmmfd_watch_t *){NULL}));
    vmmfd_broker_free(connected);
}

void test_broker(const vmmfd_device_t *device, const char *path) {
    vmmfd_broker_t *broker, *none;
    vmmfd_watch_t *watch;
    vmmfd_broker_options_t options = {VMMFD_BROKER_OPTIONS, .timeout_ms = 20000};
    char name[64];
    place = path;
    snprintf(name, sizeof name, "every/%d", (int)getpid());
    CHECK(vmmfd_broker_connect(path, &options, &broker));
    options.wait_ms = 50;
    vmmfd_error_t *absent = vmmfd_broker_connect("/tmp/vmmfd-no-broker", &options, &none);
    EXPECT(absent != NULL && absent->code == VMMFD_NOT_FOUND && strstr(absent->message, "within 50ms") != NULL);
    vmmfd_error_free(absent);
    EXPECT(none == NULL);
    CHECK(vmmfd_broker_watch(broker, name, &watch));
    vmmfd_event_t event = {.struct_size = sizeof event};
    bool found;
    CHECK(vmmfd_watch_next(watch, 0, &event, &found));
    EXPECT(!found && event.kind == VMMFD_EVENT_UNKNOWN);
    vmmfd_put_options_t with = {VMMFD_PUT_OPTIONS, .metadata = "{\"step\": 1}", .digest = "test:1"};
    EXPECT(put(broker, device, name, 0, &with) == 1);
    EXPECT(next(watch, name, 1) == VMMFD_EVENT_PUBLISHED);
    test_listing(broker, name);
    test_lease(broker, device, name);
    EXPECT(next(watch, name, 1) == VMMFD_EVENT_LEASED);
    EXPECT(next(watch, name, 2) == VMMFD_EVENT_REPLACED);
    CHECK(vmmfd_broker_delete(broker, name));
    FAILS(VMMFD_NOT_FOUND, vmmfd_broker_delete(broker, name));
    test_arguments(broker, device);
    test_parts(broker, device, name);
    snprintf(name, sizeof name, "every/recall-%d", (int)getpid());
    test_recall(broker, device, name);
    test_stop(device);
    test_interrupted_watch();
    test_freed_watch();
    test_stopped_start();
    test_requests_beside_wait();
    test_standard();
    test_fork_after_connect(broker);
    vmmfd_watch_free(watch);
    FAILS(VMMFD_INVALID, vmmfd_watch_next(watch, 0, &event, &found));
    vmmfd_broker_free(broker);
}
