//! A process that held much memory, freed it, and does nothing afterwards.

use std::thread;
use std::time::Duration;

use super::Outcome;
use crate::native::Tagged;

const PIECE: usize = 1 << 20;

/// Arguments of one idle process.
#[derive(Clone, Debug, clap::Args)]
pub struct Idle {
    #[arg(long)]
    pub mib: usize,
    /// Its lifetime; the bench may end it earlier.
    #[arg(long)]
    pub seconds: u64,
}

/// Fills, frees, sleeps.
pub fn run(arguments: &Idle) -> Outcome {
    let held: Vec<_> = (0..arguments.mib as u64).map(|tag| Tagged::touched(PIECE, tag)).collect();
    let taken = held.iter().flatten().count();
    drop(held);
    thread::sleep(Duration::from_secs(arguments.seconds));
    Ok(serde_json::json!({ "pieces": taken }))
}
