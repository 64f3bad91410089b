/* filter refuse|kill PROGRAM...: starts a program that may make few system calls; others are refused (ENOSYS), or kill it. */
#include "check.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static const int allowed[] = {
    SYS_read, SYS_write, SYS_close, SYS_openat, SYS_newfstatat, SYS_fstat, SYS_mmap, SYS_munmap, SYS_mprotect,
    SYS_mremap, SYS_madvise, SYS_brk, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_ioctl,
    SYS_pread64, SYS_access, SYS_getpid, SYS_gettid, SYS_clone, SYS_clone3, SYS_execve, SYS_exit,
    SYS_exit_group, SYS_wait4, SYS_futex, SYS_set_tid_address, SYS_set_robust_list, SYS_rseq, SYS_prlimit64,
    SYS_arch_prctl, SYS_getrandom, SYS_fcntl, SYS_lseek, SYS_clock_gettime, SYS_clock_nanosleep,
    SYS_nanosleep, SYS_sched_yield, SYS_tgkill, SYS_sched_getaffinity, SYS_geteuid, SYS_getuid, SYS_getegid,
    SYS_getgid, SYS_getppid, SYS_uname, SYS_readlink, SYS_dup, SYS_dup2, SYS_pipe2, SYS_sigaltstack,
};

#define COUNT (sizeof allowed / sizeof *allowed)

int main(int argc, char **argv) {
    struct sock_filter filter[2 * COUNT + 2];
    int at = 0;
    filter[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < COUNT; i++) {
        filter[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], 0, 1);
        filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    int other = strcmp(argv[1], "kill") ? SECCOMP_RET_ERRNO | ENOSYS : SECCOMP_RET_KILL_PROCESS;
    filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, other);
    struct sock_fprog program = {at, filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    execvp(argv[2], argv + 2);
    return 91;
}
