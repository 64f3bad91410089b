/* ram PAGEMILL: in a mount of Pagemill, writes more volatile files than the group's limit allows, and one
 * other file. No process is killed, a full file system has room again after a short time, and the newest volatile file
 * and the other file are intact. */
#include "check.h"
#include <fcntl.h>
#include <sys/stat.h>

static const char *pagemill;

/* Runs the command, and checks that it succeeds. */
static void run(char *const arguments[]) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        execv(pagemill, arguments);
        _exit(127);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* Writes all bytes, and retries while the file system is full. In an emulator the controller may be late by
 * any time, but it must make room. */
static void write_all(int fd, const char *piece, size_t len) {
    for (int tries = 0; len > 0;) {
        ssize_t count = write(fd, piece, len);
        CHECK(count > 0 || (errno == ENOSPC && tries++ < 60000));
        if (count > 0) {
            piece += count;
            len -= (size_t)count;
        } else {
            usleep(1000);
        }
    }
}

static void write_file(const char *name, size_t mib, int byte) {
    static char piece[1 << 16];
    memset(piece, byte, sizeof piece);
    int fd = open(name, O_CREAT | O_WRONLY | O_TRUNC, 0644);
    CHECK(fd >= 0);
    for (size_t at = 0; at < mib * MIB; at += sizeof piece)
        write_all(fd, piece, sizeof piece);
    CHECK(close(fd) == 0);
}

static void check_file(const char *name, size_t mib, int byte) {
    static unsigned char piece[1 << 16];
    int fd = open(name, O_RDONLY);
    CHECK(fd >= 0);
    size_t len = 0;
    for (ssize_t count; (count = read(fd, piece, sizeof piece)) > 0; len += (size_t)count)
        CHECK(piece[0] == byte && piece[count - 1] == byte);
    CHECK(len == mib * MIB);
    close(fd);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    pagemill = argv[1];
    CHECK(mkdir("/tmp/ram", 0755) == 0);
    run((char *[]){"pagemill", "mount", "/tmp/ram", "--size", "300M", "--daemon", NULL});
    CHECK(mkdir("/tmp/ram/cache", 0755) == 0);
    run((char *[]){"pagemill", "mark", "--volatile", "full", "/tmp/ram/cache", NULL});
    write_file("/tmp/ram/kept", 8, 0x4b);
    char name[64];
    for (int file = 1; file <= 60; file++) {
        snprintf(name, sizeof name, "/tmp/ram/cache/%d", file);
        write_file(name, 4, file);
    }
    check_file(name, 4, 60);
    check_file("/tmp/ram/kept", 8, 0x4b);
    CHECK(access("/tmp/ram/cache/1", F_OK) != 0);
    run((char *[]){"pagemill", "status", "/tmp/ram", "--json", NULL});
    run((char *[]){"pagemill", "umount", "/tmp/ram", NULL});
    return 0;
}
