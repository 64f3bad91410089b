//! When free memory returns to the system without a request and without pressure.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// When free memory returns to the system without a request.
///
/// Its text form is used in `PAGEMILL_RETURN` and `pagemill run --return`: `keep`, `eager`, `balanced`, or
/// `balanced=SECONDS`.
///
/// ```
/// use pagemill::Pagemill;
/// use pagemill::reclaim::Return;
///
/// let policy: Return = "balanced=30".parse().unwrap();
/// assert_eq!(policy, Return::after_seconds(30).unwrap());
/// assert!("soon".parse::<Return>().is_err());
/// Pagemill::of_process()?.set_return(policy);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    /// Free memory is not returned by age, only on request and under pressure.
    Keep,
    /// Memory returns after it has been free and not reused for this long.
    After(Duration),
}

/// The error of parsing a text that is not the text form of a [`Return`].
///
/// Example: [`Return`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseReturnError;

impl fmt::Display for ParseReturnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected keep, eager, balanced or balanced=SECONDS (1 to {})", Return::LONGEST.as_secs())
    }
}

impl std::error::Error for ParseReturnError {}

impl Return {
    /// The default, `balanced`: after 10 seconds.
    pub const BALANCED: Self = Self::After(Duration::from_secs(10));

    /// The policy `eager`: after one second.
    pub const EAGER: Self = Self::After(Duration::from_secs(1));

    /// Maximum time without reuse that [`Return::parse`] and [`Return::after_seconds`] accept. The heap treats more
    /// than 36 minutes as 36 minutes.
    pub const LONGEST: Duration = Duration::from_secs(30 * 60);

    /// Parses the text form of a policy. Allocates nothing.
    ///
    /// # Errors
    ///
    /// [`ParseReturnError`] for any other text, and for an age of 0 or above [`Return::LONGEST`].
    pub fn parse(text: &str) -> Result<Self, ParseReturnError> {
        match text {
            "keep" => Ok(Self::Keep),
            "eager" => Ok(Self::EAGER),
            "balanced" => Ok(Self::BALANCED),
            _ => {
                let seconds = text.strip_prefix("balanced=").ok_or(ParseReturnError)?;
                let seconds = seconds.parse().map_err(|_| ParseReturnError)?;
                Self::after_seconds(seconds).ok_or(ParseReturnError)
            }
        }
    }

    /// The policy that returns memory after this many seconds. `None` for 0 and for more than [`Return::LONGEST`].
    pub fn after_seconds(seconds: u64) -> Option<Self> {
        (1..=Self::LONGEST.as_secs()).contains(&seconds).then(|| Self::After(Duration::from_secs(seconds)))
    }

    /// The age after which memory returns; `None` for [`Return::Keep`].
    pub fn age(self) -> Option<Duration> {
        match self {
            Self::Keep => None,
            Self::After(age) => Some(age),
        }
    }
}

impl FromStr for Return {
    type Err = ParseReturnError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl fmt::Display for Return {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Keep => f.write_str("keep"),
            Self::EAGER => f.write_str("eager"),
            Self::BALANCED => f.write_str("balanced"),
            Self::After(age) => write!(f, "balanced={}", age.as_secs()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Every text form must parse, and print as the same text. Other texts must be rejected.
    #[test]
    fn return_policies_round_trip() {
        for text in ["keep", "eager", "balanced", "balanced=3", "balanced=1800"] {
            assert_eq!(Return::parse(text).unwrap().to_string(), text);
        }
        for text in ["", "Keep", "balanced=", "balanced=0", "balanced=1.5", "balanced=86401", "balanced=-1", "3"] {
            assert_eq!(Return::parse(text), Err(ParseReturnError), "{text}");
        }
        assert_eq!(Return::parse("balanced=10"), Ok(Return::BALANCED));
        assert_eq!(Return::Keep.age(), None);
    }
}
