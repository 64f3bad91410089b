/* Pagemill, a user-space memory manager: the C interface.
 *
 * Link with -lpagemill_ffi. Under `pagemill run` the functions are available without it.
 *
 *     memset(tile, 7, len);
 *     pagemill_vrange(tile, len, PAGEMILL_VOLATILE, PAGEMILL_FULL, NULL);
 *     ...
 *     int purged;
 *     if (pagemill_vrange(tile, len, PAGEMILL_NONVOLATILE, PAGEMILL_FULL, &purged) > 0 && purged)
 *         memset(tile, 7, len);
 *
 * Complete programs, which the tests compile and run: tests/c of the crate pagemill-ffi.
 */
#ifndef PAGEMILL_H
#define PAGEMILL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PAGEMILL_NONVOLATILE 0
#define PAGEMILL_VOLATILE 1
#define PAGEMILL_VOLATILE_STRICT 2

/* How a volatile range is purged: as a whole, or from its end, one chunk at a time, alternating with other ranges. */
#define PAGEMILL_FULL 0
#define PAGEMILL_PARTIAL 1

/* Marks `len` bytes from `addr` on as volatile or nonvolatile.
 *
 * PAGEMILL_VOLATILE: the contents may be purged when memory is needed, the least recently marked range first. Purged
 * bytes read zero.
 *
 * PAGEMILL_VOLATILE_STRICT: as PAGEMILL_VOLATILE, but accessing a purged page raises SIGBUS with the address in
 * si_addr, until the page is nonvolatile. System calls return EFAULT. Needs guard pages (Linux 6.13). The first strict
 * mark installs a handler for SIGSEGV in front of the program's: see pagemill_handle_fault.
 *
 * PAGEMILL_NONVOLATILE: the contents are not purged any more. *purged (purged may be null) is set to 1 if any bytes
 * were purged since the range was marked, else to 0. Purged bytes read zero.
 *
 * Marking a marked range replaces its mark. Unmarking an unmarked range does nothing. The program must unmark memory
 * before it unmaps, moves, replaces or frees it, and strict memory before it changes its protection. Shared, file,
 * locked and protected memory and the stack of the first thread can be marked but are never purged.
 *
 * Signal handlers must not call the function, because it takes locks, like malloc. Exception: the handler of a SIGBUS
 * that a purged page raised may call it for that page.
 *
 * Returns the number of bytes that are marked now or, when unmarking, that were marked. On error returns -1 and sets
 * errno. Nothing has changed then, except *purged, which is 0:
 *   EINVAL  addr or len is no multiple of the page size, or mode or behaviour is unknown
 *   ENOMEM  a part is not mapped (when unmarking, only if no part was marked), or there is no memory or address
 *           space for the mark
 *   EFAULT  purged is not a writable address
 *   EOPNOTSUPP  strict mark, and the kernel has no guard pages
 */
ssize_t pagemill_vrange(void *addr, size_t len, int mode, int behaviour, int *purged);

/* A SIGSEGV handler (SA_SIGINFO) that the program installs after its first strict mark must call this first, with its
 * own arguments, and return at once if the result is not 0. The access is then repeated, or SIGBUS is delivered at the
 * faulting instruction. Handlers installed before that mark, and all handlers under `pagemill run`, need not call it.
 */
int pagemill_handle_fault(int signal, const void *info, void *context);

/* Memory of this process in bytes, as measured by the call. */
struct pagemill_figures {
    uint64_t resident; /* resident memory that Pagemill allocated */
    uint64_t giveable; /* memory that can be returned at once: free and volatile memory, also volatile memory that
                        * Pagemill did not allocate */
    uint64_t net;      /* resident memory that Pagemill allocated and that is not giveable */
};

/* Measures the process and fills `figures`. Costs some 20 us for each 64 MiB of volatile memory. Signal handlers must
 * not call it. Returns 0, or -1 with errno if Pagemill cannot start.
 */
int pagemill_figures(struct pagemill_figures *figures);

#ifdef __cplusplus
}
#endif

#endif
