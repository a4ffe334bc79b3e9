/* Publishes camera frames to any number of subscribers: publisher PATH FRAMES [cuda|host]
 *
 * It begins with the first subscriber. The frames take turns in the buffers of one pool, which each subscriber maps once: after that no
 * frame costs a copy, a descriptor or a mapping. A subscriber with VMMFD_EVERY may delay the publisher, for 30 s; no other can.
 *
 *   cc -std=c11 -Wall -Wextra -pedantic publisher.c -o publisher $(pkg-config --cflags --libs vmmfd) */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vmmfd.h>

enum { HEIGHT = 480, WIDTH = 640 };

static void check(vmmfd_error_t *error) {
    if (error == NULL)
        return;
    fprintf(stderr, "publisher: %s%s%s\n", error->message, error->hint ? ": " : "", error->hint ? error->hint : "");
    vmmfd_error_free(error);
    exit(1);
}

/* Waits for the first event. */
static void wait_for_subscriber(const vmmfd_publisher_t *publisher) {
    struct pollfd waiting = {.events = POLLIN};
    vmmfd_stream_event_t event = {.struct_size = sizeof event};
    check(vmmfd_publisher_descriptor(publisher, &waiting.fd));
    for (bool found = false; !found;) {
        poll(&waiting, 1, -1);
        check(vmmfd_publisher_event(publisher, &event, &found));
    }
    printf("process %d has joined\n", event.pid);
}

int main(int argc, char **argv) {
    static unsigned char frame[HEIGHT * WIDTH];
    vmmfd_device_t *device;
    vmmfd_publisher_t *publisher;
    vmmfd_memory_t *loan;
    if (argc < 3)
        return fputs("usage: publisher PATH FRAMES [cuda|host]\n", stderr), 2;
    uint64_t frames = strtoull(argv[2], NULL, 10);
    check(vmmfd_device_open(argc > 3 ? argv[3] : NULL, NULL, &device));
    /* Eight buffers: one for each of six subscribers, one for the loan, and the newest. */
    vmmfd_publisher_options_t options = {VMMFD_PUBLISHER_OPTIONS, .every_ms = 30000};
    check(vmmfd_publisher_create(device, sizeof frame, 8, &options, &publisher));
    const uint64_t shape[2] = {HEIGHT, WIDTH};
    const vmmfd_layout_t layout = {.struct_size = sizeof layout, .dtype = "uint8", .dimensions = 2, .shape = shape};
    vmmfd_format_t format = {.struct_size = sizeof format, .array_count = 1};
    format.names = (const char *[]){"frame"};
    format.layouts = (const vmmfd_layout_t *[]){&layout};
    check(vmmfd_publisher_set_format(publisher, &format));
    check(vmmfd_publisher_listen(publisher, NULL, argv[1]));
    wait_for_subscriber(publisher);
    for (uint64_t next = 1; next <= frames; next++) {
        check(vmmfd_publisher_loan(publisher, 0, 60000, &loan));
        memset(frame, (int)(next % 251), sizeof frame);
        /* A program with a GPU launches its kernels on the address of vmmfd_memory_info instead. */
        check(vmmfd_memory_copy_in(loan, 0, frame, sizeof frame));
        check(vmmfd_loan_publish(loan, "left eye", 8, false, NULL));
    }
    check(vmmfd_publisher_finish(publisher, 60000));
    printf("published %llu frames\n", (unsigned long long)frames);
    vmmfd_publisher_free(publisher);
    vmmfd_device_free(device);
}
