/* namespace PLUGIN: loads a plugin into new linker namespaces (dlmopen), where it allocates, while this
 * program allocates and forks. */
#include "check.h"
#include <dlfcn.h>

int main(int argc, char **argv) {
    alarm(100);
    for (int i = 0; i < 3; i++) {
        void *plugin = dlmopen(LM_ID_NEWLM, argv[1], RTLD_NOW);
        CHECK(plugin);
        void (*plugin_work)(void) = dlsym(plugin, "plugin_work");
        void *(*plugin_give)(void) = dlsym(plugin, "plugin_give");
        void (*plugin_take)(void *) = dlsym(plugin, "plugin_take");
        plugin_work();
        char *given = plugin_give();
        char *own = malloc(300000);
        mark(own, 300000, 9);
        CHECK(given[0] == 4 && given[199999] == 4);
        pid_t child = fork();
        if (child == 0) {
            plugin_work();
            CHECK(is_marked(own, 300000, 300000, 9));
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        plugin_take(given);
        free(own);
    }
    return 0;
}
