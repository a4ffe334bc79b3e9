/* Publishes camera frames: publisher BROKER SOCKET FRAMES [cuda|host]
 *
 * The frames take turns in the buffers of one object, which the broker keeps under the name `camera`. For each subscriber, the program then
 * needs a socket only for small records: "frame 17 is in buffer 1", and "buffer 1 is free". No frame is copied, and no descriptor is sent.
 *
 *   cc -std=c11 -Wall -Wextra -pedantic publisher.c -o publisher $(pkg-config --cflags --libs vmmfd) */
#define _GNU_SOURCE
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "frames.h"

/* Creates one memory with all buffers, puts it under the name, and returns it. */
static vmmfd_memory_t *put(const vmmfd_device_t *device, const vmmfd_broker_t *broker) {
    static const char *const names[BUFFERS] = {"frame0", "frame1", "frame2", "frame3"};
    vmmfd_named_array_t arrays[BUFFERS];
    vmmfd_array_t *made[BUFFERS];
    vmmfd_memory_t *memory;
    const uint64_t shape[2] = {HEIGHT, WIDTH};
    check(vmmfd_memory_create(device, (uint64_t)BUFFERS * HEIGHT * WIDTH, NULL, &memory));
    for (int i = 0; i < BUFFERS; i++) {
        vmmfd_layout_t layout = {.struct_size = sizeof layout, .dtype = "uint8", .dimensions = 2, .shape = shape};
        layout.offset = (uint64_t)i * HEIGHT * WIDTH;
        check(vmmfd_array_create(memory, &layout, &made[i]));
        arrays[i] = (vmmfd_named_array_t){.name = names[i], .array = made[i]};
    }
    /* The name ends with this process. */
    vmmfd_put_options_t options = {VMMFD_PUT_OPTIONS, .lifetime = VMMFD_WITH_MAKER, .metadata = "{\"encoding\": \"mono8\"}"};
    check(vmmfd_broker_put(broker, "camera", arrays, BUFFERS, &options, NULL));
    for (int i = 0; i < BUFFERS; i++)
        vmmfd_array_free(made[i]);
    return memory;
}

/* Waits for a subscriber. */
static int accept_subscriber(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    unlink(path);
    require(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 1) == 0, path);
    int subscriber = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    require(subscriber >= 0, "accept");
    close(listener);
    unlink(path);
    return subscriber;
}

int main(int argc, char **argv) {
    static unsigned char frame[HEIGHT * WIDTH];
    vmmfd_device_t *device;
    vmmfd_broker_t *broker;
    if (argc < 4)
        return fputs("usage: publisher BROKER SOCKET FRAMES [cuda|host]\n", stderr), 2;
    uint64_t frames = strtoull(argv[3], NULL, 10);
    check(vmmfd_device_open(argc > 4 ? argv[4] : NULL, NULL, &device));
    check(vmmfd_broker_connect(argv[1], NULL, &broker));
    vmmfd_memory_t *memory = put(device, broker);
    int subscriber = accept_subscriber(argv[2]);
    for (uint64_t next = 0; next < frames; next++) {
        struct turn turn = {next, (uint32_t)(next % BUFFERS)}, given_back;
        /* The first turns find free buffers; then the subscriber gives the oldest back. */
        if (next >= BUFFERS)
            require(recv(subscriber, &given_back, sizeof given_back, 0) == sizeof given_back && given_back.buffer == turn.buffer, "recv");
        memset(frame, (int)(next % 251), sizeof frame);
        check(vmmfd_memory_copy_in(memory, (uint64_t)turn.buffer * sizeof frame, frame, sizeof frame));
        require(send(subscriber, &turn, sizeof turn, MSG_NOSIGNAL) == sizeof turn, "send");
    }
    for (uint64_t left = frames < BUFFERS ? frames : BUFFERS; left > 0; left--) {
        struct turn given_back;
        require(recv(subscriber, &given_back, sizeof given_back, 0) == sizeof given_back, "recv");
    }
    printf("published %llu frames\n", (unsigned long long)frames);
    close(subscriber);
    vmmfd_memory_free(memory);
    vmmfd_broker_free(broker);
    vmmfd_device_free(device);
}
