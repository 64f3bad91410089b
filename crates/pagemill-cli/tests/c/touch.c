/* touch MIB MS: maps MIB, writes and checks the memory as fast as it can, keeps it for MS milliseconds, and
 * exits with 0. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    size_t len = strtoul(argv[1], NULL, 10) << 20;
    char *bytes = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == MAP_FAILED) return 1;
    for (size_t at = 0; at < len; at += 4096) bytes[at] = (char)(at >> 12) | 1;
    for (size_t at = 0; at < len; at += 4096) {
        if (bytes[at] != ((char)(at >> 12) | 1)) return 1;
    }
    puts("touched");
    fflush(stdout);
    usleep(strtoul(argv[2], NULL, 10) * 1000);
    return 0;
}
