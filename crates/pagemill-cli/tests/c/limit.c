/* limit KIB LEAST-MIB MOST-MIB [same]: allocates and writes blocks of KIB until a call fails, which must
 * happen between the two amounts. Frees half and allocates again. Without `same`, frees all and allocates
 * blocks of another size. */
#include "check.h"

enum { MOST = 1 << 20 };

static void *blocks[MOST];

static long fill(long from, size_t size) {
    long count = from;
    while (count < MOST) {
        errno = 0;
        void *memory = malloc(size);
        if (!memory) {
            CHECK(errno == ENOMEM);
            return count;
        }
        mark(memory, size, count);
        blocks[count++] = memory;
    }
    dprintf(2, "never refused\n");
    _exit(99);
}

int main(int argc, char **argv) {
    size_t size = (size_t)atol(argv[1]) * KIB, least = (size_t)atol(argv[2]) * MIB, most = (size_t)atol(argv[3]) * MIB;
    long count = fill(0, size);
    fprintf(stderr, "refused after %zu MiB\n", count * size / MIB);
    CHECK(count * size >= least && count * size <= most);
    /* Further calls fail or return memory that is not touched yet. The contents of the blocks stay intact. */
    for (int i = 0; i < 10; i++) {
        errno = 0;
        void *more = malloc(size > MIB ? size : MIB);
        CHECK(more || errno == ENOMEM);
        free(more);
        errno = 0;
        more = calloc(1, size > MIB ? size : MIB);
        CHECK(more || errno == ENOMEM);
        free(more);
        char *kept = realloc(blocks[0], size + 32 * MIB);
        CHECK(!kept || is_marked(kept, size, size, 0));
        if (kept)
            blocks[0] = kept;
    }
    for (long i = 0; i < count; i++)
        CHECK(is_marked(blocks[i], size, size, i));
    /* After half of the memory was freed, about as much can be allocated again. */
    long half = count / 2;
    for (long i = half; i < count; i++)
        free(blocks[i]);
    long again = fill(half, size);
    fprintf(stderr, "%ld blocks, then %ld again from %ld\n", count, again, half);
    CHECK(again >= count - 1 - (long)(4 * MIB / size));
    for (long i = 0; i < again; i++) {
        CHECK(is_marked(blocks[i], size, size, i));
        free(blocks[i]);
    }
    if (argc > 4)
        return 0;
    size_t other = size / 3;
    long others = fill(0, other);
    fprintf(stderr, "%zu MiB in other sizes\n", others * other / MIB);
    CHECK(others * other >= least * 9 / 10);
    for (long i = 0; i < others; i++) {
        CHECK(is_marked(blocks[i], other, other, i));
        free(blocks[i]);
    }
    return 0;
}
