/* Registers fork handlers when it is loaded. The handlers count their calls. */
#include <pthread.h>

int plugin_count;

static void count(void) {
    plugin_count++;
}

__attribute__((constructor)) static void begin(void) {
    pthread_atfork(count, count, count);
}
