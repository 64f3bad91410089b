/* filter refuse|kill PROGRAM...: starts a program that may make only the system calls in `allowed`. All
 * other calls return ENOSYS (`refuse`) or kill the program (`kill`).
 * filter deny|deny-kill PROGRAM...: the calls in `forbidden`, which Docker's default profile forbids, return
 * EPERM or kill the program. */
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

static const int forbidden[] = {
    SYS_acct, SYS_add_key, SYS_bpf, SYS_clock_adjtime, SYS_clock_settime, SYS_delete_module, SYS_finit_module,
    SYS_get_mempolicy, SYS_init_module, SYS_io_uring_enter, SYS_io_uring_register, SYS_io_uring_setup, SYS_kcmp,
    SYS_kexec_load, SYS_keyctl, SYS_mbind, SYS_mount, SYS_move_pages, SYS_name_to_handle_at, SYS_open_by_handle_at,
    SYS_perf_event_open, SYS_pivot_root, SYS_process_vm_readv, SYS_process_vm_writev, SYS_ptrace, SYS_quotactl,
    SYS_reboot, SYS_request_key, SYS_set_mempolicy, SYS_setns, SYS_settimeofday, SYS_swapoff, SYS_swapon,
    SYS_umount2, SYS_unshare, SYS_userfaultfd,
};

#define COUNT_OF(list) (sizeof list / sizeof *list)

int main(int argc, char **argv) {
    int is_deny = !strncmp(argv[1], "deny", 4), is_kill = strstr(argv[1], "kill") != NULL;
    unsigned refusal = is_kill ? SECCOMP_RET_KILL_PROCESS : SECCOMP_RET_ERRNO | (is_deny ? EPERM : ENOSYS);
    const int *calls = is_deny ? forbidden : allowed;
    size_t count = is_deny ? COUNT_OF(forbidden) : COUNT_OF(allowed);
    struct sock_filter filter[2 * (COUNT_OF(forbidden) + COUNT_OF(allowed)) + 2];
    int at = 0;
    filter[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < count; i++) {
        filter[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], 0, 1);
        filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, is_deny ? refusal : SECCOMP_RET_ALLOW);
    }
    filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, is_deny ? SECCOMP_RET_ALLOW : refusal);
    struct sock_fprog program = {at, filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    execvp(argv[2], argv + 2);
    return 91;
}
