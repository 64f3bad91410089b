// A signal handler throws an exception. The exception can pass the signal frame, since no frame of Pagemill is
// on the stack.
#include <csignal>
#include <cstdio>
#include <dlfcn.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

static void fail(int number, siginfo_t *, void *) { throw number; }

__attribute__((noinline)) static int touch(volatile char *at)
{
	try {
		return *at;
	} catch (int number) {
		sigset_t mask;
		sigemptyset(&mask);
		sigaddset(&mask, number);
		sigprocmask(SIG_UNBLOCK, &mask, nullptr);
		return -number;
	}
}

int main()
{
	struct sigaction action = {};
	action.sa_sigaction = fail;
	action.sa_flags = SA_SIGINFO;
	sigaction(SIGSEGV, &action, nullptr);
	sigaction(SIGBUS, &action, nullptr);
	auto vrange = (ssize_t(*)(void *, size_t, int, int, int *))dlsym(RTLD_DEFAULT, "pagemill_vrange");
	size_t len = 16 * sysconf(_SC_PAGESIZE);
	char *area = (char *)mmap(nullptr, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	area[0] = 1;
	if (vrange(area, len, 2, 0, nullptr) < 0) {
		puts("skipped: no guard pages here");
		return 0;
	}
	malloc_trim(0);
	bool is_right = touch(area) == -SIGBUS && touch(nullptr) == -SIGSEGV && touch(area) == -SIGBUS;
	return is_right ? 0 : 1;
}
