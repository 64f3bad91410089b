/* loader PLUGIN: loads and unloads a library that allocates, while another thread allocates. */
#include "check.h"
#include <dlfcn.h>

static volatile int is_over;

static void *churn(void *seed) {
    uint64_t state = (uint64_t)seed;
    while (!is_over)
        free(malloc((size_t)1 << next_random(&state) % 20));
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, churn, NULL) == 0);
    for (int i = 0; i < 200; i++) {
        void *library = dlopen(argv[1], i % 2 ? RTLD_NOW : RTLD_LAZY);
        if (!library)
            dprintf(2, "%s\n", dlerror());
        CHECK(library);
        size_t (*sum)(void) = (size_t(*)(void))dlsym(library, "plugin_sum");
        void *(*gift)(size_t) = (void *(*)(size_t))dlsym(library, "plugin_gift");
        CHECK(sum && gift && sum() == 1000 * 100 + 20000 * 190);
        void *small = gift(100), *large = gift(200000);
        CHECK(dlclose(library) == 0);
        memset(small, 1, 100), memset(large, 1, 200000);
        free(small), free(large);
    }
    is_over = 1;
    pthread_join(thread, NULL);
    return 0;
}
