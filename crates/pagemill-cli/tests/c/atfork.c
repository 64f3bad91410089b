/* atfork CASE COUNT: forks, in a process with a library whose constructor registered handlers before anything was allocated.
 *
 * `allocate`: its handlers allocate. `join`: its prepare handler joins threads that allocate. `order`: handlers of this
 * program, registered in `main`, run within those of the library, and all of them may allocate. `unload PLUGIN`: the handlers
 * of a plugin end with it. */
#include "check.h"
#include <dlfcn.h>

static void *of_library(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    CHECK(found);
    return found;
}

static char said[8];

static void say(char letter) {
    free(malloc(hidden(70000)));
    free(malloc(hidden(70)));
    said[strlen(said)] = letter;
}

static void first_prepare(void) { say('a'); }
static void second_prepare(void) { say('b'); }
static void first_after(void) { say('c'); }
static void second_after(void) { say('d'); }

static void fork_once(const char *expected) {
    memset(said, 0, sizeof said);
    void *held = malloc(3 * MIB);
    CHECK(held);
    mark(held, 3 * MIB, 7);
    pid_t child = fork();
    CHECK(child >= 0);
    CHECK(strcmp(said, expected) == 0);
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
    /* Its handlers are unmapped: one that is still registered would end this. */
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
