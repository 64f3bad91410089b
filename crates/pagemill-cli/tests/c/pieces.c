/* pieces MIB LEN KEEP: writes MIB in allocations of LEN bytes, and frees all of them but every KEEP-th (0:
 * all). Prints the process id, and waits until its input is closed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    size_t mib = strtoul(argv[1], 0, 0), len = strtoul(argv[2], 0, 0), keep = strtoul(argv[3], 0, 0);
    size_t count = (mib << 20) / len;
    char **pieces = malloc(count * sizeof *pieces);
    for (size_t i = 0; i < count; i++) {
        pieces[i] = malloc(len);
        memset(pieces[i], 1, len);
    }
    for (size_t i = 0; i < count; i++)
        if (!keep || i % keep)
            free(pieces[i]);
    printf("%d\n", (int)getpid());
    fflush(stdout);
    while (getchar() != EOF)
        ;
    printf("%d\n", (int)getpid());
    return argc != 4;
}
