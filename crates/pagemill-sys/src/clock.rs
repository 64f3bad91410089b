//! Clocks: a coarse one for ordering, and fine ones for measuring.
#![allow(unsafe_code)] // clock_gettime

/// Returns the time of one of the kernel's clocks, in nanoseconds.
fn read_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes only `time`.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Monotonic time in nanoseconds, as of the last timer tick (1 to 10 ms old). Makes no system call.
pub fn coarse_ns() -> u64 {
    read_ns(libc::CLOCK_MONOTONIC_COARSE)
}

/// Time since 1970 in nanoseconds, as of the last timer tick. Makes no system call. It goes back when the clock is set.
pub fn wall_coarse_ns() -> i64 {
    read_ns(libc::CLOCK_REALTIME_COARSE) as i64
}

/// Monotonic time in nanoseconds. Makes no system call where the clock source allows reading it in user space.
pub fn fine_ns() -> u64 {
    read_ns(libc::CLOCK_MONOTONIC)
}

/// Nanoseconds of CPU time that the calling thread has used.
pub fn own_cpu_ns() -> u64 {
    read_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Nanoseconds of CPU time that all other threads of this process have used.
pub fn others_cpu_ns() -> u64 {
    read_ns(libc::CLOCK_PROCESS_CPUTIME_ID).saturating_sub(own_cpu_ns())
}
