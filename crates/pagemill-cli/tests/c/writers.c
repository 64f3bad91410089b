/* writers FOLDER THREADS MIB FILES: the threads write FILES files of MIB in total, as fast as they can.
 * Prints how many files were written, and how many writes failed. */
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

static const char *folder;
static long mib, files;
static long written[64], failed[64];

static void *write_files(void *argument) {
    long thread = (long)argument;
    char *piece = malloc(1 << 20);
    for (long file = 0; file < files; file++) {
        char name[256];
        memset(piece, (int)(1 + file % 250), 1 << 20);
        snprintf(name, sizeof name, "%s/%ld-%ld", folder, thread, file);
        int fd = open(name, O_CREAT | O_WRONLY | O_TRUNC, 0644);
        if (fd < 0) {
            failed[thread]++;
            continue;
        }
        for (long part = 0; part < mib; part++)
            if (write(fd, piece, 1 << 20) != 1 << 20)
                failed[thread]++;
        close(fd);
        written[thread]++;
        /* The newest file has its full length, since files are purged in LRU order. */
        fd = open(name, O_RDONLY);
        CHECK(fd >= 0 && lseek(fd, 0, SEEK_END) == mib << 20);
        close(fd);
    }
    return NULL;
}

int main(int argc, char **argv) {
    CHECK(argc == 5);
    folder = argv[1];
    long threads = atol(argv[2]);
    mib = atol(argv[3]);
    files = atol(argv[4]) / threads;
    pthread_t ids[64];
    for (long at = 0; at < threads; at++)
        CHECK(pthread_create(&ids[at], NULL, write_files, (void *)at) == 0);
    long all_written = 0, all_failed = 0;
    for (long at = 0; at < threads; at++) {
        pthread_join(ids[at], NULL);
        all_written += written[at];
        all_failed += failed[at];
    }
    printf("%ld %ld\n", all_written, all_failed);
    return 0;
}
