//! The clock of a file system's timestamps.

/// Source of timestamps: nanoseconds since 1970. The clock may go back.
pub(crate) enum Clock {
    System,
    Custom(Box<dyn Fn() -> i64 + Send + Sync>),
}

impl Clock {
    #[inline]
    pub fn now_ns(&self) -> i64 {
        match self {
            Self::System => pagemill_sys::clock::wall_coarse_ns(),
            Self::Custom(now) => now(),
        }
    }
}
