//! A process that fills much memory, frees it, and then does nothing.

use std::thread;
use std::time::Duration;

use super::Outcome;
use crate::native::Tagged;

const PIECE: usize = 1 << 20;

/// Arguments of an idle process.
#[derive(Clone, Debug, clap::Args)]
pub struct Idle {
    #[arg(long)]
    pub mib: usize,
    /// Lifetime of the process; the bench may end it earlier.
    #[arg(long)]
    pub seconds: u64,
}

/// Fills memory, frees it, and sleeps.
pub fn run(arguments: &Idle) -> Outcome {
    let held: Vec<_> = (0..arguments.mib as u64).map(|tag| Tagged::touched(PIECE, tag)).collect();
    let taken = held.iter().flatten().count();
    drop(held);
    thread::sleep(Duration::from_secs(arguments.seconds));
    Ok(serde_json::json!({ "pieces": taken }))
}
