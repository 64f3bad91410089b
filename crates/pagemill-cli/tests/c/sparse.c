/* malloc and calloc return 10 GB, like mmap. The program touches only a few of the pages. */
#include "check.h"

int main(void) {
    size_t all = hidden((size_t)10 * 1000 * 1000 * 1000), step = 97 * MIB;
    for (int round = 0; round < 3; round++) {
        char *memory = round == 1 ? malloc(all) : calloc(all / 8, 8);
        CHECK(memory);
        for (size_t at = 0; at < all; at += step) {
            CHECK(round == 1 || memory[at] == 0);
            memory[at] = 1;
        }
        CHECK(round == 1 || memory[all - 1] == 0);
        for (size_t at = 0; at < all; at += step)
            CHECK(memory[at] == 1);
        fprintf(stderr, "resident: %zu\n", resident());
        CHECK(resident() < 400 * MIB);
        free(memory);
    }
    malloc_trim(0);
    fprintf(stderr, "resident: %zu\n", resident());
    CHECK(resident() < 100 * MIB);
    return 0;
}
