/* Receives the frames of publisher.c, and checks each byte: subscriber PATH
 *
 *   cc -std=c11 -Wall -Wextra -pedantic subscriber.c -o subscriber $(pkg-config --cflags --libs vmmfd) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vmmfd.h>

static void check(vmmfd_error_t *error) {
    if (error == NULL)
        return;
    fprintf(stderr, "subscriber: %s%s%s\n", error->message, error->hint ? ": " : "", error->hint ? error->hint : "");
    vmmfd_error_free(error);
    exit(1);
}

static void require(bool condition, const char *message, uint64_t number) {
    if (!condition) {
        fprintf(stderr, "subscriber: frame %llu %s\n", (unsigned long long)number, message);
        exit(1);
    }
}

int main(int argc, char **argv) {
    static unsigned char frame[480 * 640], expected[sizeof frame];
    vmmfd_subscriber_t *subscriber;
    uint64_t frames = 0;
    if (argc < 2)
        return fputs("usage: subscriber PATH\n", stderr), 2;
    /* A viewer would use the default policy, VMMFD_LATEST, which skips to the newest frame. */
    vmmfd_subscriber_options_t options = {VMMFD_SUBSCRIBER_OPTIONS, .policy = VMMFD_EVERY};
    check(vmmfd_subscriber_connect(NULL, argv[1], &options, &subscriber));
    vmmfd_sample_t sample = {.struct_size = sizeof sample};
    for (;;) {
        check(vmmfd_subscriber_receive(subscriber, VMMFD_FOREVER, &sample));
        if (sample.result != VMMFD_SAMPLE)
            break;
        const vmmfd_format_t *format = sample.format;
        require(sample.size == sizeof frame && format->array_count == 1 && strcmp(format->names[0], "frame") == 0,
                "has another format", sample.number);
        require(sample.skipped == 0, "follows skipped frames", sample.number);
        /* A program with a GPU launches its kernels on `sample.address` instead. */
        check(vmmfd_memory_copy_out(sample.memory, 0, frame, sizeof frame));
        memset(expected, (int)(sample.number % 251), sizeof expected);
        require(memcmp(frame, expected, sizeof frame) == 0, "has wrong bytes", sample.number);
        vmmfd_memory_free(sample.memory); /* Gives the buffer back. */
        frames++;
    }
    if (sample.result == VMMFD_CRASHED)
        return fprintf(stderr, "subscriber: the publisher, process %d, died\n", sample.pid), 1;
    printf("received %llu frames\n", (unsigned long long)frames);
    vmmfd_subscriber_free(subscriber);
}
