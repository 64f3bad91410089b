/* atfork CASE COUNT [PLUGIN]: forks COUNT times, with a library whose constructor registered fork handlers
 * before the first allocation.
 *
 * `allocate`: the library's handlers allocate. `join`: its prepare handler joins threads that allocate.
 * `order`: the handlers that this program registers in `main` run in the right order, and all may allocate.
 * `unload PLUGIN`: the handlers of an unloaded plugin are not called. */
#include "check.h"
#include <dlfcn.h>

static void *of_library(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    CHECK(found);
    return found;
}

static char called_handlers[8];

static void record_call(char letter) {
    free(malloc(hidden(70000)));
    free(malloc(hidden(70)));
    called_handlers[strlen(called_handlers)] = letter;
}

static void first_prepare(void) { record_call('a'); }
static void second_prepare(void) { record_call('b'); }
static void first_after(void) { record_call('c'); }
static void second_after(void) { record_call('d'); }

static void fork_once(const char *expected) {
    memset(called_handlers, 0, sizeof called_handlers);
    void *held = malloc(3 * MIB);
    CHECK(held);
    mark(held, 3 * MIB, 7);
    pid_t child = fork();
    CHECK(child >= 0);
    CHECK(strcmp(called_handlers, expected) == 0);
    CHECK(is_marked(held, 3 * MIB, 3 * MIB, 7));
    free(held);
    if (child == 0)
        exit(0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void unload(const char *plugin) {
    void *loaded = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    CHECK(loaded);
    int *count = dlsym(loaded, "plugin_count");
    fork_once("");
    CHECK(*count == 2);
    CHECK(dlclose(loaded) == 0);
    /* The handlers of the plugin are unmapped, so a call of one would end this program. */
    fork_once("");
}

int main(int argc, char **argv) {
    alarm(120);
    void (*start_threads)(void) = of_library("atfork_start_threads");
    void (*end_threads)(void) = of_library("atfork_end_threads");
    int (*ran)(int) = of_library("atfork_ran");
    int count = atoi(argv[2]);
    int is_order = strcmp(argv[1], "order") == 0;
    if (strcmp(argv[1], "join") == 0)
        start_threads();
    if (is_order) {
        CHECK(pthread_atfork(first_prepare, first_after, first_after) == 0);
        CHECK(pthread_atfork(second_prepare, second_after, second_after) == 0);
    }
    for (int i = 0; i < count; i++)
        fork_once(is_order ? "bacd" : "");
    CHECK(ran(0) == count && ran(1) == count && ran(2) == 0);
    if (strcmp(argv[1], "unload") == 0)
        unload(argv[3]);
    if (strcmp(argv[1], "join") == 0)
        end_threads();
    return 0;
}
