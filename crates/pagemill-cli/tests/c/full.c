// full [BYTES]: allocates blocks of BYTES until three calls in a row fail. Prints the MiB, checks that every
// block has its number, and frees all.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct block {
    struct block *before;
    size_t number;
};

int main(int argc, char **argv) {
    size_t bytes = argc > 1 ? strtoul(argv[1], NULL, 10) : sizeof(struct block);
    struct block *last = NULL;
    size_t count = 0;
    for (int refused = 0; refused < 3;) {
        struct block *block = malloc(bytes);
        if (block == NULL) {
            refused++;
            continue;
        }
        refused = 0;
        memset(block, 1, bytes);
        block->before = last;
        block->number = count++;
        last = block;
    }
    printf("%zu MiB\n", count * bytes >> 20);
    while (last != NULL) {
        if (last->number != --count) {
            return 2;
        }
        struct block *before = last->before;
        free(last);
        last = before;
    }
    return count == 0 ? 0 : 3;
}
