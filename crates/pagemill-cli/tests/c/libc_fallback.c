// libc_fallback KIB [CALLS]: allocates KIB in allocations of 10 KiB, calls malloc and free CALLS times, and
// prints whether Pagemill has reserved its arena of terabytes. All live memory keeps its contents.
#include "check.h"

static int has_arena(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    unsigned long from, to;
    char line[512];
    int found = 0;
    while (fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx", &from, &to) == 2 && to - from >= 1UL << 40) found = 1;
    }
    fclose(maps);
    return found;
}

int main(int argc, char **argv) {
    enum { PIECE = 10 << 10, MOST = 10000 };
    static char *held[MOST];
    int pieces = atoi(argv[1]) / 10, calls = argc > 2 ? atoi(argv[2]) : 0;
    CHECK(pieces <= MOST);
    for (int i = 0; i < pieces; i++) {
        held[i] = malloc(PIECE);
        CHECK(held[i]);
        memset(held[i], i & 255, PIECE);
    }
    for (int i = 0; i < calls; i++) free(malloc(i % 1000));
    for (int i = 0; i < pieces; i++) {
        if (i % 3 == 0) held[i] = realloc(held[i], 2 * PIECE);
        for (int at = 0; at < PIECE; at += 97) CHECK(held[i][at] == (char)(i & 255));
    }
    for (int i = 0; i < pieces; i++) {
        if (i % 3 == 0) free(held[i]);
    }
    printf("arena %s\n", has_arena() ? "yes" : "no");
    return 0;
}
