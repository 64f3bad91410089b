/* The first process in the emulator: runs the cases listed in /cases, each in a control group of its own, writes the
   results to the second serial line (the first is the kernel's), and powers the emulator off.

       NAME MAX HIGH [VARIABLE=VALUE...] PROGRAM [ARGUMENT...]
                                               a line of /cases; MAX and HIGH are written to memory.max and memory.high

       @begin NAME WHAT                        the results of a case: its texts, then how it ended;
       a text                                  `@done` follows the last case
       @end
       @case NAME exit STATUS                  or `signal NUMBER` */
#include "check.h"
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <termios.h>

#define GROUPS "/sys/fs/cgroup"
#define OUTPUT "/tmp/output"
#define REPORT "/tmp/report.json"

static FILE *results;

static void mount_all(void) {
    static const char *const mounts[][2] = {
        {"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/dev/shm"},
        {"tmpfs", "/tmp"}, {"tmpfs", "/run"}, {"cgroup2", GROUPS},
    };
    for (size_t i = 0; i < sizeof mounts / sizeof *mounts; i++) {
        mkdir(mounts[i][1], 0755);
        CHECK(mount(mounts[i][0], mounts[i][1], mounts[i][0], 0, NULL) == 0);
    }
}

static void open_results(void) {
    struct termios raw;
    CHECK(results = fopen("/dev/ttyS1", "w"));
    CHECK(tcgetattr(fileno(results), &raw) == 0);
    cfmakeraw(&raw);
    CHECK(tcsetattr(fileno(results), TCSANOW, &raw) == 0);
}

/* Writes a text to an existing file. Returns whether the whole text was written. */
static int put(const char *folder, const char *file, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    int to = open(path, O_WRONLY);
    if (to < 0)
        return 0;
    int is_put = write(to, text, strlen(text)) == (ssize_t)strlen(text);
    close(to);
    return is_put;
}

/* Copies a file to the results, if the file exists. */
static void tell(const char *name, const char *what, const char *path) {
    FILE *from = fopen(path, "r");
    if (!from)
        return;
    fprintf(results, "@begin %s %s\n", name, what);
    for (int byte; (byte = getc(from)) != EOF;) putc(byte, results);
    fprintf(results, "\n@end\n");
    fclose(from);
}

static void become(const char *group, char **arguments) {
    CHECK(put(group, "cgroup.procs", "0"));
    int output = open(OUTPUT, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(dup2(output, 1) == 1 && dup2(output, 2) == 2);
    while (*arguments && strchr(*arguments, '=')) putenv(*arguments++);
    CHECK(*arguments);
    execv(arguments[0], arguments);
    CHECK(!"started");
}

static void run_case(const char *name, const char *max, const char *high, char **arguments) {
    char group[128], events[160];
    snprintf(group, sizeof group, GROUPS "/%s", name);
    snprintf(events, sizeof events, "%s/memory.events", group);
    CHECK(mkdir(group, 0755) == 0);
    CHECK(put(group, "memory.max", max) && put(group, "memory.high", high));
    put(group, "memory.swap.max", "0"); /* the file is missing without swap */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        become(group, arguments);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    tell(name, "output", OUTPUT);
    tell(name, "report", REPORT);
    tell(name, "events", events);
    unlink(REPORT);
    int has_exited = WIFEXITED(status);
    fprintf(results, "@case %s %s %d\n", name, has_exited ? "exit" : "signal",
            has_exited ? WEXITSTATUS(status) : WTERMSIG(status));
    fflush(results);
}

static void run_all(FILE *cases) {
    char line[512];
    while (fgets(line, sizeof line, cases)) {
        char *words[32] = {0}, *rest = line;
        size_t count = 0;
        while (count < 31 && (words[count] = strsep(&rest, " \n")) && *words[count]) count++;
        words[count] = NULL;
        CHECK(count >= 4);
        run_case(words[0], words[1], words[2], words + 3);
    }
}

int main(void) {
    mount_all();
    open_results();
    CHECK(put(GROUPS, "cgroup.subtree_control", "+memory"));
    FILE *cases = fopen("/cases", "r");
    CHECK(cases);
    run_all(cases);
    fprintf(results, "@done\n");
    fflush(results);
    tcdrain(fileno(results));
    sync();
    reboot(RB_POWER_OFF);
    return 1; /* if the first process ends, the kernel panics, which ends the emulator, too */
}
